"""A sampler that met the trainer after it was given up for late. vLLM is imported where it is used:
every worker of pytest imports the test modules."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from services.rollout.on_vllm.inside_transfer import Incoming


class Engine:
    """Meets the trainer once `met` is set. `deadline_s` after its turn began it is late."""

    def __init__(self, deadline_s: float) -> None:
        self.meet_s, self.began_at = deadline_s, time.monotonic()
        self.met, self.ended = threading.Event(), threading.Event()

    def parse_init_info(self, meeting: Any) -> Any:
        return meeting

    def init_transfer_engine(self, _: Any) -> None:
        self.met.wait(60)

    def shutdown(self) -> None:
        self.ended.set()


def incoming(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Incoming:
    from services.rollout.on_vllm import inside_transfer

    monkeypatch.setattr(inside_transfer, "WeightTransferConfig", SimpleNamespace)
    monkeypatch.setattr(
        inside_transfer,
        "WeightTransferEngineFactory",
        SimpleNamespace(create_engine=lambda *_: engine),
    )
    worker = SimpleNamespace(vllm_config=None, device=None, get_model=lambda: None)
    return inside_transfer.Incoming(cast(Any, worker), inside_transfer.SHARED, {}, [])


def test_one_that_meets_too_late_gives_back_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(deadline_s=0.0)
    coming = incoming(engine, monkeypatch)
    time.sleep(0.01)
    late = coming.problem()
    assert late == "trainer and sampler did not meet within 0 s"
    engine.met.set()
    assert engine.ended.wait(60) and coming.problem() == late


def test_one_that_meets_in_time_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(deadline_s=60.0)
    coming = incoming(engine, monkeypatch)
    engine.met.set()
    while (problem := coming.problem()) is None:
        time.sleep(0.01)
    assert problem == "" and not engine.ended.is_set()
