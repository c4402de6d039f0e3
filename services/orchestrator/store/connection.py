"""The orchestrator's connection to Redis: scripts that run once, retries while it is unreachable,
and errors that say what to check."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import RedisError

from services.orchestrator.store import keys
from services.orchestrator.store.keys import SCRIPTS, source
from services.orchestrator.store.records import UnreadableRecord
from shared.errors import Conflict, Unavailable

SOCKET_TIMEOUT_S = 30.0
"""Longer than a follower waits for events, and longer than a slow disk delays an answer."""

RETRIES = 6
"""Retries of a command. All attempts together take less than keys.CALL_TTL_S."""

MAX_CONNECTIONS = 64
"""Connections for everything but heartbeats and followers. A caller waits if none is free."""

MAX_BEAT_CONNECTIONS = 2
"""Heartbeats have connections of their own, so that they never wait for one."""

BEATS = frozenset({"beat"})
"""The scripts that are heartbeats."""

MAX_FOLLOWERS = 512
"""Most clients that follow jobs' events at a time. Each holds a connection while it waits."""


EMPTIED = "emptied"
"""The answer of every script in a Redis that was not accepted."""

REPLACED = (
    "Redis was emptied, or replaced by another one, while it was used; bring its file back and "
    "start it again, or let `hone recover` rebuild the jobs from their run folders"
)

WRONG_TYPE = "WRONGTYPE"
"""Redis's error word for a command on a key of another type."""

CAUSES = {
    WRONG_TYPE: "a key of Hone has a value of another type, so another program writes into this "
    "database: give Hone a database of its own, or remove the key",
    "OOM": "its memory is full: raise its maxmemory, or remove jobs that have ended (`hone rm`)",
    "READONLY": "it only answers reads: HONE_REDIS_URL leads to a replica; expected the primary",
    "MASTERDOWN": "it is a replica without its primary; expected HONE_REDIS_URL to lead to that",
    "UNBLOCKED": "it has just become a replica of another one; HONE_REDIS_URL leads to that soon",
    "LOADING": "it still reads its file, and answers once that is done",
    "MISCONF": "it cannot write its file: free some space on its disk, or look into its log",
    "NOPERM": "its user lacks permission: allow it all commands on keys that begin with hone:",
}
"""The advice for an error, by the first word of Redis's error. For an error within a script, some
versions put the word later."""

NOT_PRIMARY = ("READONLY", "MASTERDOWN", "UNBLOCKED")
"""Errors that a demoted primary answers with."""

RECONNECT_S = 1.0
"""Least seconds between two reconnections of all connections."""


class StoreUnavailable(Unavailable):
    """Redis is unreachable, or refuses commands until time or an operator has fixed it. A worker
    stops its job; the job continues afterwards."""


class StoreEmptied(Conflict):
    """This Redis is not the Redis that had the jobs. It is not used until an operator has decided
    about them."""

    default_code = "emptied"


