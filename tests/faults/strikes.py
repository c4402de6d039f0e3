"""What a fault does, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from tests.faults.plan import Fault
from tests.faults.stack import LEASE_S, Stack

LONGER_THAN_LEASE_S = LEASE_S + 2.0
CUT_S = 3.0
SLOW_S = 2.0
"""Added to every answer."""

FULL_S = 4.0

INTO_S = {"sampling": 0.15, "training": 0.15, "evaluating": 0.05, "checkpointing": 0.03}
"""Seconds into a stage by which a fault strikes at the latest: less than a stage takes."""


def into_s(fault: Fault) -> float:
    """Returns how long after its stage began the fault strikes."""
    return INTO_S.get(fault.stage, 0.0) * fault.delay


async def strike(stack: Stack, fault: Fault) -> None:
    """Returns once nothing is broken any more but what the fault left. Raises LookupError if what
    it is to strike is not there."""
    match fault.how:
        case "kill -9":
            os.kill(stack.pid(fault.what), signal.SIGKILL)
        case "SIGTERM":
            os.kill(stack.pid(fault.what), signal.SIGTERM)
        case "SIGSTOP":
            await _stop(stack.pid(fault.what))
        case "cut off":
            stack.links[fault.what].cut()
            await asyncio.sleep(CUT_S)
            stack.links[fault.what].mend()
        case "slow":
            stack.links[fault.what].delay_s = SLOW_S
            await asyncio.sleep(LONGER_THAN_LEASE_S)
            stack.links[fault.what].delay_s = 0.0
        case "away":
            stack.held.add(fault.what)
            os.kill(stack.pid(fault.what), signal.SIGKILL)
            await asyncio.sleep(LONGER_THAN_LEASE_S)
            stack.held.discard(fault.what)
        case "full":
            stack.fill_disk()
            await asyncio.sleep(FULL_S)
            stack.free_disk()
        case unknown:
            raise AssertionError(unknown)


async def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(LONGER_THAN_LEASE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
