"""Runs services in the containers, under the supervisor of `hone up`, with their logs on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modal

from deploy import local
from deploy.modal.common import SETTINGS, START_S
from deploy.supervisor import TRAINER_STOP_DEADLINE_S
from hone.client import Client
from shared.errors import Failed, Unavailable
from shared.host.logs import get_logger
from shared.http import client as shared_client
from shared.job import Job
from shared.settings import load_settings
from shared.wire import TERMINAL, VersionInfo

FOLDER = Path("/tmp/hone-stack")
LOOK_S = 5.0

AWAKE_S = 600
"""Seconds that the trainer's container, with its GPUs, waits for services. They answered before it
was called."""

RANKS_PORT, LIFE_PORT = 29500, 29501
"""On the first node: the port where the ranks meet, and the port to which the other nodes stay
connected while it lives."""

FIRST_NODE_S = 300.0
"""Seconds that a node waits for the first node. Modal starts all nodes at once."""

NODE_LOOK_S = 1.0

SILENT_S, PROBE_S, NUM_PROBES = 15, 10, 4
"""The first node counts as gone if it was silent for SILENT_S seconds, and then for NUM_PROBES
probes PROBE_S seconds apart: after 55 s."""

Sleep = Callable[[float], None]


def start(services: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Starts these services of the container, and returns their URLs once all are ready. A service
    that ends is started again. `environment` is added to this process's."""
    os.environ.update(environment)
    urls = local.up(FOLDER, services=services)["urls"]
    subprocess.Popen(["sh", "-c", "exec tail -qn +1 -F logs/*.log"], cwd=FOLDER)
    return urls


def stop() -> None:
    """Stops the services. Running jobs continue when the services are started again."""
    local.down(FOLDER)


@contextlib.contextmanager
def stack(services: Sequence[str], environment: Mapping[str, str]) -> Generator[Client]:
    """Runs these services in the block, and yields a client of their orchestrator."""
    urls = start(services, environment)
    try:
        with Client(urls["orchestrator"], token=load_settings().bearer()) as client:
            yield client
    finally:
        stop()


def why_away(urls: Sequence[str], deadline_s: float) -> str | None:
    """Returns None once all these services answer, or a sentence on one that did not in time. The
    container then ends without an error: after an error Modal would start and bill it again."""
    try:
        asyncio.run(wake(urls, deadline_s))
    except Unavailable as error:
        get_logger().error("a service does not answer", reason=error.detail)
        return error.detail
    return None


async def wake(urls: Sequence[str], deadline_s: float = START_S) -> None:
    """Returns once all these services answer. A Server without requests so far has no container,
    and would seem unreachable to a job. Raises Unavailable naming a service that does not
    answer."""
    token = load_settings().bearer()

    async def ask(url: str) -> None:
        async with shared_client.Client(url, url, token=token, patience_s=deadline_s) as client:
            await client.get("/version", VersionInfo, deadline_s=deadline_s)

    await asyncio.gather(*map(ask, urls))


def work_until_idle(client: Client, idle_s: float, sleep: Sleep = time.sleep) -> None:
    """Returns once no job has waited or run for `idle_s` seconds."""
    idle_since = time.monotonic()
    while time.monotonic() - idle_since < idle_s:
        if any(client.list(1, status=status).jobs for status in ("queued", "running")):
            idle_since = time.monotonic()
        sleep(LOOK_S)


def train(client: Client, job: Job, key: str, sleep: Sleep = time.sleep) -> dict[str, Any]:
    """Returns the outcome of the job, which may be a pause that needs operator action. The same key
    names the same job: if it is paused, it continues."""
    id = client.submit(job, key=key).id
    if client.get(id).status == "paused":
        client.resume(id)
    while (record := client.get(id)).status not in {*TERMINAL, "paused"}:
        sleep(LOOK_S)
    return record.model_dump(mode="json", include={"id", "status", "error", "summary"})


# --- a trainer on several machines ---------------------------------------------------------------
#
# Modal calls them a cluster: each container runs the trainer's Function. The first container has
# the training loop; the others train as long as it lives. If the first node's machine vanishes,
# nothing closes its connections, so the other nodes' kernels probe it periodically. If a container
# fails, Modal starts all of them again.


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
    """Returns this container's node."""
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
        try:  # as on the first node: a checkpoint that is being written is finished
            process.wait(TRAINER_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _first(node: Node) -> socket.socket:
    """Returns a connection to the first node."""
    deadline = time.monotonic() + FIRST_NODE_S
    while True:
        try:
            connection = socket.create_connection((node.addresses[0], LIFE_PORT), timeout=5.0)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Failed(f"node 0 does not answer at {node.addresses[0]}: {error}") from error
            time.sleep(NODE_LOOK_S)
        else:
            connection.settimeout(NODE_LOOK_S)
            _probe(connection)
            return connection


def _probe(connection: socket.socket) -> None:
    """Makes the kernel end the connection once the other machine is unreachable."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def _has_ended(first: socket.socket) -> bool:
    try:
        return first.recv(1) == b""
    except TimeoutError as error:
        # an error of the kernel; the timeout NODE_LOOK_S has no errno
        return error.errno == errno.ETIMEDOUT
    except OSError:  # the connection was lost
        return True
