"""`python -m services.trainer`: checks settings and port, then runs the ranks under torchrun until SIGTERM.

This process imports no torch. It hands SIGTERM on, ends with the ranks, and removes the folder in which they met.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from shared import logs
from shared.config import Settings, load_settings
from shared.errors import HoneError
from shared.logs import get_logger
from shared.service import Service

PR_SET_PDEATHSIG = 1
STOP_S = 10


def main() -> None:
    try:
        settings = load_settings()
        logs.configure("trainer", settings)
        Service("trainer", settings).server(settings.trainer_port)
    except HoneError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    sys.exit(launch(settings))


def launch(settings: Settings) -> int:
    """Runs the ranks and returns the exit code: 0 if they were asked to stop."""
    run_dir = Path(tempfile.mkdtemp(prefix="hone-trainer-"))
    asked = False
    try:
        libc = ctypes.CDLL(None)
        torchrun = subprocess.Popen(
            torchrun_command(settings.trainer_ranks, run_dir),
            env=rank_environment(settings),
            start_new_session=True,  # Ctrl-C reaches this process only, which hands it on
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )

        def stop(_signal: int, _frame: FrameType | None) -> None:
            nonlocal asked
            asked = True
            torchrun.terminate()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        code = torchrun.wait()
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    if asked:
        return 0
    get_logger().error("the ranks ended", exit_code=code)
    return code or 1


def torchrun_command(num_ranks: int, run_dir: Path) -> list[str]:
    """Returns torchrun's command line. Its rendezvous is a file, because its TCP store would listen on every interface."""
    return [
        *(sys.executable, "-m", "services.trainer.agent"),
        *("--nnodes", "1", "--nproc-per-node", str(num_ranks), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(run_dir / "rendezvous"), "--rdzv-conf", "store_type=file"),
        *("--log-dir", str(run_dir / "logs")),
        *("--local-addr", "127.0.0.1", "--shutdown-timeout", str(STOP_S)),
        *("--module", "services.trainer.ranks", str(run_dir)),
    ]


def rank_environment(settings: Settings) -> dict[str, str]:
    """Returns the environment of the ranks: threads shared out, sockets between them on this host only."""
    cores = len(os.sched_getaffinity(0))
    threads = settings.trainer_threads or max(1, cores // settings.trainer_ranks)
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    no_store_server = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return loopback | os.environ | no_store_server | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    main()
