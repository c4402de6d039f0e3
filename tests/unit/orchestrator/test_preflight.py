"""The checks of a job: which error a failed check raises."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.orchestrator.data.order import History
from services.orchestrator.errors import CheckFailed
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.preflight import AcceptedData, Preflight
from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.settings import Settings
from tests.support.job_records import record

JOB = record("queued").job


class FailingServices:
    def __init__(self, error: HoneError) -> None:
        self.error = error

    async def validate(self, *_: Any) -> None:
        raise self.error


def preflight(error: HoneError) -> Preflight:
    settings = Settings()
    services = cast(Any, FailingServices(error))
    return Preflight(JOB, settings, services, CheckExecutor(settings))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Unavailable("the environment at http://e cannot be reached"), Unavailable),
        (Failed("the grader's process died"), Unavailable),
        (BadRequest("unknown grader 'x'"), BadRequest),
    ],
)
async def test_a_submission_is_refused_by_what_is_wrong_and_sent_again_for_the_rest(
    error: HoneError, kind: type[HoneError]
) -> None:
    with pytest.raises(kind) as raised:
        await preflight(error).run("services")
    assert (raised.value.detail, raised.value.status) == (error.detail, kind.status)


async def test_at_the_start_of_an_attempt_every_failed_check_is_decided_as_one() -> None:
    run = preflight(error := Unavailable("no answer", code="deadline"))
    run.accepted = AcceptedData({}, History())
    with pytest.raises(CheckFailed) as raised:
        await run.run("services")
    assert (raised.value.needs, raised.value.cause) == ("services", error)