class Connection:
    """Each method raises StoreUnavailable when Redis cannot be reached, and StoreEmptied once it is
    not the accepted Redis, which has `identity`; `refused` says why. `place` is its URL without a
    password. `client` is for everything but heartbeats (`beats`) and waiting for events
    (`followers`). Scripts get `limits`."""

    def __init__(self, url: str, limits: Mapping[str, str]) -> None:
        self._limits = limits
        self.place = _place(url)
        self.identity: str | None = None
        self.refused: str | None = None
        self._reconnect_at = 0.0
        patient = Retry(ExponentialBackoff(cap=2.0, base=0.1), retries=RETRIES)
        self.client = _client(url, MAX_CONNECTIONS, patient)
        self.beats = _client(url, MAX_BEAT_CONNECTIONS, Retry(NoBackoff(), retries=0))
        self.followers = _client(url, MAX_FOLLOWERS, patient)
        self._scripts = {
            name: (self.beats if name in BEATS else self.client).register_script(source(name))
            for name in SCRIPTS
        }

    async def close(self) -> None:
        for client in (self.client, self.beats, self.followers):
            await client.aclose()

    def accept(self, identity: str) -> None:
        """Lets scripts run in the Redis with this identity only."""
        self.identity, self.refused = identity, None

    async def differs(self) -> str | None:
        """Returns why this Redis must not be used; None if it is the accepted one."""
        identity = await self.reach(self.client.get(keys.STORE))
        if self.refused or self.identity in (None, identity):
            return self.refused
        return REPLACED

    async def call(self, script: str, **arguments: Any) -> str:
        """Runs the script of that name (keys.py). If the connection breaks, Redis's client sends
        the same call again."""
        store = self.identity
        call = _texts({"now": time.time(), "store": store, **self._limits, **arguments})
        key = keys.CALL + secrets.token_hex(12)
        try:
            answer = await self.do(self._scripts[script](keys=[key], args=[json.dumps(call)]))
        except StoreUnavailable as error:
            if error.code != "wrong_type":
                raise
            place = await self._misplaced(arguments.get("id"))
            raise StoreUnavailable(f"{error.detail}{place}", code=error.code) from error
        if answer == EMPTIED:
            if store == self.identity:  # else another Redis was accepted since
                self.refused = REPLACED
            raise StoreEmptied(REPLACED)
        return answer

    async def hash(self, key: str) -> dict[str, str]:
        """Returns the hash; raises UnreadableRecord for a key that is not a hash."""
        try:
            return await self.do(self.client.hgetall(key))
        except StoreUnavailable as error:
            if error.code != "wrong_type":
                raise
            raise UnreadableRecord(
                f"{key!r} in Redis is not a hash, which Hone stores there"
            ) from error

    async def do(self, command: Any) -> Any:
        """Returns the result of a command of one of the clients."""
        if self.refused:
            command.close()
            raise StoreEmptied(self.refused)
        return await self.reach(command)

    async def reach(self, command: Any) -> Any:
        """Returns the result of a command, also in a Redis that was not accepted."""
        try:
            return await command
        except RedisError as error:
            word = _word_of(error)
            if word in NOT_PRIMARY:
                await self._reconnect()
            raise _unavailable(error, word) from error

    async def _reconnect(self) -> None:
        """Replaces every connection, connections in use after their command: after a failover
        HONE_REDIS_URL may lead to another Redis. If many commands fail at once, the first one does
        it for all."""
        now = time.monotonic()
        if now < self._reconnect_at:
            return
        self._reconnect_at = now + RECONNECT_S
        for client in (self.client, self.beats, self.followers):
            with contextlib.suppress(RedisError, OSError):
                # closing a lost connection raises an error
                await client.connection_pool.update_active_connections_for_reconnect()
                await client.connection_pool.disconnect(inuse_connections=False)

    async def _misplaced(self, job_id: Any) -> str:
        """Returns the part of a message that names the key of a wrong type; "" if it is neither a
        list nor one of the job's keys."""
        kinds = keys.TYPES | (keys.types_of(job_id) if job_id else {})
        for key, kind in kinds.items():
            if (actual := await self.reach(self.client.type(key))) not in (kind, "none"):
                return f"; {key!r} is a {actual}, expected a {kind}"
        return ""


def _place(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _client(url: str, max_connections: int, retry: Retry) -> Any:
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=SOCKET_TIMEOUT_S,
        decode_responses=True,
        retry=retry,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5,
    )
    return redis.Redis.from_pool(pool)


def _texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as arguments of a script: texts, in tables of one level, without None."""
    return {name: _text(value) for name, value in values.items() if value is not None}


def _text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _field(value) for name, value in value.items() if value is not None}
    return _field(value)


def _field(value: Any) -> str:
    """Returns the value as it is stored in a hash. A lone surrogate (invalid text) becomes `?`."""
    if isinstance(value, dict | Sequence) and not isinstance(value, str):
        return json.dumps(value)
    return str(value).encode(errors="replace").decode()


def _word_of(error: RedisError) -> str | None:
    """Returns the word of CAUSES in the error; None if there is none."""
    text = f"{error.status_code or ''} {error}"
    return next((word for word in CAUSES if re.search(rf"\b{word}\b", text)), None)


def _unavailable(error: RedisError, word: str | None) -> StoreUnavailable:
    if word is None:
        return StoreUnavailable(
            f"Redis cannot be used: {error}; check that it runs at HONE_REDIS_URL"
        )
    code = "wrong_type" if word == WRONG_TYPE else None
    return StoreUnavailable(f"Redis cannot be used ({word}): {CAUSES[word]}", code=code)
