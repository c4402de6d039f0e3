"""Where the ranks meet: through a file on one node, through a TCP store on node 0
(`HONE_TRAINER_RENDEZVOUS`) if there are several.

The store listens on that address only; torchrun's own would listen on every interface. A rank that
restarts while the others are still in their previous life finds its name taken there. It tells them
so, and waits for the store of the next life.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from services.trainer.processes.channel import Notes
from shared.errors import Failed, Unavailable
from shared.host.logs import get_logger
from shared.settings import Settings

MEET_S = 1800.0
STORE_TIMEOUT = timedelta(seconds=30)
POLL_S = 1.0
SAY_S = 15.0
BACKLOG = 1024


@dataclass(frozen=True)
class Place:
    """Which rank this process is, of all and on its node."""

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
class Meeting:
    """The stores that all ranks reach. Each has a connection of its own, because a waiting read
    blocks others on its connection."""

    group: Store
    notes: Store
    heartbeats: Store


def meet(settings: Settings, place: Place, life: Path, last_failure: str | None) -> Meeting:
    """Returns once every rank is there. `life` is this node's folder for this life of its ranks;
    `last_failure` says how the previous life ended here. Raises Failed if nodes disagree, or some
    do not come."""
    if place.num_nodes == 1:
        return Meeting(
            *(
                FileStore(str(life / name), place.num_ranks)
                for name in ("store", "notes", "heartbeats")
            )
        )
    host, port = address_of(settings)
    if place.rank == 0:
        group = _open(host, port)
        group.set("shape", place.shape)
        group.add(_key(0), 1)
    else:
        group = _join(host, port, place, last_failure)
    _wait_for_all(group, place)
    return Meeting(group, _connect(host, port), _connect(host, port))


def address_of(settings: Settings) -> tuple[str, int]:
    """Returns host and port of HONE_TRAINER_RENDEZVOUS, which the launcher has checked."""
    host, _, port = (settings.trainer_rendezvous or "").rpartition(":")
    return host.strip("[]"), int(port)


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
            Notes(store, place.rank, place.num_ranks).leave(Unavailable(why))
        except RuntimeError as error:  # raised by a store when its server goes away
            get_logger().warning("node 0 went away", reason=str(error).splitlines()[0])
        time.sleep(POLL_S)


def _wait_for_port(host: str, port: int, deadline: float) -> None:
    said = time.monotonic() - SAY_S
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
            if now - said > SAY_S:
                get_logger().warning(
                    "waiting for node 0", address=f"{host}:{port}", reason=str(error)
                )
                said = now
        time.sleep(POLL_S)


def _wait_for_all(store: Store, place: Place) -> None:
    """Waits until every rank has put its name into the store; rank 0 says for whom it waits."""
    deadline = time.monotonic() + MEET_S
    said = time.monotonic()
    while missing := [rank for rank in range(place.num_ranks) if not store.check([_key(rank)])]:
        now = time.monotonic()
        if now > deadline:
            raise Failed(
                f"ranks {missing} did not come within {MEET_S:g} s; expected {place.shape}"
            )
        if place.rank == 0 and now - said > SAY_S:
            get_logger().warning("waiting for ranks", ranks=missing, expected=place.shape)
            said = now
        time.sleep(POLL_S / 5)


def _connect(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)


def _key(rank: int) -> str:
    return f"rank-{rank}"


def tell_libraries(place: Place) -> None:
    """Sets the variables from which DeepSpeed reads this rank, because torchrun has counted this
    node's ranks only."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(place.rank), str(place.num_ranks)
