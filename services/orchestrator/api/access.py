"""Named API keys: who has one, and what it allows.

A key is a file of its own, so several orchestrators with one folder of runs have the same keys, a
Redis that is away locks nobody out, and a key that was revoked is void at once:

    <runs_dir>/.keys/<name>.key    its name, its access, and the SHA-256 of its secret

The secret is 256 random bits, so a plain digest of it is safe to keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from pathlib import Path

from services.orchestrator.record.writing import writing
from shared import codec, disk
from shared.errors import Conflict, Forbidden, NotFound, Unauthorized
from shared.logs import API_KEY
from shared.wire import Access, ApiKey, CreatedKey

READING = ("GET", "HEAD")

KEYS = re.compile(r"/v1/keys(/.*)?")
OPERATORS = re.compile(r"/v1/(samplers|recover)(/.*)?")
"""What only HONE_TOKEN may change: a sampler that is registered is sent that token."""


class StoredKey(ApiKey):
    digest: str


class Keys:
    """The keys of one folder of runs."""

    def __init__(self, runs_dir: Path) -> None:
        self._root = runs_dir / ".keys"

    def create(self, name: str, access: Access) -> CreatedKey:
        """Returns a new key, which is on disk. Raises Conflict if there is one of the name."""
        secret = f"hone_{name}_{secrets.token_urlsafe(32)}"
        stored = StoredKey(
            name=name, access=access, created_at=int(time.time()), digest=_digest(secret)
        )
        with writing("folder", self._root):
            disk.make_folder(self._root)
            self._root.chmod(0o700)
            try:
                disk.create_file(self._path(name), codec.encode(stored))
            except FileExistsError as error:
                raise Conflict(
                    f"there is a key {name!r} already, and its secret is shown only once; revoke "
                    "it, or take another name"
                ) from error
        return CreatedKey(name=name, access=access, created_at=stored.created_at, secret=secret)

    def list(self) -> list[ApiKey]:
        """Returns the keys, by name."""
        stored = [self._stored(path.stem) for path in sorted(self._root.glob("*.key"))]
        return [
            ApiKey(name=key.name, access=key.access, created_at=key.created_at)
            for key in stored
            if key  # else it was revoked since
        ]

    def revoke(self, name: str) -> None:
        """Raises NotFound."""
        with writing("folder", self._root):
            try:
                self._path(name).unlink()
            except FileNotFoundError as error:
                raise NotFound(f"no key {name!r}; `hone keys list` shows them") from error
            disk.flush(self._root)

    async def check(self, secret: str, method: str, path: str) -> str:
        """Returns the name of the key with this secret. Raises Unauthorized if there is none, and
        Forbidden if it does not allow the request."""
        found = API_KEY.fullmatch(secret)
        stored = await asyncio.to_thread(self._stored, found["name"]) if found else None
        digest = stored.digest if stored else ""
        if not hmac.compare_digest(_digest(secret), digest) or stored is None:
            raise Unauthorized("the API key is unknown or was revoked; `hone keys` makes one")
        _check_allowed(stored, method, path)
        return stored.name

    def _stored(self, name: str) -> StoredKey | None:
        with contextlib.suppress(FileNotFoundError):
            return codec.decode_stored(StoredKey, self._path(name).read_bytes())

    def _path(self, name: str) -> Path:
        return self._root / f"{name}.key"


def _check_allowed(key: ApiKey, method: str, path: str) -> None:
    reads = method in READING
    if KEYS.fullmatch(path) or (OPERATORS.fullmatch(path) and not reads):
        raise Forbidden(f"{method} {path} is for HONE_TOKEN only, not for key {key.name!r}")
    if key.access == "read" and not reads:
        raise Forbidden(f"key {key.name!r} may only read, and {method} {path} is a change")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
