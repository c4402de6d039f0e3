"""`/v1/fine_tuning/alpha/graders`: the reward service's graders, where OpenAI's clients look."""

from __future__ import annotations

from shared.http.client import Client
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    GraderRun,
    GraderRunRequest,
    Validated,
    ValidatedGrader,
    ValidateGraderRequest,
    ValidateRequest,
)
from shared.wire.graders import reward_of

RUN_DEADLINE_S = 600.0
VALIDATE_DEADLINE_S = 60.0


def add_routes(service: Service, settings: Settings) -> None:
    def reward_service() -> Client:
        return Client(
            "reward",
            settings.reward_url,
            token=settings.bearer(),
            patience_s=settings.patience_s,
        )

    async def run(request: GraderRunRequest) -> GraderRun:
        """Grades one completion by one grader."""
        async with reward_service() as reward:
            return await reward.call(
                "POST", "/graders/run", request, GraderRun, deadline_s=RUN_DEADLINE_S
            )

    async def validate(request: ValidateGraderRequest) -> ValidatedGrader:
        """Says whether a job could name this grader; 422 with sentences if not."""
        spec = reward_of(request.grader)
        async with reward_service() as reward:
            await reward.call(
                "POST",
                "/graders/validate",
                ValidateRequest(rewards=(spec,)),
                Validated,
                deadline_s=VALIDATE_DEADLINE_S,
            )
        return ValidatedGrader(grader=request.grader)

    root = "/v1/fine_tuning/alpha/graders"
    service.operation("POST", root + "/run", run)
    service.operation("POST", root + "/validate", validate)
