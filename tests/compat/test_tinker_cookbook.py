"""The recipes of Tinker's cookbook, unmodified, with a model and data in the place of the Hub's:
they learn, also while the orchestrator is killed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hone
from tests.compat.conftest import AgentStack
from tests.compat.local_hub import MODEL, write_cache, write_data_sets
from tests.compat.packages import python_with
from tests.compat.test_tinker import kill

pytestmark = [pytest.mark.compat, pytest.mark.system, pytest.mark.timeout(900)]
PACKAGE = "tinker-cookbook"

RECIPE_S = 300.0


class Recipes:
    """The recipes, run in the folder of the data sets."""

    def __init__(self, stack: AgentStack) -> None:
        self._stack = stack
        self._work = stack.folder / "work"
        write_cache(Path(stack.environment["HF_HOME"]), 0)
        write_data_sets(self._work)
        self._python = python_with("tinker-cookbook", torch=True)
        self._environment = stack.environment | {
            "TINKER_BASE_URL": stack.url,
            "TINKER_API_KEY": "tml-none",
            "HF_DATASETS_CACHE": str(stack.folder / "data_sets"),
            "PYTHONPATH": "",
        }

    def folder(self, name: str) -> Path:
        return self._work / "logs" / name

    def begin(self, recipe: str, name: str, **options: Any) -> subprocess.Popen[bytes]:
        given = {"log_path": self.folder(name), "model_name": MODEL, **options}
        words = [f"{key}={value}" for key, value in given.items()]
        with (self._stack.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [str(self._python), "-m", f"tinker_cookbook.recipes.{recipe}", *words],
                cwd=self._work,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, running: subprocess.Popen[bytes], name: str) -> list[dict[str, Any]]:
        """Returns the rows of metrics that the recipe wrote."""
        try:
            status = running.wait(RECIPE_S)
        finally:
            running.kill()
            running.wait()
        assert status == 0, (self._stack.folder / f"{name}.log").read_text()[-3000:]
        return self.rows(name, "metrics")

    def run(self, recipe: str, name: str, **options: Any) -> list[dict[str, Any]]:
        return self.finish(self.begin(recipe, name, **options), name)

    def rows(self, name: str, what: str) -> list[dict[str, Any]]:
        path = self.folder(name) / f"{what}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def saved(self, name: str, which: int, key: str) -> str:
        """Returns the path of what the recipe saved."""
        return self.rows(name, "checkpoints")[which][key]

    def until(self, name: str, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
        end = time.monotonic() + RECIPE_S
        while not holds(self.rows(name, "metrics")):
            assert time.monotonic() < end, name
            time.sleep(0.05)


@pytest.fixture(scope="module")
def recipes(agent_stack: AgentStack) -> Recipes:
    return Recipes(agent_stack)


SL = {"batch_size": 16, "learning_rate": 1e-2, "lora_rank": 8, "max_length": 512}


@pytest.fixture(scope="module")
def taught(recipes: Recipes) -> list[dict[str, Any]]:
    """The model learns to answer with a random digit, as the recipe `sl_loop` teaches it."""
    return recipes.run("sl_loop", "sl", max_steps=32, save_every=8, **SL)


def test_sl_loop_learns_and_a_death_of_the_orchestrator_changes_nothing(
    recipes: Recipes, taught: list[dict[str, Any]], agent_stack: AgentStack
) -> None:
    nll = [row["train_mean_nll"] for row in taught]
    assert nll[-1] < 0.5 < 5 < nll[0]
    again = recipes.begin("sl_loop", "again", max_steps=12, save_every=0, **SL)
    recipes.until("again", lambda rows: len(rows) >= 4)
    kill(agent_stack, "services.orchestrator")
    rows = recipes.finish(again, "again")
    assert [row["train_mean_nll"] for row in rows] == nll[:12]


def check_trained_with_stable_reinforce(stack: AgentStack, rows: list[dict[str, Any]]) -> None:
    """The recipe's default loss has moved the model, and the model's log says how it is computed.
    Where no reward differs from the others, a recipe sends no call, or advantages that are 0 but
    for rounding: they give a norm of 1e-5."""
    assert max(row.get("grad_norm:mean", 0.0) for row in rows) > 1e-3, rows
    with hone.Client(stack.url) as client:
        told = [event.message for event in client.events(client.list().jobs[0].id)]
    assert any("'stable_reinforce' is computed as 'cispo'" in one for one in told), told


@pytest.mark.usefixtures("taught")
def test_rl_loop_continues_from_a_checkpoint_and_learns(
    recipes: Recipes, agent_stack: AgentStack
) -> None:
    """It finds the checkpoint in its own log, as after a break."""
    folder = recipes.folder("rl")
    folder.mkdir(parents=True)
    known = {"name": "sl", "batch": 0, "state_path": recipes.saved("sl", -1, "state_path")}
    (folder / "checkpoints.jsonl").write_text(json.dumps(known) + "\n")
    options = {"batch_size": 8, "group_size": 16, "learning_rate": 2e-3, "max_tokens": 24}
    rows = recipes.run("rl_loop", "rl", max_steps=18, lora_rank=8, save_every=8, **options)
    check_trained_with_stable_reinforce(agent_stack, rows)
    rewards = [row["reward/total"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.25 and sum(rewards[-3:]) / 3 > 0.5, rewards


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("more", [{}, {"max_steps_off_policy": 1}], ids=["sync", "async"])
def test_math_rl_trains_by_its_default_loss(
    recipes: Recipes, agent_stack: AgentStack, more: dict[str, int]
) -> None:
    """The taught model answers with a random digit, so the rewards of a group differ."""
    name = f"math_{len(more)}"
    taught_model = {"load_checkpoint_path": recipes.saved("sl", -1, "state_path"), "lora_rank": 8}
    options = {"env": "gsm8k", "groups_per_batch": 4, "group_size": 16, "max_tokens": 24}
    options |= {"max_steps": 3, "eval_every": 0, "save_every": 0}
    rows = recipes.run("math_rl.train", name, **taught_model, **options, **more)
    check_trained_with_stable_reinforce(agent_stack, rows)


def test_a_dpo_recipe_learns_against_its_first_snapshot(recipes: Recipes) -> None:
    rows = recipes.run(
        "preference.dpo.train", "dpo", dataset="hhh", batch_size=8, learning_rate=1e-3, max_steps=8
    )
    losses = [row["dpo_loss"] for row in rows]
    # at first both are one model: ln 2, but for what trainer and sampler round otherwise
    assert losses[0] == pytest.approx(0.6931, abs=0.02)
    assert losses[-1] < 0.2 and rows[-1]["accuracy"] == 1.0


@pytest.mark.usefixtures("taught")
def test_a_student_comes_near_its_teacher_on_its_own_samples(recipes: Recipes) -> None:
    rows = recipes.run(
        "distillation.on_policy_distillation",
        "distilled",
        teacher_model=MODEL,
        teacher_checkpoint=recipes.saved("sl", -1, "sampler_path"),
        load_checkpoint_path=recipes.saved("sl", 0, "state_path"),
        dataset="tulu3",
        groups_per_batch=8,
        group_size=4,
        max_tokens=20,
        lora_rank=8,
        eval_every=0,
        save_every=4,
        learning_rate=2e-3,
        max_steps=12,
    )
    apart = [row["teacher_kl"] for row in rows]
    assert sum(apart[-3:]) < sum(apart[:3]) / 2, apart
