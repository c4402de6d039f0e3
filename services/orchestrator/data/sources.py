"""The kinds of sources of a job's problems. READ FIRST. The first match in KINDS opens it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.orchestrator.data.generated import ProblemSet, open_generated
from services.orchestrator.data.hub import HubTable, PinnedDataset, hub_url
from services.orchestrator.data.subprocesses import SubprocessTimeout, run_in_subprocess
from services.orchestrator.data.tables import (
    ArrowTable,
    CsvTable,
    InlineTable,
    JsonTable,
    Table,
    check_expansion,
    check_version,
    no_rows,
    unreadable,
)
from services.orchestrator.data.uploads import Uploads
from shared.errors import BadRequest, NotFound, Unavailable
from shared.host.disk import run_for_volume
from shared.http.gate import may_name
from shared.job import REASONING_GYM, UPLOADED, DataSpec, Job, Source
from shared.settings import Settings
from shared.weights.folders import digest_of_file
from shared.weights.model_folder import HUB_ID, hub_is_offline

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_DEADLINE_S = 10.0
"""Seconds that the Hub may take to resolve a revision to a commit."""

FETCH_S = 1200.0
"""Seconds that reading a data set from the Hub may take."""

EXPECTED = (
    "expected a file ending in .jsonl, .json, .csv or .parquet, the id of an uploaded file, a "
    "Hugging Face dataset id such as openai/gsm8k, or a task as reasoning_gym:chain_sum"
)


@dataclass(frozen=True)
class SourceRequest:
    """A request for a source: the job's `source` under `key` ("data.train"), and the `split` of a
    Hugging Face dataset. `wanted` is the version at the job's submission, if known; `seed` is the
    job's."""

    key: str
    source: Source
    split: str
    spec: DataSpec
    settings: Settings
    wanted: str | None = None
    seed: int = 0

    @property
    def text(self) -> str:
        assert isinstance(self.source, str)
        return self.source


def open_source(ask: SourceRequest) -> Table:
    """Returns the table that the job names. Raises BadRequest if it is missing or not allowed,
    OperatorActionNeeded if it has changed since the job was submitted, Unavailable while the Hub
    cannot be reached."""
    if isinstance(ask.source, str):
        _check_name(ask)
    return opener_of(ask.source)(ask)


def opener_of(source: Source) -> Callable[[SourceRequest], Table]:
    """Returns the function that opens sources of this kind. It raises BadRequest for a source that
    is missing or not allowed."""
    return next(opener for is_meant, opener in KINDS if is_meant(source))


def is_on_hub(source: Source) -> bool:
    """Whether the source names a data set of the Hub."""
    try:
        return opener_of(source) is _hub
    except (OSError, ValueError):
        return False  # a name that `open_source` refuses


def source_requests(
    job: Job, settings: Settings, versions: Mapping[str, str] | None = None
) -> dict[str, SourceRequest]:
    """Returns the sources that the job reads, by the names of their versions: "train", "eval" and
    "eval.<set>". A job of 0 steps reads no "train"."""
    data, wanted = job.data, versions or {}
    named: dict[str, tuple[str, Source | None, str, DataSpec]] = {
        "train": ("data.train", data.train if job.trains else None, data.train_split, data),
        "eval": ("data.eval", data.eval, data.eval_split, data),
    }
    for name, each in job.evaluation.sets.items():
        key = f"evaluation.sets.{name}.source"
        named[f"eval.{name}"] = key, each.source, each.split, each.within(data)
    return {
        version: SourceRequest(key, source, split, spec, settings, wanted.get(version), job.seed)
        for version, (key, source, split, spec) in named.items()
        if source is not None
    }


def files_of(job: Job, settings: Settings) -> list[tuple[str, Path]]:
    """Returns the files on this host that the job needs, each with the key that names it: the
    files with its problems, and the configuration of each model that is a folder."""
    models = [job.model] if job.trains else [each.model for each in job.evaluated_models]
    files = [
        ("model", Path(model) / "config.json") for model in models if not HUB_ID.fullmatch(model)
    ]
    for ask in source_requests(job, settings).values():
        if not isinstance(ask.source, str):
            continue
        if UPLOADED.fullmatch(ask.source):
            files.append((ask.key, Uploads(settings.runs_dir).described_in(ask.source)))
        elif Path(ask.source).suffix in FORMATS:
            files.append((ask.key, Path(ask.source)))
    return files


