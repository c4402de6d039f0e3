"""Advantages against TRL's own lines, run as they stand in its trainers, for every variant that
both have."""

from __future__ import annotations

import ast
import importlib.util
import random
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from services.orchestrator.grpo import advantages
from shared.job import Job
from tests.support.scored_batches import make_batch, make_job, score

if TYPE_CHECKING:
    from torch import Tensor

NUM_GROUPS, GROUP_SIZE = 7, 5
WEIGHTS = (1.0, 0.25, 2.0)


def trl_file(name: str) -> str:
    """Returns a file of TRL's without importing it, which takes many seconds."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "trainer" / name).read_text()


def run_lines(name: str, first: str, rewards: Tensor, **settings: Any) -> Tensor:
    """Runs the lines of TRL's file from `first` to where missing advantages become 0, with
    `rewards` and a trainer of these settings; returns the advantages."""
    import torch

    utils, lines = trl_file("utils.py"), trl_file(name)
    (nanstd,) = (
        node
        for node in ast.parse(utils).body
        if isinstance(node, ast.FunctionDef) and node.name == "nanstd"
    )
    last = "        advantages = torch.nan_to_num(advantages, nan=0.0)\n"
    start = lines.index(f"        {first}")
    end = lines.index(last, start) + len(last)
    scope: dict[str, Any] = {
        "torch": torch,
        "device": rewards.device,
        "rewards": rewards,
        "rewards_per_func": rewards,
        "num_generations": GROUP_SIZE,
        "self": SimpleNamespace(**settings),
    }
    exec(ast.get_source_segment(utils, nanstd) or "", scope)
    exec(textwrap.dedent(lines[start:end]), scope)
    return scope["advantages"]


def grpo_advantages(rewards: Tensor, combine: str, std: str) -> Tensor:
    """Returns what GRPOTrainer makes of rewards `[P*G, K]`, NaN where a reward does not apply."""
    import torch

    return run_lines(
        "grpo_trainer.py",
        "unscorable_mask = torch.isnan(rewards_per_func)",
        rewards,
        multi_objective_aggregation=combine,
        scale_rewards=std,
        reward_weights=torch.tensor(WEIGHTS, dtype=torch.float64),
        reward_funcs=WEIGHTS,
    )


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Returns what RLOOTrainer makes of rewards `[P*G]`, NaN where one is missing."""
    return run_lines(
        "rloo_trainer.py",
        "grouped_rewards = rewards.view(-1, num_generations)",
        rewards,
        normalize_advantages=False,
    )


def job_like(combine: str, std: str) -> Job:
    rewards = ({"grader": f"r{index}", "weight": weight} for index, weight in enumerate(WEIGHTS))
    return make_job(*rewards, combine=combine, std=std)


@pytest.mark.parametrize("not_applicable", [0.0, 0.3])
@pytest.mark.parametrize(
    ("combine", "std"),
    [("sum_then_normalize", std) for std in ("group", "batch", "none")]
    + [("normalize_then_sum", "group")],
)
def test_advantages_are_those_of_trl(
    combine: str, std: str, not_applicable: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(advantages, "EPSILON", 1e-4)
    job, dice = job_like(combine, std), random.Random(f"{combine}{std}{not_applicable}")

    def value() -> float | str:
        return (
            "skipped" if dice.random() < not_applicable else float(dice.choice([0, 0, 1, 1, 0.5]))
        )

    values_PGK = [
        [[value() for _ in WEIGHTS] for _ in range(GROUP_SIZE)] for _ in range(NUM_GROUPS)
    ]
    values_PGK[2] = [[1.0, 0.5, 0.0]] * GROUP_SIZE  # a group without signal
    values_PGK[3][0] = ["skipped"] * len(WEIGHTS)  # a rollout that nothing applies to
    batch = make_batch(
        *(tuple(score(job, *values_K) for values_K in values_GK) for values_GK in values_PGK)
    )
    rewards = torch.tensor(
        [
            [float("nan") if v == "skipped" else v for v in values_K]
            for values_GK in values_PGK
            for values_K in values_GK
        ],
        dtype=torch.float64,
    )
    ours = [
        0.0 if value is None else value
        for advantages_G in advantages.batch_advantages(batch, job)
        for value in advantages_G
    ]
    theirs = grpo_advantages(rewards, combine, std)
    assert theirs.abs().max() > 0.5
    assert ours == pytest.approx(theirs.tolist(), abs=1e-6)  # TRL adds 1e-4 and the like in float32


def test_leave_one_out_is_that_of_trls_rloo() -> None:
    import torch

    job, dice = make_job(baseline="leave_one_out", std="none"), random.Random(1)
    values_PG = [
        [dice.choice([0.0, 1.0, 0.25, None]) for _ in range(GROUP_SIZE)] for _ in range(NUM_GROUPS)
    ]
    batch = make_batch(*(tuple(score(job, value) for value in values_G) for values_G in values_PG))
    rewards = [
        float("nan") if value is None else value for values_G in values_PG for value in values_G
    ]
    theirs = rloo_advantages(torch.tensor(rewards, dtype=torch.float64))
    ours = [
        0.0 if value is None else value
        for advantages_G in advantages.batch_advantages(batch, job)
        for value in advantages_G
    ]
    assert theirs.abs().max() > 0.5
    assert ours == pytest.approx(theirs.tolist(), abs=1e-6)
