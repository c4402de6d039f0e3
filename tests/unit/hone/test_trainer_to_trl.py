"""A job as TRL's parameters: the inverse of the table of names, and what TRL cannot do."""

from __future__ import annotations

import _thread
import copy
import signal
import subprocess
import sys
import threading
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.trainer import simple
from hone.trainer.parameters import translate
from hone.trainer.simple import SimpleRun
from shared.errors import BadRequest
from shared.job import Job
from shared.job.file import make_job
from shared.job.job import learned

DOCUMENT: dict[str, Any] = {
    "name": "x",
    "model": "m",
    "steps": 6,
    "rewards": [{"grader": "math"}],
    "data": {"train": "rows", "eval": "rows"},
    "correction": {"method": "none"},
}
SECTIONS = ("sampling", "advantages", "training", "correction")


def job_of(*overrides: str) -> Job:
    return make_job(copy.deepcopy(DOCUMENT), overrides, "test")


JOBS = {
    "defaults": (),
    "batches": (
        "sampling.prompts_per_step=12",
        "sampling.group_size=4",
        "sampling.max_tokens=64",
        "training.minibatches=3",
        "training.epochs=2",
        "training.warmup_steps=5",
        "memory.micro_batch_tokens=1100",
    ),
    "losses": (
        "training.loss=cispo",
        "training.clip_high=3.5",
        "training.importance=sequence",
        "training.beta=0.01",
    ),
    "rates": (
        "training.learning_rate=3e-5",
        "training.schedule=cosine",
        "training.min_learning_rate=1e-6",
        "training.weight_decay=0.1",
        "training.adam_beta2=0.95",
        "training.max_grad_norm=0.5",
        "training.beta=0.01",
        "training.kl=k3_true",
    ),
    "advantages": (
        "advantages.std=batch",
        "advantages.mask_truncated=true",
        "training.dual_clip=3.0",
        "training.loss=sapo",
        "training.tau_negative=1.2",
    ),
    "sampling": (
        "advantages.combine=normalize_then_sum",
        "sampling.temperature=0.7",
        "sampling.top_p=0.9",
        "sampling.top_k=40",
        "sampling.min_p=0.05",
        "correction.truncated_sampling=accept",
        "sampling.template_args.enable_thinking=false",
        "training.dtype=float32",
    ),
}


OF_HONE = (
    "correction.truncated_sampling",  # says how the sampler's tokens are known
    *("training.schedule", "training.min_learning_rate", "training.warmup_steps"),
)
"""Keys that are no parameter of TRL's in the mode Simple."""


@pytest.mark.parametrize("overrides", JOBS.values(), ids=JOBS)
def test_a_job_comes_back_from_trls_parameters(overrides: tuple[str, ...]) -> None:
    job = job_of(*overrides)
    simple.check(job)
    back = translate(simple.grpo_arguments(job))
    assert not back.refused and not back.unknown
    for key in OF_HONE:
        back.set(key, attrgetter(key)(job))
    if job.training.loss == "cispo":
        back.set("training.clip_low", job.training.clip_low)  # this loss has no lower bound
    document = back.job | {key: DOCUMENT[key] for key in ("name", "model", "rewards", "data")}
    found, wanted = learned(make_job(document, (), "test")), learned(job)
    assert {name: found[name] for name in SECTIONS} == {name: wanted[name] for name in SECTIONS}
    assert back.job["steps"] == job.steps


def test_batches_and_updates_are_as_trl_counts_them() -> None:
    found = simple.grpo_arguments(job_of(*JOBS["batches"]))
    # 48 completions of up to 64 tokens, 16 for each of 3 updates; 8 at a time: 8 x 128 < 1100
    assert found["per_device_train_batch_size"] == 8
    assert found["gradient_accumulation_steps"] == 2
    assert found["steps_per_generation"] == 6
    assert found["max_steps"] == 36


REFUSED = {
    "max_staleness=1": "max_staleness is 1, expected 0",
    'weight_sync="disk"': "weight_sync is 'disk', expected 'auto'",
    "sampling.refills=2": "sampling.refills is 2, expected 0",
    "sampling.repeatable=true": "sampling.repeatable is True",
    'sampling.stop=["a"]': "sampling.stop is ('a',)",
    "sampling.top_k=5": 'correction.truncated_sampling is "refuse"',
    "sampling.group_size=1": "sampling.group_size is 1",
    'sampling.overlong_prompts="drop"': "sampling.overlong_prompts is 'drop'",
    "difficulty.skip_right=3": "difficulty.skip_right is 3, expected 0",
    'advantages.baseline="leave_one_out"': "advantages.baseline is 'leave_one_out'",
    'advantages.combine="normalize_then_sum" & advantages.std="batch"': 'expected "group" with',
    "training.max_log_ratio=10": "max_log_ratio is 10.0, expected 20.0: TRL has no parameter",
    'training.loss="gspo"': 'TRL has it as loss "grpo" with importance "sequence"',
    "training.loss=bnpo & memory.micro_batch_tokens=4096": "over each micro-batch's tokens",
    "training.dual_clip=1.2": "training.dual_clip is 1.2, expected 1 + clip_high or more",
    "training.beta=0.1 & training.kl=k3_true & training.importance=sequence": 'expected "k3" with',
    'training.kl="k2"': "training.kl is 'k2', expected 'k3' or 'k3_true'",
    'training.dtype="bfloat16"': "training.dtype is 'bfloat16'",
    "training.minibatches=7": "expected a divisor of the step's 256 completions",
    'correction.method="icepop"': "correction.method is 'icepop'",
    'correction.ratio_base="sampler"': "correction.ratio_base is 'sampler'",
    "stop.target=0.9": "stop.target is 0.9, expected None",
    'wandb.project="p"': "wandb is",
    'trackers=["mlflow"]': "trackers is",
    "rewards.0.shaping=true": "shaping of the reward 'math' is true",
    "steps=0": "steps is 0, expected 1 or more",
}


@pytest.mark.parametrize(("override", "said"), REFUSED.items(), ids=REFUSED)
def test_what_trl_cannot_do_is_refused_by_key(override: str, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        simple.check(job_of(*override.split(" & ")))
    assert said in refused.value.detail
    assert refused.value.detail.count(";") == 0


def test_all_that_trl_cannot_do_is_said_by_the_trainer_at_once() -> None:
    with pytest.raises(BadRequest) as refused:
        hone.Trainer(
            "m",
            reward_funcs="math",
            train_dataset=[{"prompt": "2+2?", "answer": "4"}],
            max_steps=2,
            max_staleness=1,
            sampling={"refills": 1},
            mode=hone.Simple(),
        )
    assert "max_staleness is 1" in refused.value.detail
    assert "sampling.refills is 1" in refused.value.detail


RUNNER = {"model", "model_revision", "steps", "seed", "max_model_len", "lora", "data", "rewards"}
"""Keys that deploy/simple.py takes from the job itself."""


def test_every_key_that_is_learned_is_taken_or_refused() -> None:
    known = {*RUNNER, *simple.SECTIONS, *simple.ALONE}
    assert learned(job_of()).keys() <= known


def test_a_second_ctrl_c_kills_a_run_that_does_not_stop(tmp_path: Path) -> None:
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        SimpleRun(tmp_path, process).cancel()
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
