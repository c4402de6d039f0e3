"""Named API keys, what each allows, and the routes that make, list and revoke them. `Shares`
divides a common resource, such as memory, among the keys.

A key is a file of its own. So orchestrators that share a folder of runs have the same keys, keys
work while Redis is unreachable, and a revoked key is void at once:

    <runs_dir>/.keys/<name>.key        its name, its access, and the SHA-256 of its secret
    <runs_dir>/.keys/<name>.revoked    the same of the name's last revoked key

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
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi import Path as Path_

from services.orchestrator.writable import writing
from shared.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    HoneError,
    NotFound,
    Unauthorized,
    Unavailable,
    no_job,
)
from shared.host import disk
from shared.host.logs import API_KEY, bind, get_logger
from shared.http import codec, rendering
from shared.http.gate import READING, caller, caller_name
from shared.http.rendering import CreatedResource, render
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import Access, ApiKey, CreatedKey, CreateKey, KeyList, KeyRevoked

KEY, REVOKED = ".key", ".revoked"

PATH = "/v1/keys"

OWN_JOB = re.compile(r"/v1/jobs/([^/]+)")

OWN_PATHS = [
    re.compile(path)
    for path in (
        r"/v1/jobs(/.*)?",
        r"/v1/files(/file-[0-9a-f]+(/content)?)?",
        r"/v1/episodes/(lease|renew|[\w-]+/result)",
        r"/api/v1/.*",
        r"/operations/.*",
        r"/openapi\.json",
    )
]
"""The paths that a key of access "own" may request. Uploaded files are protected by their ids
alone, 96 random bits."""

NOT_OWN = {("GET", "/v1/files")}

OwnerOf = Callable[[str], Awaitable[str | None]]


async def _no_owner(_: str) -> str | None:
    return None


Name = Annotated[str, Path_(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


def _check_token(request: Request) -> None:
    if key := caller.get():
        requested = f"{request.method} {request.url.path}"
        raise Forbidden(f"{requested} is for HONE_TOKEN only, not for key {key.name!r}")


TOKEN_ONLY = Depends(_check_token)
"""A dependency of the routes that need HONE_TOKEN. Routes of keys need it because a key could make
another with more rights. Routes of samplers need it because a registered sampler is sent
HONE_TOKEN."""


class StoredKey(ApiKey):
    digest: str


class Keys:
    """The keys of one folder of runs. `owner_of` returns the name of the key that submitted a job;
    "" for HONE_TOKEN, None for no job."""

    def __init__(self, runs_dir: Path, owner_of: OwnerOf = _no_owner) -> None:
        self._root = runs_dir / ".keys"
        self._owner_of = owner_of
        # own threads: other work does not delay requests
        self._reading = ThreadPoolExecutor(2, "keys")

    def create(self, name: str, access: Access, weight: float = 1.0) -> CreatedKey:
        """Returns a new key, which is on disk. Raises Conflict if the name is taken."""
        secret = f"hone_{name}_{secrets.token_urlsafe(32)}"
        stored = StoredKey(
            name=name,
            access=access,
            created_at=int(time.time()),
            weight=weight,
            digest=_digest(secret),
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
        return CreatedKey(**stored.model_dump(exclude={"digest"}), secret=secret)

    def list(self) -> list[ApiKey]:
        """Returns the readable keys, by name. Raises Unavailable if the folder cannot be read."""
        try:
            names = sorted(path.stem for path in self._root.iterdir() if path.suffix == KEY)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(error) from error
        stored = map(self._stored, names)
        return [
            ApiKey(**key.model_dump(exclude={"digest"}))
            for key in stored
            if key  # else it was revoked since
        ]

    def revoke(self, name: str) -> None:
        """Revokes the key; again changes nothing. Raises NotFound if there never was such a key."""
        path = self._path(name)
        with writing("folder", self._root):
            try:
                path.rename(path.with_suffix(REVOKED))
            except FileNotFoundError as error:
                if path.with_suffix(REVOKED).exists():
                    return
                raise NotFound(f"no key {name!r}; `hone keys list` shows them") from error
            disk.flush(self._root)

    async def check(self, secret: str, method: str, path: str) -> ApiKey:
        """Returns the key with this secret. Raises Unauthorized if there is none, Forbidden if it
        does not allow the method or the path, NotFound for another key's job that it may not see,
        and Unavailable if the keys cannot be read."""
        match = API_KEY.fullmatch(secret)
        loop = asyncio.get_running_loop()
        read = loop.run_in_executor(self._reading, self._stored, match["name"]) if match else None
        stored = await read if read else None
        digest = stored.digest if stored else ""
        if not hmac.compare_digest(_digest(secret), digest) or stored is None:
            raise Unauthorized("the API key is unknown or was revoked; `hone keys` makes one")
        bind(key=stored.name)  # a refusal is logged with it too
        if stored.access == "read" and method not in READING:
            raise Forbidden(
                f"key {stored.name!r} has access 'read', and {method} {path} changes something"
            )
        if stored.access == "own":
            await self._check_own(stored.name, method, path)
        return stored

    async def _check_own(self, name: str, method: str, path: str) -> None:
        """Raises Forbidden for a path that concerns more than the key's own jobs, and NotFound for
        a job of another key. `Store.get` checks jobs that a body names."""
        if not any(own.fullmatch(path) for own in OWN_PATHS) or (method, path) in NOT_OWN:
            raise Forbidden(
                f"key {name!r} has access 'own', and {method} {path} concerns other jobs too"
            )
        if match := OWN_JOB.match(path):
            owner = await self._owner_of(match[1])
            if owner is not None and owner != name:
                raise no_job(match[1])

    def _stored(self, name: str) -> StoredKey | None:
        """Returns the stored key; None if there is no file, or it holds no key."""
        path = self._path(name)
        try:
            return codec.decode_tolerantly(StoredKey, path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        except BadRequest as error:
            get_logger().warning("key file is not valid", path=str(path), detail=error.detail)
            return None

    def _unreadable(self, error: OSError) -> Unavailable:
        return Unavailable(
            f"the API keys in {str(self._root)!r} cannot be read: {error.strerror}; check the "
            "folder's owner and its disk"
        )

    def _path(self, name: str) -> Path:
        return self._root / f"{name}{KEY}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Shares:
    """Shares in a total. A caller may hold at most as much as it leaves for others: a single caller
    half of the total, two callers a third each, and so on."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(
        self, amount: int, total: int, refused: Callable[[int, int], HoneError]
    ) -> Generator[None]:
        """Holds the amount for the request's API key within the block. If that is too much, raises
        the error that `refused` returns for the amounts that the key holds and that are left."""
        who, left = caller_name(), total - self._held.total()
        if amount and self._held[who] + amount > left:
            raise refused(self._held[who], left)
        self._held[who] += amount
        try:
            yield
        finally:
            self._held -= Counter({who: amount})


