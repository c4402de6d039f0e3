"""Examples of the bodies of agents that run elsewhere."""

from __future__ import annotations

from typing import Any

from shared.wire.examples.openai import ID

WORKER, LEASE = "host-7-4242", "kX2vJb0s7m1QeZr4aTgY9w"

AGENTS: dict[str, Any] = {
    "SessionRecord": {"name": "task-1", "job_id": "countdown-1", "group": None, "waits": 1},
    "LeaseEpisodes": {"worker": WORKER, "num": 4, "wait_s": 10.0},
    "LeasedEpisodes": {
        "episodes": [
            {
                "id": LEASE,
                "job_id": ID,
                "row": {"prompt": "12 47 -> 59:", "target": 59},
                "prompt": "12 47 -> 59:",
                "path": "/v1",
                "api_key": "sk-hone-...",
                "deadline_s": 1800.0,
                "lease_s": 15.0,
            }
        ]
    },
    "RenewLeases": {"worker": WORKER, "ids": [LEASE]},
    "LeasesRenewed": {"unwanted": []},
    "EpisodeResult": {"reward": 1.0, "metrics": {"guesses": 3.0}},
    "ResultTaken": {"id": LEASE, "taken": True},
}
