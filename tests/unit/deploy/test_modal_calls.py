"""How the last call of the trainer's Function went, as Modal's client tells it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import pickle
from types import SimpleNamespace
from typing import Any

import modal
import pytest

from deploy.modal import calls, trainer
from shared.errors import Unavailable
from tests.support.modal_control_plane import PINNED, ControlPlane

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.metadata.version("modal") != PINNED,
        reason=f"the control plane speaks the private protocol of modal {PINNED}",
    ),
]

CALLS = """
import asyncio
from deploy.modal import calls, trainer
from shared.errors import Unavailable

async def show():
    call = await calls.last()
    print(call.is_running, call.failure, call.called_at > 0)

async def main():
    await show()
    await calls.start()
    for _ in range(4):
        await show()
    calls.DAY_S = -1.0
    await show()
    await calls.forget()
    await show()

asyncio.run(main())
"""


def test_a_call_runs_or_failed_or_is_over_until_it_is_forgotten() -> None:
    out_of_time = ("TIMEOUT", "it timed out")
    with ControlPlane() as plane:
        plane.endings = [
            *(None, ("FAILURE", "no CUDA"), out_of_time, ("INTERNAL_FAILURE", "lost")),
            out_of_time,
        ]
        ended = plane.python("-c", CALLS)
    assert ended.returncode == 0, ended.stderr
    none = "False None False"
    assert ended.stdout.splitlines() == [
        none,
        "True None True",
        "False RemoteError: no CUDA True",
        "False it timed out True",
        "False InternalFailure: lost True",
        none,
        none,
    ]
    (called,) = plane.calls["FunctionGet"]
    assert (called["app_name"], called["object_tag"]) == ("hone-trainer", "work")


def ask(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> calls.Call:
    """Returns how the last call went, of which Modal's client raises this when it is asked."""

    async def known(_: str) -> tuple[str, float]:
        return "fc-1", 0.0

    async def get(timeout: float) -> Any:
        raise raised

    call = SimpleNamespace(get=SimpleNamespace(aio=get))
    monkeypatch.setattr(calls, "_kept", lambda: SimpleNamespace(get=SimpleNamespace(aio=known)))
    monkeypatch.setattr(modal.FunctionCall, "from_id", lambda _: call)
    return asyncio.run(calls.last())


@pytest.mark.parametrize("error", calls.OF_MODAL)
def test_that_modal_cannot_be_asked_says_nothing_of_the_call(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with pytest.raises(error, match="away"):
        ask(monkeypatch, error("away"))


OF_THE_CLIENT = (
    TimeoutError,
    modal.exception.FunctionTimeoutError,
    modal.exception.OutputExpiredError,
    *calls.OF_MODAL,
)


@pytest.mark.parametrize("error", OF_THE_CLIENT)
def test_what_the_work_raised_is_not_taken_for_an_answer_of_modals(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails() -> dict[str, str]:
        raise error("of the work")

    monkeypatch.setattr(trainer, "places", fails)
    with pytest.raises(Exception, match="of the work") as caught:
        trainer.work.local()
    sent = pickle.loads(pickle.dumps(caught.value))
    ended = ask(monkeypatch, sent)
    assert ended == calls.Call(is_running=False, failure=f"{error.__name__}: of the work")


def test_an_error_of_hones_own_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable) as caught, calls.own_errors():
        raise Unavailable("no Server 'Reward'")
    ended = ask(monkeypatch, caught.value)
    assert ended == calls.Call(is_running=False, failure="no Server 'Reward'")
