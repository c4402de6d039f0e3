"""Two machines on one: two network namespaces joined by a cable (a veth pair), and a way into the
first one's loopback.

Needs no privileges where the host lets users make namespaces. Run as a program it is the relay: it
hands what comes to a Unix socket on to a port of the namespace in which it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("left", "right")


class Forbidden(Exception):
    """Why this host cannot give us two namespaces."""


@dataclass(frozen=True)
class Nodes:
    """`inside(n)` is what a command begins with that runs on node n."""

    holders: tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]

    def inside(self, node: int) -> list[str]:
        return [
            "nsenter",
            "-t",
            str(self.holders[node].pid),
            "-U",
            "-n",
            "--preserve-credentials",
            "--",
        ]


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Raises Forbidden where the host lacks the tools, or forbids it."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        raise Forbidden(f"there is no {missing[0]!r} on this host")
    first = subprocess.Popen(["unshare", "-Urn", "sleep", "infinity"], stderr=subprocess.DEVNULL)
    holders = [first]
    try:
        _wait_for_namespace(first)
        enter = ["nsenter", "-t", str(first.pid), "-U", "-n", "--preserve-credentials", "--"]
        second = subprocess.Popen(
            [*enter, "unshare", "-n", "sleep", "infinity"], stderr=subprocess.DEVNULL
        )
        holders.append(second)
        _wait_for_namespace(second, other_than=first)
        nodes = Nodes((first, second))
        left, right = INTERFACES
        _run(
            *nodes.inside(0),
            *f"ip link add {left} type veth peer name {right} netns {second.pid}".split(),
        )
        for node, (address, interface) in enumerate(zip(ADDRESSES, INTERFACES, strict=True)):
            for command in (
                f"addr add {address}/24 dev {interface}",
                f"link set {interface} up",
                "link set lo up",
            ):
                _run(*nodes.inside(node), "ip", *command.split())
        yield nodes
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _wait_for_namespace(
    process: subprocess.Popen[bytes], other_than: subprocess.Popen[bytes] | None = None
) -> None:
    """Waits until the process has a network of its own."""
    others = {Path("/proc/self/ns/net").readlink()}
    if other_than is not None:
        others.add(Path(f"/proc/{other_than.pid}/ns/net").readlink())
    end = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").readlink() not in others:
                return
        time.sleep(0.01)
    raise Forbidden("the host lets us make no network namespace")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Forbidden(f"{' '.join(command)!r} failed: {done.stderr.strip()}")


async def relay(socket: str, port: int) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, their_writer), pump(their_reader, writer))

    server = await asyncio.start_unix_server(handle, socket)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1], int(sys.argv[2])))
