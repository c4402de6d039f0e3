"""Heartbeats between nodes. They detect a node lost by power or network, whose sockets would stay
open for a long time.

Within a node torchrun sees every death; a process that dies on another node closes its sockets,
which ends the others' collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from services.trainer.processes.rendezvous import Place

INTERVAL_S = 2.0
SILENCE_S = 30.0


def send(store: Store, place: Place, end: Callable[[str], None]) -> None:
    """Sends this node's heartbeats until node 0 cannot be reached, and then calls `end`."""
    while True:
        try:
            store.add(_key(place.node_rank), 1)
        except RuntimeError as error:  # raised by a store when its server goes away
            end(f"node 0 is gone: {str(error).splitlines()[0]}")
            return
        time.sleep(INTERVAL_S)


def listen(store: Store, num_nodes: int, end: Callable[[str], None]) -> None:
    """Calls `end` once another node has been silent for `SILENCE_S` seconds. Runs on node 0."""
    seen = {node: (0, time.monotonic()) for node in range(1, num_nodes)}
    while True:
        for node, (count, since) in seen.items():
            now = store.add(_key(node), 0)
            if now != count:
                seen[node] = now, time.monotonic()
            elif time.monotonic() - since > SILENCE_S:
                end(f"node {node} has sent no heartbeat for {SILENCE_S:g} s")
                return
        time.sleep(INTERVAL_S)


def _key(node: int) -> str:
    return f"heartbeat-{node}"
