"""An example of each body and answer, as the OpenAPI documents show it: JSON by the name of the
model. Tests hold them to their models."""

from __future__ import annotations

from typing import Any

from shared.wire.examples.jobs import AGENTS, JOBS
from shared.wire.examples.openai import OPENAI
from shared.wire.examples.services import REWARDS, SAMPLERS, TRAINERS

EVERY_SERVICE: dict[str, Any] = {
    "Health": {"status": "ok", "service": "orchestrator"},
    "Readiness": {"ready": True, "dependencies": {"redis": {"ok": True, "detail": "ready"}}},
    "VersionInfo": {"service": "orchestrator", "hone": "0.1.0"},
    "WaitRequest": {"ids": ["f3a95c01b7d2e8460c1f9a35"], "wait_s": 20.0},
    "WaitResult": {"ids": ["f3a95c01b7d2e8460c1f9a35"], "busy": 3},
    "Accepted": {"operation": "f3a95c01b7d2e8460c1f9a35"},
    "NoBody": {},
}
EXAMPLES = EVERY_SERVICE | AGENTS | JOBS | OPENAI | SAMPLERS | TRAINERS | REWARDS
