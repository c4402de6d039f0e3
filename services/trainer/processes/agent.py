"""torchrun, with three differences: being asked to stop is not an error, the run folder learns
which rank died and of what, and is removed if the launcher is gone.

`python -m services.trainer.processes.agent <torchrun's arguments> <this life's folder in the run
folder>`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main

from services.trainer.processes.launch_folder import AGENT_PID, LaunchFolder
from services.trainer.processes.rendezvous import Place
from shared.environment import load_settings


def describe(failures: dict[int, ProcessFailure], first_rank: int) -> str:
    """Returns which rank died first and of what. `first_rank` is the first of this node.

    One that was killed comes before those that ended because it was gone, and last those that
    torchrun ended, by SIGTERM.
    """

    def order(failure: ProcessFailure) -> tuple[bool, bool, int]:
        return failure.exitcode == -signal.SIGTERM, failure.exitcode >= 0, failure.timestamp

    failure = min(failures.values(), key=order)
    rank = f"rank {first_rank + failure.local_rank}"
    if failure.exitcode >= 0:
        return f"{rank} ended with exit code {failure.exitcode}"
    hint = (
        ", as the kernel does when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    )
    return f"{rank} was killed by {failure.signal_name()}{hint}"


if __name__ == "__main__":
    launcher = os.getppid()
    os.environ[AGENT_PID] = str(os.getpid())
    folder = LaunchFolder(Path(sys.argv[-1]).parent)
    try:
        main()
    except SignalException:
        sys.exit(0)
    except ChildFailedError as error:
        folder.note_failure(describe(error.failures, Place.of(load_settings(), 0).rank))
        sys.exit(1)
    finally:
        if os.getppid() != launcher:
            shutil.rmtree(folder.path, ignore_errors=True)
