"""The figures of `bench.loop`: the better TRL of each repeat, and what of a step is no work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import loop
from bench.loop import TASKS, Turn, compare, main, overhead, stack

TASK = replace(TASKS["0.6M"], num_prompts=2, group_size=5)


def hone(seconds: list[float], **stages: float) -> Turn:
    return Turn(seconds, {"generate": 0.0, "reward": 0.0, "train": 0.0, "sync": 0.0} | stages)


def test_hone_is_compared_with_the_better_trl_of_each_repeat_by_hand() -> None:
    # Of 10 samples a step: 5, 10 and 2.5 per second; TRL's better one 2.5, 2 and 2.5.
    turns = {
        "Hone": [hone([1.0, 3.0]), hone([1.0]), hone([4.0])],
        "Hone, a step ahead": [hone([1.0]), hone([1.0]), hone([2.0])],
        "TRL": [Turn([4.0], {}), Turn([8.0], {}), Turn([4.0], {})],
        "TRL with vLLM": [Turn([5.0], {}), Turn([5.0], {}), Turn([10.0], {})],
    }
    figures = {figure.name: figure for figure in compare("0.6M", TASK, turns, least_s=1.0)}
    first = figures["0.6M: samples per second, Hone to the better TRL"]
    assert (first.value, first.spread, first.ok) == (2.0, (1.0, 5.0), True)
    assert figures["0.6M: Hone to TRL with vLLM"].spread == (2.5, 5.0)
    assert figures["0.6M: Hone, a step ahead, to the better TRL"].spread == (2.0, 5.0)
    assert figures["0.6M: TRL"].value == 2.5
    most = figures["0.6M: nothing but the products of a step, to the better TRL"]
    assert (most.value, most.spread) == (4.0, (4.0, 5.0)), "10 per second at most"


def test_what_is_not_a_steps_work_is_its_overhead_by_hand() -> None:
    turn = hone([2.0, 2.0], generate=1.0, reward=0.1, train=0.5, sync=0.3, store=0.06)
    assert overhead(turn) == pytest.approx(0.05)


def test_both_models_have_groups_and_lengths_in_common() -> None:
    small, large = TASKS["0.6M"], TASKS["40M"]
    assert (small.group_size, small.max_tokens) == (large.group_size, large.max_tokens)


@pytest.fixture
def handler() -> Iterator[None]:
    """What SIGTERM did before, again."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("when", ["starting", "running"])
def test_sigterm_ends_the_stack_too(
    when: str, handler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def get_sigterm(*_: Any, **__: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)  # the handler runs
        return {}

    def up(*_: Any, **__: Any) -> dict[str, Any]:
        return get_sigterm() if when == "starting" else {"urls": {"orchestrator": "http://x"}}

    def alternate(*_: Any) -> Any:
        with stack(tmp_path):
            get_sigterm()

    downed = list[Path]()
    monkeypatch.setattr("sys.argv", ["loop", "--models", "0.6M"])
    monkeypatch.setattr(loop, "write_task", lambda *_: 0)
    monkeypatch.setattr(loop, "alternate", alternate)
    monkeypatch.setattr(loop.local, "up", up)
    monkeypatch.setattr(loop.local, "down", downed.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, downed) == (143, [tmp_path / "stack"])
