"""The launcher: keeps this node's ranks running under torchrun, and owns their folder, which
outlives them. It imports no torch.

When a rank dies, torchrun ends all ranks of this node. The launcher reports which rank died and
why, and starts them again: at most MAX_RESTARTS times in ten minutes. The new ranks load
the previous job by themselves, from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from services.trainer.engine import PassBudget
from shared.errors import BadRequest, Unavailable
from shared.host import nvidia
from shared.host.logs import get_logger
from shared.host.processes import ending_with_parent
from shared.http import codec
from shared.http.urls import is_loopback
from shared.settings import Settings
from shared.wire import TrainerJob

STOP_S = 10
"""Seconds that torchrun gives the ranks to end."""

SAVE_S = 240.0
"""Seconds for ranks that must end to finish a checkpoint: enough for 200 GB at 1 GB/s."""

MAX_RESTARTS, RESTART_WINDOW_S = 3, 600.0
"""How often in how many seconds ranks that died are started again. Beyond it the trainer ends,
because a fault that repeats would repeat again."""

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
            if len(deaths) > MAX_RESTARTS:
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
        self._torchrun = subprocess.Popen(
            torchrun_command(self._settings.trainer_ranks, life),
            env=rank_environment(self._settings),
            start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
            preexec_fn=ending_with_parent(),
        )
        if self._asked.is_set():
            self._torchrun.terminate()
        return self._torchrun.wait()

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Ends the ranks, after a checkpoint that is being written."""
        if self._asked.is_set():
            return
        self._asked.set()
        if not self._folder.end_writing(SAVE_S):
            get_logger().error(
                "a checkpoint was not finished; the previous one stays", after_s=SAVE_S
            )
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
        *("--local-addr", "127.0.0.1"),
        *("--module", "services.trainer.processes.ranks", str(life)),
    ]


def rank_environment(settings: Settings) -> dict[str, str]:
    """Returns the ranks' environment: their share of threads, and the interfaces for their sockets.
    `hone up` may start several trainers on this machine."""
    cores = len(os.sched_getaffinity(0)) // (settings.trainers * settings.trainer_ranks)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores))
    no_store_server = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # Micro-batches differ in size: without this, memory freed by one cannot be used by the next.
    allocator = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    # An idle thread leaves its core to the sampler, instead of spinning.
    idle_threads = {"OMP_WAIT_POLICY": "PASSIVE"}
    # torch 2.11 waits for 30 s, and its torchrun refuses the option of later ones.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(STOP_S)}
    return (
        socket_interfaces(settings)
        | allocator
        | idle_threads
        | os.environ
        | nvidia.compilers()
        | no_store_server
        | patience
        | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
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


# --- the launcher's folder ------------------------------------------------------------------------


POLL_S = 0.05

AGENT_PID = "TRAINER_AGENT_PID"
"""The variable with the process that the ranks must not outlive: see `agent.py`."""


@dataclass(frozen=True)
class RestartHistory:
    """How often the ranks were restarted, and the latest reason."""

    restarts: int = 0
    last_failure: str | None = None


class LaunchFolder:
    """State that outlives the ranks, so that new ranks continue. It is removed with the launcher.

    job              the loaded job's body, which new ranks load automatically
    budget.json      the micro-batch budget that fits into memory, after more did not
    failure          why the ranks ended, by the first rank that knows
    past.json        how often ranks were started again, and the latest reason
    writing          locked by each rank while a checkpoint is written, by the launcher once it
                     stops
    life-<n>/        where the n-th ranks meet: torchrun's rendezvous and logs, the store
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def new_life(self, past: RestartHistory) -> Path:
        """Returns an empty folder in which new ranks meet, after the previous ranks have ended."""
        _replace(self.path / "past.json", json.dumps(asdict(past)).encode())
        (self.path / "failure").unlink(missing_ok=True)
        life = self.path / f"life-{past.restarts}"
        life.mkdir()
        return life

    def past(self) -> RestartHistory:
        return RestartHistory(**json.loads((self.path / "past.json").read_bytes()))

    def remember_job(self, request: TrainerJob | None) -> None:
        """Keeps the loaded job's body; None: forgets it."""
        if request is None:
            (self.path / "job").unlink(missing_ok=True)
        else:
            _replace(self.path / "job", codec.encode(request, codec.MSGPACK))

    def job(self) -> TrainerJob | None:
        try:
            return codec.decode(TrainerJob, (self.path / "job").read_bytes(), codec.MSGPACK)
        except FileNotFoundError:
            return None

    def remember_budget(self, request: TrainerJob, budget: PassBudget) -> None:
        """Keeps a smaller micro-batch budget that may fit, because the job's did not."""
        kept = [*_budget_key(request), budget.tokens, budget.recomputes]
        _replace(self.path / "budget.json", json.dumps(kept).encode())

    def budget(self, request: TrainerJob) -> PassBudget:
        """Returns the budget that was kept for exactly this job, or the job's own."""
        own = PassBudget(request.job.memory.micro_batch_tokens)
        try:
            *key, tokens, recomputes = json.loads((self.path / "budget.json").read_bytes())
        except FileNotFoundError:
            return own
        if key != _budget_key(request):
            return own
        return PassBudget(min(own.tokens, int(tokens)), bool(recomputes))

    def remember_failure(self, sentence: str) -> None:
        """Keeps why the ranks end, unless there is a reason already: the first one causes
        others."""
        if self.failure() is None:
            _replace(self.path / "failure", sentence.encode())

    def failure(self) -> str | None:
        try:
            return (self.path / "failure").read_bytes().decode()
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Each rank writes a checkpoint in this block. Raises Unavailable once the launcher was
        asked to stop."""
        with (self.path / "writing").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Unavailable("the trainer is stopping, and begins no checkpoint") from error
            yield

    def end_writing(self, within_s: float) -> bool:
        """Waits at most `within_s` seconds until no rank writes a checkpoint, and returns whether
        none does. Then no rank begins one while this process lives, because it holds the lock."""
        lock = os.open(self.path / "writing", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + within_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(POLL_S)


def _budget_key(request: TrainerJob) -> list[Any]:
    return [request.job_id, request.job.memory.model_dump(mode="json")]


def _replace(path: Path, data: bytes) -> None:
    # Ranks run out of memory, and fail, at the same moment: so each writes under another name.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    aside.write_bytes(data)
    aside.replace(path)
