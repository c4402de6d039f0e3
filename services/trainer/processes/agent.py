"""torchrun, with three differences: a request to stop is not an error; the launch folder records
which rank died and why; and the launch folder is removed if the launcher has ended.

`python -m services.trainer.processes.agent <torchrun's arguments> <this life's folder in the run
folder>`.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

from services.trainer.processes.launcher import AGENT_PID, LaunchFolder
from services.trainer.processes.rendezvous import Place
from shared.host.processes import how_it_ended
from shared.settings import load_settings

ON_SIGTERM = 128 + signal.SIGTERM
"""The exit code of rank 0 after SIGTERM: it first ends HTTP gracefully."""


def describe(failures: dict[int, ProcessFailure], first_rank: int, peak_bytes: int = 0) -> str:
    """Returns a sentence on which rank died first, and why. `first_rank` is the first of this node,
    `peak_bytes` the most memory that any of its ranks had; 0: unknown.

    Ranks that a signal killed count before ranks that exited, which may be a consequence, and these
    before SIGTERM, with which torchrun ends the other ranks; within each kind the earliest.
    """

    def order(failure: ProcessFailure) -> tuple[bool, bool, int]:
        got_sigterm = failure.exitcode in (-signal.SIGTERM, ON_SIGTERM)
        return got_sigterm, not got_sigterm and failure.exitcode >= 0, failure.timestamp

    failure = min(failures.values(), key=order)
    rank = f"rank {first_rank + failure.local_rank}"
    if failure.exitcode == ON_SIGTERM:
        return f"{rank} was ended by SIGTERM"
    is_killed = failure.exitcode == -signal.SIGKILL
    peak = f" (peak of a rank: {peak_bytes / 2**30:.1f} GiB)" if is_killed and peak_bytes else ""
    return f"{rank} {how_it_ended(failure.exitcode)}{peak}"


if __name__ == "__main__":
    launcher = os.getppid()
    os.environ[AGENT_PID] = str(os.getpid())
    folder = LaunchFolder(Path(sys.argv[-1]).parent)
    try:
        main()
    except SignalException:
        sys.exit(0)
    except ChildFailedError as error:
        peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        first_rank = Place.of(load_settings(), 0).rank
        folder.remember_failure(describe(error.failures, first_rank, peak_bytes))
        sys.exit(1)
    finally:
        if os.getppid() != launcher:
            shutil.rmtree(folder.path, ignore_errors=True)
