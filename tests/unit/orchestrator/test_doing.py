"""What a follower is told that a run is at."""

from __future__ import annotations

import time

from services.orchestrator.jobs.progress import Doing
from services.orchestrator.samplers.waits import Waits


def test_the_line_has_stage_waits_details_who_is_away_and_what_is_next() -> None:
    now = 100.0
    waits = Waits(lambda: now)
    doing = Doing()
    assert doing.line(waits, {}) == "beginning"
    doing.begin("loading the model", "step 1")
    with waits.on("rollout", "loading the model"):
        now = 112.0
        with waits.on("trainer", "loading the job"):
            now = 115.0
            doing.details["trainer"] = "compiling"
            assert doing.line(waits, {}) == (
                "loading the model: rollout: loading the model, 15 s; trainer: loading the job, "
                "3 s; the trainer is compiling; then step 1"
            )
    doing.begin("step 3 of 9")
    with waits.on("rollout", "sampling a group"), waits.on("rollout", "sampling a group"):
        at = time.time() - 25
        line = doing.line(waits, {"the rollout service": at})
    clock = time.strftime("%H:%M:%S", time.gmtime(at))
    assert line == (
        "step 3 of 9: rollout: 2 x sampling a group, 0 s; the rollout service is unreachable since "
        f"{clock} UTC (25 s)"
    )
