"""torchrun, with two differences: being asked to stop is not an error, and the run folder is removed at the end.

`python -m services.trainer.agent <torchrun's arguments> <run folder>`. The run folder holds torchrun's rendezvous, so no rank may
remove it; the launcher may be gone by then.
"""

from __future__ import annotations

import shutil
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException:
        sys.exit(0)
    finally:
        shutil.rmtree(sys.argv[-1], ignore_errors=True)