def _check_name(ask: SourceRequest) -> None:
    """Raises BadRequest for a path that the file system rejects."""
    if "\0" in ask.text:
        raise BadRequest(f"{ask.key} is {ask.text!r:.80}, with a NUL; {EXPECTED}")
    try:
        Path(ask.text).exists()
    except OSError as error:  # too long, or in a folder that may not be read
        raise BadRequest(f"{ask.key} is {ask.text!r:.80}: {error.strerror}; {EXPECTED}") from error


def _inline(ask: SourceRequest) -> Table:
    assert not isinstance(ask.source, str)
    return InlineTable(f"{ask.key} in the job", ask.source)


def _url(ask: SourceRequest) -> Table:
    raise BadRequest(
        f"{ask.key} is {ask.text!r}, a URL, which is not fetched; {EXPECTED}. `curl -F` uploads a "
        "file to POST /v1/files"
    )


def _generated(ask: SourceRequest) -> Table:
    given = ask.spec.reasoning_gym
    seed = ask.seed if given.seed is None else given.seed
    task = ask.text.removeprefix(REASONING_GYM)
    asked = ProblemSet(ask.key, task, given, seed, ask.key != "data.train")
    return open_generated(asked, ask.settings.runs_dir, ask.wanted)


def _uploaded(ask: SourceRequest) -> Table:
    uploads = Uploads(ask.settings.runs_dir)
    try:
        file = uploads.get(ask.text)
    except NotFound:  # another host that mounts the volume may have written it
        run_for_volume(
            ask.settings.runs_refresh, f"{ask.key} is {ask.text!r}, which cannot be seen"
        )
        file = uploads.get(ask.text)
    path, name = uploads.path_of(file), f"uploaded file {ask.text!r} ({file.filename})"
    if path.suffix not in FORMATS:
        raise BadRequest(
            f"{ask.key} is {name}; expected one uploaded with a name ending in .jsonl, .json, .csv "
            "or .parquet"
        )
    return _read(ask, path, name)


def _no_upload(ask: SourceRequest) -> Table:
    raise BadRequest(
        f"{ask.key} is {ask.text!r:.80}; expected the id of an uploaded file, 'file-' and 24 "
        "hexadecimal digits, as GET /v1/files lists them"
    )


def _file(ask: SourceRequest) -> Table:
    path = Path(ask.text)
    _check_allowed(ask, path.resolve())
    if path.suffix not in FORMATS:
        raise BadRequest(f"dataset {ask.text!r} is not a file that can be read; {EXPECTED}")
    if not path.is_file():
        raise BadRequest(
            f"no dataset file at {ask.text!r} on the orchestrator's host ({ask.key}); give an "
            "existing file's path"
        )
    return _read(ask, path.resolve(), f"dataset {ask.text!r}")


def _check_allowed(ask: SourceRequest, path: Path) -> None:
    """Raises BadRequest for a file that jobs may not read."""
    folders = ask.settings.data_dirs
    if not may_name(path, folders, ask.settings):
        shown = ", ".join(map(str, folders or ())) or "none, as HONE_DATA_DIRS is not set"
        raise BadRequest(
            f"{ask.key} is {ask.text!r}, and jobs may read files below these folders only: "
            f"{shown}. Others can be uploaded to POST /v1/files"
        )


def _read(ask: SourceRequest, path: Path, name: str) -> Table:
    try:
        version = digest_of_file(path)
    except OSError as error:
        raise unreadable(name, error) from error
    check_version(name, version, ask.wanted)
    return FORMATS[path.suffix](path, name, version)


def _parquet(path: Path, name: str, version: str) -> Table:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        num_rows = read_metadata(path).num_rows  # `datasets` fails on none, with another reason
        if num_rows:
            check_expansion(path, name, version)
    except OSError as error:  # also raised, without an errno, for a file that is not Parquet
        raise unreadable(name, error) from error
    except ArrowException as error:
        raise BadRequest(f"{name} cannot be read: {str(error).splitlines()[0]}") from error
    if not num_rows:
        raise no_rows(name)
    return ArrowTable(name, version, {"path": "parquet", "data_files": str(path), "split": "train"})


