"""How trainer and sampler meet to move weights from device to device (`weight_sync = "nccl"`), in a
store of torch's under the version's key:

    asked          how many samplers have asked
    asked/<n>      the n-th one's name and number of ranks: "3f2a 2"
    <name>/turn    is there once it is served; until then it waits
    <name>/...     its process group's own
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

ASKED, TURN = "asked", "turn"

ERROR_HANDLING, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"


def nth_asked(number: int) -> str:
    return f"{ASKED}/{number}"


@contextlib.contextmanager
def surviving_peers() -> Generator[None]:
    """A NCCL group that is made within leaves the process alive when a peer does not do its part in
    time. By default torch ends the process then: a peer that dies would take this one along."""
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = CLEAN_UP_ONLY  # a group reads it when it is made
    try:
        yield
    finally:
        os.environ.pop(ERROR_HANDLING)
        if before is not None:
            os.environ[ERROR_HANDLING] = before
