"""torchrun, except that being asked to stop is not an error: SIGTERM ends the ranks and then this process without a traceback."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException:
        sys.exit(0)