def add_routes(service: Service, settings: Settings, keys: Keys) -> None:
    app = service.app

    @app.post(
        PATH, dependencies=[TOKEN_ONLY], responses=rendering.answers(CreatedResource[CreatedKey])
    )
    async def create_key(request: Request) -> Response:
        """Makes a key. Only this answer has its secret, and no operation keeps it: a caller that
        misses the answer revokes the key."""
        if settings.token is None:
            raise BadRequest(
                "this orchestrator has no HONE_TOKEN, so it serves every program on its machine "
                "without a key; set HONE_TOKEN first"
            )
        wanted = await rendering.read_body(request, CreateKey)
        key = await asyncio.to_thread(keys.create, wanted.name, wanted.access, wanted.weight)
        made = CreatedResource[CreatedKey](body=key, location=f"{PATH}/{key.name}", is_new=True)
        return await render(made, request)

    service.body(CreateKey, "POST", PATH)

    @app.get(PATH, dependencies=[TOKEN_ONLY])
    async def list_keys() -> KeyList:
        """The keys that are valid, without their secrets."""
        return KeyList(keys=tuple(await asyncio.to_thread(keys.list)))

    @app.delete("/v1/keys/{name}", dependencies=[TOKEN_ONLY])
    async def revoke_key(name: Name) -> KeyRevoked:
        """Revokes a key: requests with it are refused from now on."""
        await asyncio.to_thread(keys.revoke, name)
        return KeyRevoked(name=name)
