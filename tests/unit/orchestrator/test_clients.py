"""How long a job waits for each call to its trainer, and what is said of rewards that were tried on
answers that are known."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.orchestrator.samplers.clients import TrainerClient, trial
from services.orchestrator.samplers.status import Caller
from shared.job import Job, RewardSpec
from shared.settings import Settings
from shared.wire import StepTotals, TriedReward
from tests.support.job_records import JOB

SETTINGS = Settings(operation_deadline_s=1800, generate_deadline_s=600, rollout_adapters=3)


@pytest.mark.parametrize(
    ("lora", "waits_s"),
    [(None, 0), ({"rank": 4}, 2 * 1800)],  # three jobs share the trainer: for a step of two others
    ids=["alone", "shared"],
)
async def test_publishing_and_checkpoints_have_the_short_deadline(
    lora: dict[str, int] | None, waits_s: int
) -> None:
    job = Job.model_validate(JOB.model_dump(exclude_unset=True) | ({"lora": lora} if lora else {}))
    trainer = TrainerClient(Caller(job, SETTINGS), AsyncMock())
    trainer.client = client = AsyncMock()
    await trainer.train_step(1, (), StepTotals.model_construct())
    await trainer.publish_weights(1, "shm")
    await trainer.checkpoint(1)
    calls = client.call.await_args_list
    assert {each.args[1]: each.kwargs["deadline_s"] for each in calls} == {
        "/train_step": 1800 + waits_s,
        "/publish_weights": 300 + waits_s,
        "/checkpoints": 300 + waits_s,
    }


def said(grader: str = "math", weight: float = 1.0, **found: Any) -> tuple[str, tuple[str, ...]]:
    spec = RewardSpec(grader=grader, weight=weight, source="x" if grader == "function" else None)
    result = trial((spec,), (TriedReward(reward=grader, **found),), 4)
    return result.summary, result.warnings


def test_a_reward_that_tells_answers_apart_is_shown_without_a_warning() -> None:
    found = {"empty": 0.0, "reference": 1.0, "num_references": 4, "full_mark": 1.0}
    assert said(**found) == (
        "rewards tried on 4 rows: math: reference answers earn 1.00, empty completions earn 0.00",
        (),
    )
    brief = {"empty": 1.0, "reference": None}
    assert said("length", **brief) == (
        "rewards tried on 4 rows: length: no reference answers to try, empty completions earn 1.00",
        (),
    )
    assert said("llm_judge", why="it asks a language model, which costs")[0].endswith(
        "llm_judge: nothing (it asks a language model, which costs)"
    )


@pytest.mark.parametrize(
    ("grader", "found", "sentence"),
    [
        (
            "function",
            {"why": "timed out", "num_failed": 8, "failure": "not done after 5 s"},
            "reward 'function' failed on 8 of the completions that it was tried on: not done after "
            "5 s",
        ),
        (
            "math",
            {"empty": 0.0, "reference": 0.25, "num_references": 4, "full_mark": 1.0, "why": "no 4"},
            "reward 'math' gives the rows' own reference answers 0.25 of 1 (no 4): likely another "
            "column has the answer, or it is neither a number nor a formula",
        ),
        (
            "function",
            {"empty": 0.5, "reference": 0.5, "num_references": 4},
            "gives an empty completion 0.50 and the reference answer 0.50: it does not tell them "
            "apart; likely your function looks at another column",
        ),
        (
            "code_tests",
            {"empty": 1.0, "full_mark": 1.0},
            "gives an empty completion the full mark: likely the tests are of another function",
        ),
        (
            "function",
            {"empty": None, "reference": None, "num_references": 4, "why": "KeyError"},
            "gives the rows' own reference answers nothing (KeyError)",
        ),
    ],
)
def test_a_reward_that_is_probably_wrong_is_a_warning_with_the_cause(
    grader: str, found: dict[str, Any], sentence: str
) -> None:
    (warning,) = said(grader, **found)[1]
    assert sentence in warning
    assert said(grader, weight=-1.0, **found)[1] == (), "of a penalty less is more"
