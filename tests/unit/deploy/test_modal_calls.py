"""How the last call of the trainer's Function went, as Modal's client tells it."""

from __future__ import annotations

import asyncio
import pickle
import time
from types import SimpleNamespace
from typing import Any

import modal
import pytest

from deploy.modal import calls, trainer
from shared.errors import Unavailable


def ask(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, called_at: float = 0.0
) -> calls.Call:
    """Returns how the last call went, if Modal's client raises this when it is asked about it."""

    async def known(_: str) -> tuple[str, float]:
        return "fc-1", called_at

    async def get(timeout: float) -> Any:
        raise raised

    call = SimpleNamespace(get=SimpleNamespace(aio=get))
    monkeypatch.setattr(calls, "_kept", lambda: SimpleNamespace(get=SimpleNamespace(aio=known)))
    monkeypatch.setattr(modal.FunctionCall, "from_id", lambda _: call)
    return asyncio.run(calls.last())


def test_a_call_runs_or_has_failed_or_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, exceptions = time.time(), modal.exception
    runs = ask(monkeypatch, TimeoutError(), now)
    assert runs == calls.Call(is_running=True, called_at=now)
    failed = ask(monkeypatch, exceptions.RemoteError("no CUDA"), now)
    assert failed == calls.Call(False, "RemoteError: no CUDA", now)
    timed_out = exceptions.FunctionTimeoutError("it timed out")
    assert ask(monkeypatch, timed_out, now) == calls.Call(False, "it timed out", now)
    assert ask(monkeypatch, timed_out, now - calls.DAY_S - 1) == calls.NONE
    assert ask(monkeypatch, exceptions.OutputExpiredError("long ago"), now) == calls.NONE


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


def test_an_error_of_hones_own_is_told_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable) as caught, calls.as_hone_errors():
        raise Unavailable("no Server 'Reward'")
    ended = ask(monkeypatch, caught.value)
    assert ended == calls.Call(is_running=False, failure="no Server 'Reward'")