FORMATS: dict[str, Callable[[Path, str, str], Table]] = {
    ".jsonl": lambda path, name, version: JsonTable(name, path, version),
    ".json": lambda path, name, version: JsonTable(name, path, version),
    ".csv": lambda path, name, version: CsvTable(name, path, version),
    ".parquet": _parquet,
}


def _hub(ask: SourceRequest) -> Table:
    if not HUB_ID.fullmatch(ask.text):
        raise BadRequest(f"{ask.key} is {ask.text!r}; {EXPECTED}")
    commit = ask.wanted or _cached_commit(ask) or _commit(ask)
    return HubTable(
        f"dataset {ask.text!r}",
        commit,
        {
            "path": ask.text,
            "name": ask.spec.config,
            "split": ask.split,
            "revision": commit or ask.spec.revision,
        },
    )


def _cached_commit(ask: SourceRequest) -> str | None:
    """Returns the revision if it is a commit in this machine's cache, because a commit never
    changes."""
    revision = ask.spec.revision
    if not revision or not COMMIT.fullmatch(revision):
        return None
    return revision if PinnedDataset(ask.text, ask.spec.config, revision).cached() else None


def _commit(ask: SourceRequest) -> str | None:
    """Returns the revision's current commit; None if HF_HUB_OFFLINE forbids requests to the Hub."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    revision = ask.spec.revision
    try:
        info = HfApi().dataset_info(ask.text, revision=revision, timeout=HUB_DEADLINE_S)
    except OfflineModeIsEnabled:
        return revision if revision and COMMIT.fullmatch(revision) else None
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise _away(ask, error) from error
        raise BadRequest(
            f"{ask.key}: the Hub has no dataset {ask.text!r} at revision {revision or 'main'!r} "
            "that may be read with this HF_TOKEN"
        ) from error
    except Exception as error:  # the Hub's library may raise any class
        raise _away(ask, error) from error
    return info.sha


def _away(ask: SourceRequest, error: Exception) -> Unavailable:
    return Unavailable(
        f"dataset {ask.text!r} cannot be fetched: {hub_url()} cannot be reached ({error})"
    )


def _is_file(source: Source) -> bool:
    text = str(source)
    path = Path(text)
    return path.suffix in FORMATS or text.startswith(("/", ".")) or path.exists()


KINDS: tuple[tuple[Callable[[Source], bool], Callable[[SourceRequest], Table]], ...] = (
    (lambda source: not isinstance(source, str), _inline),
    (lambda source: str(source).startswith(REASONING_GYM), _generated),
    (lambda source: bool(URL.match(str(source))), _url),
    (lambda source: bool(UPLOADED.fullmatch(str(source))), _uploaded),
    (_is_file, _file),
    (lambda source: str(source).startswith("file-"), _no_upload),
    (lambda _: True, _hub),
)
"""For each kind of source a test, and the function that opens it. The first test that holds
decides."""


def needs_hub(job: Job, settings: Settings) -> bool:
    """Whether any of the job's data requires requests to the Hub."""
    return not hub_is_offline() and any(map(_is_asked, source_requests(job, settings).values()))


async def fetch(asks: Iterable[SourceRequest]) -> None:
    """Downloads sources on the Hub into this machine's cache, from which rows are then read;
    streams are not cached. A download may hang, so it runs in a process, which is killed at its
    deadline or when the caller is cancelled. Raises as `load_prompts`, and Unavailable if the Hub
    hangs."""
    on_hub = [ask for ask in asks if await asyncio.to_thread(_is_asked, ask)]
    if not on_hub or hub_is_offline():
        return
    try:
        what = f"fetching the data {', '.join(f'{ask.text!r:.100}' for ask in on_hub)}"
        await run_in_subprocess(_fetch, on_hub, deadline_s=FETCH_S, what=what)
    except SubprocessTimeout as error:
        raise Unavailable(error.detail) from error


def _fetch(asks: Sequence[SourceRequest]) -> None:
    for ask in asks:
        table = open_source(ask)
        if ask.spec.streaming:
            next(table.stream(), None)
        else:
            table.rows()


def _is_asked(ask: SourceRequest) -> bool:
    if not is_on_hub(ask.source):
        return False
    commit = ask.wanted or ask.spec.revision or ""
    is_known = COMMIT.fullmatch(commit) is not None
    return not (is_known and PinnedDataset(ask.text, ask.spec.config, commit).cached())
