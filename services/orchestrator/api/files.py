"""Uploaded files, in the shape of OpenAI's `/v1/files`. Errors are problem documents, in which
OpenAI's clients find their `error` too."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import unicodedata
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from fastapi import Query, Request
from starlette.datastructures import FormData, UploadFile

from services.orchestrator.api.access import Shares
from services.orchestrator.data.uploads import Quota, Uploads, new_id
from services.orchestrator.store.store import Store
from services.orchestrator.tasks import finish_despite_cancel
from shared.errors import BadRequest, Busy, HoneError, NotFound, TooLarge
from shared.explain import nearest
from shared.host.logs import get_logger
from shared.host.processes import run_in_thread
from shared.http.gate import caller_name, scope_key
from shared.http.operations import DOWNLOADED, DownloadedFile
from shared.http.service import Service
from shared.job import UPLOADED
from shared.settings import Settings
from shared.wire import FileDeleted, FileList, Purpose, UploadedFile

FORM = "multipart/form-data"
FIELDS = ("file", "purpose")
PURPOSES: tuple[str, ...] = get_args(Purpose)
MAX_PARTS = 8
"""Most parts of a form that are read, so that an error can name a superfluous part."""

MAX_FILENAME_CHARS = 255

MAX_FILE_BYTES = 512 << 20
"""Largest file: OpenAI's limit. HONE_MAX_BODY_MIB bounds it too."""

MAX_FILES = 10_000
"""Most files: as many as one list shows."""

Order = Literal["asc", "desc"]
T = TypeVar("T")

FORM_ROOM_BYTES = 1 << 16
"""Bytes of a form beside its file."""

MAX_UPLOADING_BYTES = 1 << 33
"""Most bytes of all uploads in progress: 16 of the largest files. They are in memory or, beyond 1
MiB, in temporary files, which no quota counts."""

LEAST_BYTES = 1 << 23
"""The least that an upload in progress counts, so that one API key has at most 512 of them."""

RETRY_AFTER_S = 5
"""Retry-After of an upload that exceeded the limit on uploads in progress."""

UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": [*FIELDS],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [*PURPOSES]},
                    },
                },
                "example": {"purpose": "fine-tune", "file": "the bytes of rows.jsonl"},
            }
        },
    }
}


def add_routes(service: Service, settings: Settings, store: Store) -> None:
    uploads = Uploads(settings.runs_dir, Quota(MAX_FILES, settings.max_files_gib))
    _add_upload(service, uploads, store)
    _add_reading(service, uploads, store)
    _add_removal(service, uploads, store)


def _add_upload(service: Service, uploads: Uploads, store: Store) -> None:
    under_way = Shares()

    @service.app.post("/v1/files", openapi_extra=UPLOAD_BODY)
    async def upload_file(request: Request) -> UploadedFile:
        """Stores a file, which jobs can name by its id. It is on disk when this answers. With an
        Idempotency-Key it is stored once."""
        size = max(_check_request(request), LEAST_BYTES)
        async with contextlib.AsyncExitStack() as held:
            held.enter_context(under_way.hold(size, MAX_UPLOADING_BYTES, _too_much_under_way))
            reading = request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS)
            form = await held.enter_async_context(reading)
            file, purpose = _fields(form)
            if file.size is not None and file.size > MAX_FILE_BYTES:
                raise _too_large(file.size)
            key = request.headers.get("idempotency-key")
            name = _filename(file)
            id = await _id_of(key, uploads)
            add = functools.partial(uploads.add, file.file, name, purpose, id, caller_name())
            async with _alone_with(uploads, id):
                stored = await _written(add)
                if key:  # a file with this id may have been removed before
                    await store.removals.undo(id)
        return stored


def _add_reading(service: Service, uploads: Uploads, store: Store) -> None:
    app = service.app

    @app.get("/v1/files")
    async def list_files(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Order = "desc",
        purpose: Purpose | None = None,
    ) -> FileList:
        """The uploaded files, newest first. `after` may also be a file that was removed within a
        day."""
        uploaded = await asyncio.to_thread(uploads.list)
        files = [file for file in uploaded if purpose in (None, file.purpose)]
        if after and UPLOADED.fullmatch(after) and after not in [file.id for file in files]:
            made_at = await store.removals.created_at(after)
            if made_at is not None:
                place, rises = (made_at, after), order == "asc"
                files = [each for each in files if ((each.created_at, each.id) > place) == rises]
                after = None
        page, more = _page_of(files if order == "asc" else files[::-1], after, limit)
        return FileList(
            data=tuple(page),
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=more,
        )

    @app.get("/v1/files/{file_id}")
    async def get_file(file_id: str) -> UploadedFile:
        """One file."""
        return await asyncio.to_thread(uploads.get, file_id)

    @app.get("/v1/files/{file_id}/content", response_class=DownloadedFile, responses=DOWNLOADED)
    async def get_content(file_id: str) -> DownloadedFile:
        """The bytes of a file, as they were uploaded. Takes `Range`."""
        file = await asyncio.to_thread(uploads.get, file_id)
        return DownloadedFile(uploads.path_of(file), file.filename)


