"""Fetches files of published versions from the trainer. A transfer that was cut continues where it
ended, also in a later call.

Only the trainer of `HONE_TRAINER_URL` is asked: a reference names a file and never a host, and
redirects are not followed.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx

from shared.errors import Failed, HoneError, Unavailable, from_problem
from shared.host.logs import get_logger, request_id
from shared.http.connecting import trusted
from shared.http.urls import is_direct
from shared.wire import WeightFile

TIMEOUT_S = 60.0
"""Seconds that the trainer may take to connect, or between two pieces of a file."""

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0


class Fetcher:
    """Fetches from the trainer at `url`. A trainer that sends nothing for `patience_s` seconds, in
    however many attempts, is Unavailable. Blocks: to be called in a thread."""

    def __init__(self, url: str, *, token: str | None = None, patience_s: float = 90.0) -> None:
        self._url = url
        self._token = token
        self._patience_s = patience_s

    def fetch(self, files: tuple[WeightFile, ...], folder: Path) -> int:
        """Puts the files into `folder`, which is made, and returns how many bytes came over the
        network. Raises Failed for files that are gone or have another size."""
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(files, folder)
        headers = {"x-request-id": request_id()}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        with httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=TIMEOUT_S,
            trust_env=not is_direct(urlsplit(self._url).hostname or ""),
            verify=trusted(),
        ) as http:
            return sum(self._fetch(http, file, folder / file.name) for file in files)

    def _fetch(self, http: httpx.Client, file: WeightFile, target: Path) -> int:
        received_bytes, pause_s = 0, FIRST_PAUSE_S
        heard_at = time.monotonic()
        while (have_bytes := _size(target)) != file.size_bytes or not target.exists():
            if have_bytes > file.size_bytes:
                target.unlink()
                raise Failed(
                    f"{file.path} has {have_bytes} bytes or more, expected {file.size_bytes}",
                    code="digest_differs",
                )
            problem = self._attempt(http, file, target, have_bytes)
            if new_bytes := _size(target) - have_bytes:
                received_bytes += max(new_bytes, 0)
                heard_at, pause_s = time.monotonic(), FIRST_PAUSE_S
            if problem is None:
                continue
            if time.monotonic() + pause_s > heard_at + self._patience_s:
                raise problem
            get_logger().warning("transfer interrupted", file=file.path, reason=problem.detail)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return received_bytes

    def _attempt(
        self, http: httpx.Client, file: WeightFile, target: Path, have_bytes: int
    ) -> Unavailable | None:
        """Appends the trainer's bytes to the file. Returns an error if the transfer ended early."""
        headers = {"range": f"bytes={have_bytes}-"} if have_bytes else {}
        try:
            with http.stream("GET", file.path, headers=headers) as response:
                if response.status_code not in (200, 206):
                    response.read()
                    return self._refused(response)
                with target.open("ab" if response.status_code == 206 else "wb") as sink:
                    for piece in response.iter_raw():
                        sink.write(piece)
                        if sink.tell() > file.size_bytes:
                            return None
        except httpx.TransportError as error:
            why = f"{type(error).__name__}: {str(error) or 'connection lost'}"
            return Unavailable(
                f"cannot fetch {file.path} from the trainer at {self._url}: {why}; is "
                "HONE_TRAINER_URL the trainer's address, seen from the sampler?",
                code="unreachable",
            )
        if _size(target) < file.size_bytes:
            return Unavailable(
                f"the trainer at {self._url} ended {file.path} after {_size(target)} of "
                f"{file.size_bytes} bytes",
                code="unreachable",
            )
        return None

    def _refused(self, response: httpx.Response) -> Unavailable:
        """Returns the answer's error if another attempt may help, and raises it if not."""
        try:
            problem = response.json()
        except ValueError:
            problem = None
        document = problem if isinstance(problem, dict) else None
        error: HoneError = from_problem(
            response.status_code, document, f"the trainer at {self._url}"
        )
        if isinstance(error, Unavailable):
            return error
        raise Failed(
            f"cannot fetch the weights from the trainer at {self._url}: {error.detail}",
            code="digest_differs",
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_space(files: tuple[WeightFile, ...], folder: Path) -> None:
    needed_bytes = sum(file.size_bytes - _size(folder / file.name) for file in files)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise Failed(
            f"no space to fetch weights into {str(folder)!r}: {needed_bytes} bytes are needed and "
            f"{free_bytes} are free; free some space, or point HONE_SHM_DIR elsewhere",
            code="disk_full",
        )
