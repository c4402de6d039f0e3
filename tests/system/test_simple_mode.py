"""The mode Simple: TRL's real trainer on a tiny model, graded by a real reward service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hone
from deploy.tiny_model import make_model, make_tokenizer
from hone.trainer.simple import SimpleRun
from services.orchestrator.store.folder import RunFolder
from tests.support.reward_service import running_service

pytestmark = [pytest.mark.clients, pytest.mark.engine]
PACKAGE = "trl"

ROWS = [{"prompt": f"{number} + 1 =", "wanted": number} for number in range(3, 9)]


def high(completions, wanted, **columns):
    digits = [[int(each) for each in said if each.isdigit()] for said in completions]
    return [
        float(found[0] >= least) if found else None
        for found, least in zip(digits, wanted, strict=True)
    ]


def short(completions, **columns):
    return [1.0 / (1 + len(said)) for said in completions]


def save_model(folder: Path) -> Path:
    """Saves a random Qwen2 with the tokenizer of `make demo-tiny`, a token per character, whose
    file asks for no repetitions."""
    model = make_model(seed=0)
    model.generation_config.repetition_penalty = 50.0
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def trainer(model: Path, folder: Path, rows: list[dict[str, object]]) -> hone.Trainer:
    return hone.Trainer(
        str(model),
        reward_funcs=[high, short],
        reward_weights=[1.0, 0.5],
        train_dataset=rows,
        eval_dataset=ROWS[:2],
        name="tiny",
        num_generations=4,
        batch_size=2,
        minibatches=2,
        max_completion_length=8,
        max_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        training={"min_learning_rate": 4e-3},
        torch_dtype="float32",
        evaluation={"every": 1},
        mode=hone.Simple(folder),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleRun]:
    """A run of two steps, of two updates each, that has ended."""
    folder = tmp_path_factory.mktemp("simple")
    model = save_model(folder / "model")
    with running_service() as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HONE_REWARD_URL", service.url)
        patch.setenv("OMP_NUM_THREADS", "1")
        begun = trainer(model, folder / "runs", ROWS).train(detach=True)
        assert isinstance(begun, SimpleRun) and begun.status == "running"
        begun.wait(240)
        yield begun


def test_a_run_has_the_rows_and_names_of_hones_own_loop(run: SimpleRun) -> None:
    rows = RunFolder(run.path).metrics()
    assert run.status == "succeeded" and [row.step for row in rows] == [0, 1, 2]
    assert all(0 <= row.metrics["eval/reward"] <= 1.5 for row in rows)
    for row in rows[1:]:
        assert row.metrics["learning_rate"] == pytest.approx((1e-2, 4e-3)[row.step - 1])
        assert row.metrics["grad_norm"] > 0
        assert 1 <= row.metrics["completions/mean_length"] <= 8
    output = run.wait()
    assert output.global_step == 2
    assert output.training_loss == sum(row.metrics["loss"] for row in rows[1:]) / 2
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["eval_after"] == rows[-1].metrics["eval/reward"] == output.metrics["eval_after"]


def test_stored_completions_have_the_rewards_of_the_jobs_functions(run: SimpleRun) -> None:
    for step in (1, 2):
        batch = RunFolder(run.path).batch(step)
        assert [len(group.rollouts) for group in batch.groups] == [4, 4]
        values = []
        for prompt, group, scores in zip(batch.prompts, batch.groups, batch.scores, strict=True):
            said = [rollout.text for rollout in group.rollouts]
            firsts = high(said, [prompt.row["wanted"]] * 4)
            for first, second, score in zip(firsts, short(said), scores, strict=True):
                assert score.parts["high"].value == first
                assert score.parts["short"].value == pytest.approx(second)
                expected = None if score.value is None else (first or 0.0) + 0.5 * second
                assert score.value == (None if expected is None else pytest.approx(expected))
                values += [] if expected is None else [expected]
        row = RunFolder(run.path).metrics()[step]
        assert row.metrics["reward"] == pytest.approx(sum(values) / len(values))


def test_held_out_problems_are_answered_by_the_likeliest_tokens(run: SimpleRun) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.path.parents[1] / "model")
    tokenizer, rewards = make_tokenizer(), []
    for row in ROWS[:2]:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        for _ in range(8):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        said = [tokenizer.decode(ids[0, -8:].tolist()).partition("<eos>")[0]]
        judged = high(said, [row["wanted"]])[0]
        rewards += [] if judged is None else [judged + 0.5 * short(said)[0]]
    reward = RunFolder(run.path).metrics()[0].metrics["eval/reward"]
    assert reward == pytest.approx(sum(rewards) / len(rewards))


def test_the_prompts_of_a_step_are_those_of_hones_own_order(run: SimpleRun) -> None:
    from services.orchestrator.grpo.prompts import load_prompts
    from shared.job import Job
    from shared.settings import Settings

    job = Job.model_validate_json((run.path / "job.json").read_text())
    prompts = load_prompts(job, Settings())
    for step in (1, 2):
        assert RunFolder(run.path).batch(step).prompts == prompts.for_step(step)


def test_its_checkpoint_loads_in_transformers_and_has_moved(run: SimpleRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run.checkpoint().name == "step-000002"
    copied = run.checkpoint(tmp_path / "copy")
    trained = AutoModelForCausalLM.from_pretrained(copied)
    begun = AutoModelForCausalLM.from_pretrained(run.path.parents[1] / "model")
    changed = trained.lm_head.weight - begun.lm_head.weight
    assert 1e-3 < changed.abs().max().item() < 0.1  # four updates of Adam at 0.01
    assert torch.isfinite(changed).all()
    assert AutoTokenizer.from_pretrained(copied).decode([3, 4]) == "12"


def test_two_runs_are_drawn_in_one_picture(run: SimpleRun, tmp_path: Path) -> None:
    picture = tmp_path / "both.png"
    command = [sys.executable, "-m", "deploy.plot", run.path, run.path, "--names", "a,b"]
    subprocess.run([*map(str, command), "--out", str(picture)], check=True, timeout=120)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_cannot_begin_says_why(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    rows = [{"question": "3 + 1 =", "wanted": 5}]
    with pytest.raises(hone.Failed, match=r"failed: .*'prompt'"):
        trainer(model, tmp_path / "runs", rows).train()