def _add_removal(service: Service, uploads: Uploads, store: Store) -> None:
    @service.app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> FileDeleted:
        """Removes a file that no job needs any more."""
        await asyncio.to_thread(uploads.get, file_id)
        async with _alone_with(uploads, file_id):
            await store.removals.add(await asyncio.to_thread(uploads.get, file_id))
            try:
                await _written(functools.partial(uploads.remove, file_id))
            except HoneError:
                await store.removals.undo(file_id)
                raise
        return FileDeleted(id=file_id)


async def finish_removals(settings: Settings, store: Store) -> None:
    """Removes files whose removal was begun and not finished, because an orchestrator died in
    between."""
    uploads = Uploads(settings.runs_dir)
    try:
        for file in await run_in_thread(uploads.list):
            if await store.removals.created_at(file.id) is not None:
                await _finish_removal(uploads, store, file.id)
    except HoneError as error:
        get_logger().warning("removals of files not finished", reason=error.detail)


async def _finish_removal(uploads: Uploads, store: Store, id: str) -> None:
    """Finishes one removal. A file that was uploaded again since then stays."""
    with contextlib.suppress(NotFound):  # left by another orchestrator that was about to remove it
        async with _alone_with(uploads, id):
            file, removed = uploads.get(id), await store.removals.created_at(id)
            if removed == file.created_at:
                await _written(functools.partial(uploads.remove, id))
            elif removed is not None:
                await store.removals.undo(id)


async def _id_of(key: str | None, uploads: Uploads) -> str:
    """Returns the id for an upload. With the same idempotency key, another API key that sees its
    own jobs alone has another file."""
    return new_id(scope_key(key), await _written(uploads.secret)) if key else new_id(None)


@contextlib.asynccontextmanager
async def _alone_with(uploads: Uploads, id: str) -> AsyncGenerator[None]:
    """Locks the file's storing and removing. Otherwise a repeated upload could undo the note of a
    running removal, or answer with a file that is being removed."""
    held = contextlib.ExitStack()
    try:
        await _written(functools.partial(held.enter_context, uploads.alone_with(id)))
        yield
    finally:
        await _written(held.close)


async def _written(act: Callable[[], T]) -> T:
    """Returns the result of `act`. It may take long, because jobs write by the pool's threads too.
    A cancelled request waits for it, and keeps the file's lock as long."""
    return await finish_despite_cancel(run_in_thread(act))


def _page_of(
    files: Sequence[UploadedFile], after: str | None, limit: int
) -> tuple[Sequence[UploadedFile], bool]:
    """Returns up to `limit` files after the file with the id `after`, and whether there are more.
    Raises BadRequest for an unknown id."""
    ids = [file.id for file in files]
    if after is not None and after not in ids:
        raise BadRequest(f"after is {after!r}; expected an id of the list")
    start = 0 if after is None else ids.index(after) + 1
    return files[start : start + limit], len(files) > start + limit


def _too_much_under_way(held: int, left: int) -> Busy:
    return Busy(
        f"uploads of {held} bytes of the API key are under way, and {left} bytes are left for all; "
        f"expected at most as many with this one, which counts as {LEAST_BYTES} or more: send it "
        "again when another one is done",
        retry_after_s=RETRY_AFTER_S,
    )


def _check_request(request: Request) -> int:
    """Returns the most bytes that the form has. Raises BadRequest for a body that is not a form,
    and TooLarge for too large a form."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type != FORM:
        raise BadRequest(
            f"Content-Type is {content_type!r}; expected {FORM} with the fields 'file' and "
            "'purpose'"
        )
    most = MAX_FILE_BYTES + FORM_ROOM_BYTES
    length = request.headers.get("content-length", "")
    if not length.isdigit():
        return most
    if int(length) > most:
        raise _too_large(int(length))
    return int(length)


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"a file of {size} bytes; expected at most {MAX_FILE_BYTES}")


def _fields(form: FormData) -> tuple[UploadFile, Purpose]:
    for name in form:
        if name not in FIELDS:
            raise BadRequest(
                f"unknown field {name!r:.80} of the form; {nearest(name, FIELDS, 'its fields')}"
            )
        if len(form.getlist(name)) > 1:
            raise BadRequest(f"the form has its field {name!r} more than once; expected it once")
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise BadRequest("the form has no file in its field 'file'; expected one")
    if purpose not in PURPOSES:
        raise BadRequest(f"'purpose': got {purpose!r:.80}; expected one of {', '.join(PURPOSES)}")
    return file, cast(Purpose, purpose)


def _filename(file: UploadFile) -> str:
    """Returns the uploaded file's name, which lists show and downloads suggest. Raises BadRequest
    for a path, or a name that is no line of text."""
    name = file.filename or "file"
    unfit = any(char in "/\\" or unicodedata.category(char) == "Cc" for char in name)
    if unfit or len(name) > MAX_FILENAME_CHARS:
        raise BadRequest(
            f"the file's name is {name!r:.80}, {len(name)} characters; expected at most "
            f"{MAX_FILENAME_CHARS} without slashes and control characters"
        )
    return name
