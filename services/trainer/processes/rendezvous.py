"""How the ranks meet, and how they communicate afterwards.

**Meeting.** On one node the ranks meet through a file, on several nodes through a TCP store on node
0 (`HONE_TRAINER_RENDEZVOUS`). The store listens on that address only; torchrun's own would listen
on every interface. A rank that restarts while the others still run finds its name taken in the
store. It reports a failure to them, and waits for the store of the next start.

**Communication.** A gloo group carries commands and outcomes (`Channel`). A rank that fails while
others wait for it reports the failure in a store (`Failures`). Nodes send heartbeats, because the
sockets of a node that lost power or network stay open for a long time. Within a node torchrun sees
every death, and a process that dies on another node closes its sockets, which ends the others'
collectives."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from services.trainer.engine import Ranks
from shared.errors import Failed, HoneError, Unavailable, from_problem
from shared.host.logs import get_logger
from shared.settings import Settings

MEET_S = 1800.0
STORE_TIMEOUT = timedelta(seconds=30)
POLL_S = 1.0
SAY_S = 15.0
BACKLOG = 1024

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
READ_TIMEOUT = timedelta(seconds=10)

HEARTBEAT_S = 2.0
SILENCE_S = 30.0
"""Seconds without a heartbeat after which a node counts as lost; heartbeats come more often."""


@dataclass(frozen=True)
class Place:
    """The number of this process's rank, of all ranks and on its node."""

    rank: int
    local_rank: int
    node_rank: int
    ranks_per_node: int
    num_nodes: int

    @classmethod
    def of(cls, settings: Settings, local_rank: int) -> Place:
        rank = settings.trainer_node_rank * settings.trainer_ranks + local_rank
        return cls(
            rank,
            local_rank,
            settings.trainer_node_rank,
            settings.trainer_ranks,
            settings.trainer_nodes,
        )

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def shape(self) -> str:
        return f"{self.num_nodes} node(s) of {self.ranks_per_node} rank(s)"


@dataclass(frozen=True)
class Stores:
    """The stores that all ranks reach. Each has a connection of its own, because a waiting read
    blocks others on its connection."""

    group: Store
    failures: Store
    heartbeats: Store


def meet(settings: Settings, place: Place, life: Path, last_failure: str | None) -> Stores:
    """Returns once every rank is there. `life` is this node's folder for this life of its ranks;
    `last_failure` says how the previous life ended here. Raises Failed if the nodes' settings
    differ, or if some nodes do not come."""
    if place.num_nodes == 1:
        return Stores(
            *(
                FileStore(str(life / name), place.num_ranks)
                for name in ("store", "failures", "heartbeats")
            )
        )
    # the launcher has checked it
    address, _, port_text = (settings.trainer_rendezvous or "").rpartition(":")
    host, port = address.strip("[]"), int(port_text)
    if place.rank == 0:
        group = _open(host, port)
        group.set("shape", place.shape)
        group.add(_key(0), 1)
    else:
        group = _join(host, port, place, last_failure)
    _wait_for_all(group, place)
    return Stores(group, _connect(host, port), _connect(host, port))


