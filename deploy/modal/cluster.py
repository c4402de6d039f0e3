"""A trainer on several machines, which Modal calls a cluster: each container runs the trainer's
Function. The first container has the training loop; the others train as long as it lives.

If the first node's machine vanishes, nothing closes its connections. So the other nodes' kernels
probe it now and then.

If a container fails, Modal starts all of them again.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import modal

from deploy.modal.common import SETTINGS
from deploy.supervisor import TRAINER_STOP_DEADLINE_S
from shared.errors import Failed, Unavailable

RANKS_PORT, LIFE_PORT = 29500, 29501
"""On the first node: the port where the ranks meet, and the port to which the other nodes stay
connected while it lives."""

FIRST_S = 300.0
"""Seconds that a node waits for the first node. Modal starts all nodes at once."""

LOOK_S = 1.0

SILENT_S, PROBE_S, NUM_PROBES = 15, 10, 4
"""The first node counts as gone if it was silent for SILENT_S seconds, and then for NUM_PROBES
probes PROBE_S seconds apart: after 55 s."""


@dataclass(frozen=True)
class Node:
    """A container of the cluster: its number, and the private addresses of all, by number."""

    number: int
    addresses: tuple[str, ...]

    def environment(self, interfaces: Path = Path("/proc/net/if_inet6")) -> dict[str, str]:
        """Returns the settings by which the nodes' ranks find each other; none for one node."""
        if len(self.addresses) == 1:
            return {}
        return {
            "HONE_TRAINER_NODES": str(len(self.addresses)),
            "HONE_TRAINER_NODE_RANK": str(self.number),
            "HONE_TRAINER_RENDEZVOUS": f"[{self.addresses[0]}]:{RANKS_PORT}",
            "HONE_TRAINER_INTERFACE": interface_of(self.addresses[self.number], interfaces),
        }


def own_node() -> Node:
    """Returns which node this container is."""
    if SETTINGS.modal_trainer_nodes == 1:
        return Node(0, ("::1",))
    cluster = modal.Cluster.from_context()
    return Node(cluster.container_rank(), tuple(cluster.container_ips()))


def interface_of(address: str, interfaces: Path) -> str:
    """Returns the network interface that has this IPv6 address, by the kernel's table of them."""
    wanted = ipaddress.IPv6Address(address).packed.hex()
    for line in interfaces.read_text().splitlines():
        found, *_, name = line.split()
        if found == wanted:
            return name
    raise Unavailable(f"no network interface of this container has the address {address!r}")


@contextlib.contextmanager
def leading(node: Node) -> Generator[None]:
    """Wraps the first node's work: the other nodes end when it ends, for any reason."""
    if len(node.addresses) == 1:
        yield
        return
    where = (node.addresses[0], LIFE_PORT)
    with socket.create_server(where, family=socket.AF_INET6, backlog=len(node.addresses)):
        yield


def follow(node: Node, environment: dict[str, str]) -> None:
    """Runs this node's ranks until the first node ends. Raises Failed if they end before it."""
    command = [sys.executable, "-m", "services.trainer"]
    with _first(node) as first, _running(command, environment) as ranks:
        while not _has_ended(first):
            if (code := ranks.poll()) is not None:
                raise Failed(f"the ranks of node {node.number} ended with exit code {code}")


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        yield process
    finally:
        process.terminate()
        try:  # as on the first node: they finish the checkpoint that they write
            process.wait(TRAINER_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first(node: Node) -> socket.socket:
    """Returns a connection to the first node."""
    deadline = time.monotonic() + FIRST_S
    while True:
        try:
            connection = socket.create_connection((node.addresses[0], LIFE_PORT), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failed(f"node 0 does not answer at {node.addresses[0]}: {error}") from error
            time.sleep(LOOK_S)
        else:
            connection.settimeout(LOOK_S)
            _probe(connection)
            return connection


def _probe(connection: socket.socket) -> None:
    """Makes the kernel end the connection once the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def _has_ended(first: socket.socket) -> bool:
    try:
        return first.recv(1) == b""
    except TimeoutError as error:
        return error.errno == errno.ETIMEDOUT  # the kernel's; LOOK_S's timeout has no errno
    except OSError:  # it was lost
        return True
