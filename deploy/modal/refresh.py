"""`python -m deploy.modal.refresh`: makes files that other containers committed to the Volume of
run folders visible in this one. Modal refuses while this container has a file of the Volume open,
so it tries again until the deadline."""

from __future__ import annotations

import sys
import time

from deploy.modal.common import runs

DEADLINE_S = 60.0
PAUSE_S = 0.5


def main() -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            runs.reload()
            return
        except RuntimeError as error:
            if time.monotonic() > deadline:
                sys.exit(f"the Volume is in use: {error}")
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
