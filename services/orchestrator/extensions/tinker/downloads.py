"""Downloads of exports: addresses that are signed and need no key for a while."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from pathlib import Path
from typing import Any

from services.orchestrator.extensions.tinker.managing import iso, saved_as
from services.orchestrator.extensions.tinker.paths import ROOT
from services.orchestrator.extensions.tinker.saved import Saved
from services.orchestrator.store.checkpoint_files import files_of, path_of
from services.orchestrator.store.store import Store
from services.orchestrator.store.writable import writing
from services.orchestrator.tasks import to_disk
from shared.errors import NotFound, Unauthorized
from shared.host import disk
from shared.wire import JobRecord

FILES = f"{ROOT}/files"

IS_FILE = re.compile(rf"{FILES}/[0-9a-f]{{64}}/[0-9]{{1,12}}/[\w-]+/[0-9]{{1,9}}/.+")

URL_S = 3600.0
"""Seconds for which the address of an export's file is valid."""


def is_public(path: str) -> bool:
    """Returns whether the path has a signature in place of a key."""
    return IS_FILE.fullmatch(path) is not None


class Downloads:
    """The files of exports. Orchestrators with one folder of runs share the secret that signs
    their addresses."""

    def __init__(self, store: Store, runs_dir: Path) -> None:
        self._store = store
        self._secret_file = runs_dir / ".keys" / "addresses.secret"

    async def urls(self, record: JobRecord, id: str, base_url: str) -> dict[str, Any]:
        """Returns an address for each file of an export. `base_url` is the server's."""
        one = await asyncio.to_thread(saved_as, record, id)
        expires = int(time.time() + URL_S)
        files = await asyncio.to_thread(files_of, Path(one.path))
        secret = await to_disk(self._secret)
        urls: dict[str, str] = {}
        for file in files:
            signature = _signed(secret, record.id, one.number, file.name, expires)
            rest = f"{signature}/{expires}/{record.id}/{one.number}/{file.name}"
            urls[file.name] = f"{base_url.rstrip('/')}{FILES}/{rest}"
        return {"urls": urls, "expires": iso(expires)}

    async def file(self, signature: str, expires: int, job: str, number: int, name: str) -> Path:
        """Returns the file behind an address of `urls`. Raises Unauthorized for any other one."""
        wanted = _signed(await to_disk(self._secret), job, number, name, expires)
        if not hmac.compare_digest(wanted.encode(), signature.encode()) or expires < time.time():
            raise Unauthorized("the address is not one of an export's files, or not any more")
        run_dir = Path((await self._store.get(job)).run_dir)
        found = {one.number: one for one in await asyncio.to_thread(Saved(run_dir).all)}
        if number not in found:
            raise NotFound(f"the export {number} of the model {job!r} is not there any more")
        return await asyncio.to_thread(path_of, Path(found[number].path), name)

    def _secret(self) -> bytes:
        """Returns the secret of this folder of runs, which the first call makes."""
        with contextlib.suppress(FileNotFoundError):
            return self._secret_file.read_bytes()
        folder = self._secret_file.parent
        with writing("folder", folder):
            disk.make_folder(folder)
            folder.chmod(0o700)
            with contextlib.suppress(FileExistsError):
                disk.create_file(self._secret_file, secrets.token_bytes(32))
        return self._secret_file.read_bytes()


def _signed(secret: bytes, job: str, number: int, name: str, expires: int) -> str:
    text = f"{job}\n{number}\n{name}\n{expires}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
