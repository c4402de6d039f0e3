"""Whether a job goes on after a service failed it. Then everything is put in place again, as at its
start, and the stored batches after the trainer's newest checkpoint are replayed.
"""

from __future__ import annotations

import asyncio

from services.orchestrator.loop.groups import MustPause
from services.orchestrator.loop.peers import Peers
from services.orchestrator.queue.store import StoreUnavailable
from shared.errors import Conflict, Failed, HoneError, StateLost, Unavailable
from shared.wire import TrainerState

MAX_RECOVERIES = 3
"""For each job, counted anew when somebody resumes it."""

LAST_WORDS_S = 2.0
"""A trainer that ends says why, and is gone within this time."""


async def can_recover(error: HoneError, trainer: TrainerState, peers: Peers) -> bool:
    """Returns whether the service that raised `error` lost its state or was away, so that putting
    it in place again may help.

    A Conflict says that it is not at the step or version where it was left, Unavailable that it was
    away. A call that took longer than its deadline would do so again. Anything else counts only if
    the trainer was started again since it was as `trainer` says: the call under way when one of its
    ranks dies may fail with that rank's error.
    """
    if isinstance(error, StoreUnavailable | MustPause):
        return False
    if isinstance(error, Conflict | StateLost):
        return True
    if isinstance(error, Unavailable):
        return not isinstance(error.__cause__, TimeoutError)
    return isinstance(error, Failed) and await _started_again(trainer, peers)


async def _started_again(trainer: TrainerState, peers: Peers) -> bool:
    for wait_s in (0.0, LAST_WORDS_S):
        await asyncio.sleep(wait_s)
        try:
            now = await peers.trainer_state()
        except Unavailable:
            return True  # it answered a moment ago, and is gone
        if (now.job_id, now.restarts) != (trainer.job_id, trainer.restarts):
            return True
    return False
