"""The figures of `bench.loop`: the better TRL of each repeat, and what of a step is no work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import grpo, loop
from bench.grpo import STAGES, Step, Turn, stack
from bench.loop import TASKS, check, compare, main, overhead

TASK = replace(TASKS["0.6M"], num_prompts=2, group_size=5)


def turn(seconds: list[float], **stages: float) -> Turn:
    found = dict.fromkeys(STAGES, 0.0) | stages
    steps = [Step(each, found, 0.5, TASK.max_tokens, TASK.num_samples) for each in seconds]
    return Turn(steps, peak_gib=1.0)


def test_hone_is_compared_with_the_better_trl_of_each_repeat_by_hand() -> None:
    # Of 10 samples a step: 5, 10 and 2.5 per second; TRL's better one 2.5, 2 and 2.5.
    turns = {
        "Hone": [turn([1.0, 3.0]), turn([1.0]), turn([4.0])],
        "Hone, a step ahead": [turn([1.0]), turn([1.0]), turn([2.0])],
        "TRL": [turn([4.0]), turn([8.0]), turn([4.0])],
        "TRL with vLLM": [turn([5.0]), turn([5.0]), turn([10.0])],
    }
    figures = {figure.name: figure for figure in compare("0.6M", TASK, turns, least_s=1.0)}
    first = figures["0.6M: samples per second, Hone to the better TRL"]
    assert (first.value, first.spread, first.ok) == (2.0, (1.0, 5.0), True)
    assert figures["0.6M: Hone to TRL with vLLM"].spread == (2.5, 5.0)
    assert figures["0.6M: Hone, a step ahead, to the better TRL"].spread == (2.0, 5.0)
    assert figures["0.6M: TRL"].value == 2.5
    most = figures["0.6M: only the products of a step, to the better TRL"]
    assert (most.value, most.spread) == (4.0, (4.0, 5.0)), "10 per second at most"


def test_what_is_not_a_steps_work_is_its_overhead_by_hand() -> None:
    found = turn([2.0, 2.0], generate=1.0, reward=0.1, train=0.5, sync=0.3, store=0.06)
    assert overhead(found) == pytest.approx(0.05)


def test_a_side_that_trained_on_fewer_completions_has_no_figure() -> None:
    equal = turn([1.0])
    check(TASK, {"Hone": [equal], "TRL": [equal]})
    fewer = replace(equal, steps=[replace(equal.steps[0], num_trained=5)])
    with pytest.raises(ValueError, match="TRL trained on 5 completions of 64 tokens, expected 10"):
        check(TASK, {"Hone": [equal], "TRL": [equal, fewer]})


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

    def take_turns(*_: Any, **__: Any) -> Any:
        with stack(tmp_path, samplers=2):
            get_sigterm()

    downed = list[Path]()
    monkeypatch.setattr("sys.argv", ["loop", "--models", "0.6M"])
    monkeypatch.setattr(loop, "write_task", lambda *_: 0)
    monkeypatch.setattr(loop, "take_turns", take_turns)
    monkeypatch.setattr(grpo.local, "up", up)
    monkeypatch.setattr(grpo.local, "down", downed.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, downed) == (143, [tmp_path / "stack"])
