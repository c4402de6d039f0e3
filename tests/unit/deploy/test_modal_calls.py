"""How the last call of the trainer's Function went, as Modal's client tells it."""

from __future__ import annotations

import asyncio
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import modal
import pytest

from deploy.modal import calls
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
from deploy.modal import calls

async def main():
    print(await calls.last())
    await calls.start()
    for _ in range(4):
        print(await calls.last())
    calls.DAY_S = -1.0
    print(await calls.last())
    await calls.forget()
    print(await calls.last())

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
    none = "Call(is_running=False, failure=None)"
    assert ended.stdout.splitlines() == [
        none,
        "Call(is_running=True, failure=None)",
        "Call(is_running=False, failure='RemoteError: no CUDA')",
        "Call(is_running=False, failure='it timed out')",
        "Call(is_running=False, failure='InternalFailure: lost')",
        none,
        none,
    ]
    (called,) = plane.calls["FunctionGet"]
    assert (called["app_name"], called["object_tag"]) == ("hone-trainer", "work")


@pytest.mark.parametrize("error", calls.OF_MODAL)
def test_that_modal_cannot_be_asked_says_nothing_of_the_call(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async def known(_: str) -> tuple[str, float]:
        return "fc-1", 0.0

    async def away(timeout: float) -> Any:
        raise error("away")

    call = SimpleNamespace(get=SimpleNamespace(aio=away))
    monkeypatch.setattr(calls, "_kept", lambda: SimpleNamespace(get=SimpleNamespace(aio=known)))
    monkeypatch.setattr(modal.FunctionCall, "from_id", lambda _: call)
    with pytest.raises(error, match="away"):
        asyncio.run(calls.last())
