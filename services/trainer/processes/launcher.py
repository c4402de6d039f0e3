"""The launcher: keeps this node's ranks running under torchrun. It imports no torch.

When a rank dies, torchrun ends all ranks of this node. The launcher reports which rank died and
why, and starts them again: at most `HONE_TRAINER_RESTARTS` times in ten minutes. The new ranks load
the previous job by themselves, from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from services.trainer.processes.extensions import own_folder, remove_stale_locks
from services.trainer.processes.launch_folder import LaunchFolder, RestartHistory
from shared.errors import BadRequest
from shared.host import nvidia
from shared.host.logs import get_logger
from shared.host.processes import ending_with_parent
from shared.http.urls import is_loopback
from shared.settings import Settings

STOP_S = 10
"""Seconds that torchrun gives the ranks to end."""

SAVE_S = 240.0
"""Seconds for ranks that must end to finish a checkpoint: enough for 200 GB at 1 GB/s."""

RESTART_WINDOW_S = 600.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0

LOOPBACK = "lo"


class Launcher:
    """Keeps this node's ranks running."""

    def __init__(self, settings: Settings, folder: LaunchFolder) -> None:
        self._settings = settings
        self._folder = folder
        self._asked = threading.Event()
        self._torchrun: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Returns the exit code: 0 if asked to stop, torchrun's if the ranks died too often."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        past, deaths = RestartHistory(), list[float]()
        while True:
            code = self._live(past)
            if self._asked.is_set():
                return 0
            failure = self._folder.failure() or f"torchrun ended with exit code {code}"
            now = time.monotonic()
            deaths = [*(death for death in deaths if now - death < RESTART_WINDOW_S), now]
            if len(deaths) > self._settings.trainer_restarts:
                get_logger().error(
                    "the ranks died too often",
                    reason=failure,
                    restarts=past.restarts,
                    exit_code=code,
                )
                return code or 1
            pause_s = min(FIRST_PAUSE_S * 2 ** (len(deaths) - 1), MAX_PAUSE_S)
            get_logger().error(
                "the ranks died and start again",
                reason=failure,
                restart=past.restarts + 1,
                after_s=pause_s,
            )
            past = RestartHistory(past.restarts + 1, failure)
            if self._asked.wait(pause_s):
                return 0

    def _live(self, past: RestartHistory) -> int:
        """Runs the ranks until they end, and returns torchrun's exit code."""
        life = self._folder.new_life(past)
        environment = rank_environment(self._settings)
        remove_stale_locks(environment)
        self._torchrun = subprocess.Popen(
            torchrun_command(self._settings.trainer_ranks, life),
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which hands it on
            preexec_fn=ending_with_parent(),
        )
        if self._asked.is_set():
            self._torchrun.terminate()
        return self._torchrun.wait()

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Ends the ranks, once they have finished a checkpoint."""
        if self._asked.is_set():
            return
        self._asked.set()
        if not self._folder.end_writing(SAVE_S):
            get_logger().error("a checkpoint is not finished, the one before stays", after_s=SAVE_S)
        if self._torchrun is not None:
            self._torchrun.terminate()


def torchrun_command(num_ranks: int, life: Path) -> list[str]:
    """Returns torchrun's command line for this node's ranks.

    Its rendezvous is a file of this node, because its TCP store would listen on every interface;
    ranks of several nodes meet as rendezvous.py says.
    """
    return [
        *(sys.executable, "-m", "services.trainer.processes.agent"),
        *("--nnodes", "1", "--nproc-per-node", str(num_ranks), "--max-restarts", "0"),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            str(life / "rendezvous"),
            "--rdzv-conf",
            "store_type=file",
        ),
        *("--log-dir", str(life / "logs")),
        *("--local-addr", "127.0.0.1", "--shutdown-timeout", str(STOP_S)),
        *("--module", "services.trainer.processes.ranks", str(life)),
    ]


def rank_environment(settings: Settings) -> dict[str, str]:
    """Returns the ranks' environment: their share of threads, the interfaces for their sockets, and
    the folder of DeepSpeed's extensions."""
    cores = len(os.sched_getaffinity(0))
    threads = settings.trainer_threads or max(1, cores // settings.trainer_ranks)
    no_store_server = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # Micro-batches differ in size: without this, memory freed by one is of no use to the next.
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    # A thread that has nothing to do leaves its core to the sampler, instead of spinning.
    idle_threads = {"OMP_WAIT_POLICY": "PASSIVE"}
    return (
        socket_interfaces(settings)
        | allocator
        | idle_threads
        | own_folder()
        | os.environ
        | nvidia.compilers()
        | no_store_server
        | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    )


def check_nodes(settings: Settings) -> None:
    """Raises BadRequest unless the settings make one trainer of one node or of several."""
    nodes, node_rank, rendezvous = (
        settings.trainer_nodes,
        settings.trainer_node_rank,
        settings.trainer_rendezvous,
    )
    if node_rank >= nodes:
        raise BadRequest(
            f"HONE_TRAINER_NODE_RANK is {node_rank} and HONE_TRAINER_NODES is {nodes}; expected a "
            f"node rank from 0 to {nodes - 1}"
        )
    if nodes == 1:
        return
    if rendezvous is None:
        raise BadRequest(
            f"HONE_TRAINER_NODES is {nodes} and HONE_TRAINER_RENDEZVOUS is not set; expected "
            "<host>:<port>, an address of node 0 "
            "that every node reaches, the same on every node"
        )
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadRequest(
            f"HONE_TRAINER_RENDEZVOUS is {rendezvous!r}; expected <host>:<port>, such as "
            "10.0.0.1:29500"
        )
    interfaces = [name for _, name in socket.if_nameindex()]
    if settings.trainer_interface is None:
        raise BadRequest(
            f"HONE_TRAINER_NODES is {nodes} and HONE_TRAINER_INTERFACE is not set; expected the "
            "network interface of this host on "
            f"which the nodes reach each other, one of {', '.join(interfaces)}"
        )
    if settings.trainer_interface not in interfaces:
        raise BadRequest(
            f"HONE_TRAINER_INTERFACE is {settings.trainer_interface!r}; expected an interface of "
            f"this host: {', '.join(interfaces)}"
        )


def socket_interfaces(settings: Settings) -> dict[str, str]:
    """Returns the variables with the interfaces on which ranks listen, for gloo between ranks and
    for NCCL. NCCL reads its variable once for all groups of a process: the ranks' own groups, and
    the groups with samplers. So NCCL gets the loopback if HONE_HOST is
    local. It gets no interface, and finds one itself, if samplers may be in other containers or on
    other hosts."""
    if settings.trainer_nodes > 1 and settings.trainer_interface:
        interface = settings.trainer_interface
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    for_nccl = {"NCCL_SOCKET_IFNAME": LOOPBACK} if is_loopback(settings.host) else {}
    return {"GLOO_SOCKET_IFNAME": LOOPBACK} | for_nccl