def _open(host: str, port: int) -> TCPStore:
    """Returns the store that the other nodes join, listening on `host` only."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise Failed(
            f"cannot listen on HONE_TRAINER_RENDEZVOUS={host}:{port}: {error.strerror or error}; "
            "expected an address of node 0 "
            "(this node) and a free port"
        ) from error
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _join(host: str, port: int, place: Place, last_failure: str | None) -> Store:
    """Returns node 0's store, once no other rank has this rank's name there. Raises Failed if nodes
    have different settings."""
    deadline = time.monotonic() + MEET_S
    while True:
        _wait_for_port(host, port, deadline)
        try:
            store = _connect(host, port)
            theirs = store.get("shape").decode()
            if theirs != place.shape:
                raise Failed(
                    f"node {place.node_rank} is set up for {place.shape} and node 0 for {theirs}; "
                    "HONE_TRAINER_NODES and "
                    "HONE_TRAINER_RANKS have to be the same on every node"
                )
            if store.add(_key(place.rank), 1) == 1:
                return store
            why = f"rank {place.rank} was started again: {last_failure or 'its node was'}"
            Failures(store, place.rank, place.num_ranks).report(Unavailable(why))
        except RuntimeError as error:  # raised by a store whose server has ended
            get_logger().warning("node 0 ended", reason=str(error).splitlines()[0])
        time.sleep(POLL_S)


def _wait_for_port(host: str, port: int, deadline: float) -> None:
    logged_at = time.monotonic() - SAY_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                raise Failed(
                    f"node 0 did not listen on HONE_TRAINER_RENDEZVOUS={host}:{port} within "
                    f"{MEET_S:g} s: {error}"
                ) from error
            if now - logged_at > SAY_S:
                get_logger().warning(
                    "waiting for node 0", address=f"{host}:{port}", reason=str(error)
                )
                logged_at = now
        time.sleep(POLL_S)


def _wait_for_all(store: Store, place: Place) -> None:
    """Waits until every rank's name is in the store; rank 0 logs which ones are missing."""
    deadline = time.monotonic() + MEET_S
    logged_at = time.monotonic()
    while missing := [rank for rank in range(place.num_ranks) if not store.check([_key(rank)])]:
        now = time.monotonic()
        if now > deadline:
            raise Failed(
                f"ranks {missing} did not come within {MEET_S:g} s; expected {place.shape}"
            )
        if place.rank == 0 and now - logged_at > SAY_S:
            get_logger().warning("waiting for ranks", ranks=missing, expected=place.shape)
            logged_at = now
        time.sleep(POLL_S / 5)


def _connect(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)


def _key(rank: int) -> str:
    return f"rank-{rank}"


def tell_libraries(place: Place) -> None:
    """Sets the variables from which DeepSpeed reads this rank, because torchrun has counted only
    this node's ranks."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(place.rank), str(place.num_ranks)


# --- communication ---------------------------------------------------------------------------


class Failures:
    """Reports of ranks that will not join the collective in which others wait: at most one for each
    rank, in a store that all ranks reach.

    The store has a connection of its own, because failures are read while the process group's
    connection may be waiting.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._own = f"failure-{rank}"
        self._all = [f"failure-{other}" for other in range(num_ranks)]

    def report(self, error: HoneError) -> None:
        self._store.set(self._own, json.dumps(error.problem()))

    def clear(self) -> None:
        self._store.delete_key(self._own)

    def first(self) -> HoneError | None:
        """Returns the uncleared failure of the lowest rank; None if there is none."""
        for key in self._all:
            if self._store.check([key]):
                with contextlib.suppress(RuntimeError):  # cleared meanwhile
                    problem = json.loads(self._store.get(key))
                    return from_problem(problem["status"], problem, "a rank")
        return None


class Channel(Ranks):
    """The ranks of torch.distributed, which is initialized. Commands go over a gloo `group`, and so
    over the CPU, with any backend of the engine."""

    def __init__(self, failures: Failures, group: Any) -> None:
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._failures = failures
        self._group = group

    @classmethod
    def open(cls, failures: Failures) -> Channel:
        """Returns the channel with a new group: a collective."""
        return cls(failures, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def report_failure(self, error: HoneError) -> None:
        self._failures.report(error)

    def clear_failure(self) -> None:
        self._failures.clear()


def send_heartbeats(store: Store, place: Place, end: Callable[[str], None]) -> None:
    """Sends this node's heartbeats until node 0 cannot be reached, and then calls `end`."""
    while True:
        try:
            store.add(_heartbeat(place.node_rank), 1)
        except RuntimeError as error:  # raised by a store whose server has ended
            end(f"node 0 ended: {str(error).splitlines()[0]}")
            return
        time.sleep(HEARTBEAT_S)


def watch_heartbeats(store: Store, num_nodes: int, end: Callable[[str], None]) -> None:
    """Calls `end` once another node has been silent for `SILENCE_S` seconds. Runs on node 0."""
    seen = {node: (0, time.monotonic()) for node in range(1, num_nodes)}
    while True:
        for node, (count, since) in seen.items():
            now = store.add(_heartbeat(node), 0)
            if now != count:
                seen[node] = now, time.monotonic()
            elif time.monotonic() - since > SILENCE_S:
                end(f"node {node} has sent no heartbeat for {SILENCE_S:g} s")
                return
        time.sleep(HEARTBEAT_S)


def _heartbeat(node: int) -> str:
    return f"heartbeat-{node}"
