"""The weights after each step of each loss, bit for bit as they were recorded. A change that shall
change no result is shown not to.

The bits depend on the processor and on the libraries (`machine`). With others than the recorded
ones, losses and gradients are compared in float32 up to rounding, and bfloat16 is skipped. After a
change that shall change results: `python -m tests.golden.test_trainer` records them anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shared.job import Job
from shared.wire import Example, Optimization, TokenLoss
from shared.wire.packed import Logprobs, Mask
from tests.support.engine_ranks import SPREAD_SMALL, Ranks, a_job, an_engine
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_reference import some_examples

pytestmark = pytest.mark.engine

RECORDED = Path(__file__).with_name("trainer.json")

DTYPES = ("float32", "bfloat16")

FROM_SAMPLER = {"ratio_base": "sampler"}
"""Ratios are to the sampler's log-probs, so that bounds are active in the first update too."""

RATE = 1e-3


@dataclass(frozen=True)
class Case:
    """A job, and what each of its steps does: a call with each of `losses` and an `optim_step`, or
    (None) an `update`."""

    training: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=lambda: {"correction": FROM_SAMPLER})
    supervised: bool = False
    losses: tuple[TokenLoss, ...] | None = None


TRAIN_STEP = {
    **{
        loss: Case({"loss": loss, "minibatches": 2})
        for loss in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "gspo")
    },
    "dual_clip": Case({"dual_clip": 1.1, "importance": "sequence"}),
    **{f"kl_{kl}": Case({"beta": 0.1, "kl": kl}) for kl in ("k1", "k2", "k3", "k3_true")},
    "epochs": Case({"epochs": 2}, sections={}),
    "icepop": Case(
        sections={"correction": {"method": "icepop", "low": 0.9, "high": 1.1}},
    ),
    "sequence_mask": Case(sections={"correction": {"method": "sequence_mask"}}),
    "lora": Case({"beta": 0.1}, sections={"lora": {"rank": 4, "dropout": 0.1}}),
    "sft": Case(supervised=True),
    "dpo": Case({"objective": "dpo"}, sections={"rewards": []}, supervised=True),
    "zero_0": Case({"minibatches": 2}, {"zero_stage": 0}),
    "zero_3": Case({"minibatches": 2}, {"zero_stage": 3, "deepspeed": SPREAD_SMALL}),
}

BOUNDS = {"ratio_low": 0.95, "ratio_high": 1.05}

PROGRAMS = {
    "cross_entropy": Case(losses=(TokenLoss(name="cross_entropy"),)),
    "importance_sampling": Case(losses=(TokenLoss(name="importance_sampling"),)),
    "ppo": Case(losses=(TokenLoss(name="ppo"), TokenLoss(name="ppo", **BOUNDS))),
    "cispo": Case(losses=(TokenLoss(name="cispo"), TokenLoss(name="cispo", **BOUNDS))),
    "dro": Case(losses=(TokenLoss(name="dro", beta=0.3),)),
    "gspo": Case(losses=(TokenLoss(name="gspo", **BOUNDS),)),
    "no_calls": Case(losses=()),
    "zero_0": Case(memory={"zero_stage": 0}, losses=(TokenLoss(name="ppo"),) * 2),
    "zero_3": Case(
        memory={"zero_stage": 3, "deepspeed": SPREAD_SMALL}, losses=(TokenLoss(name="ppo"),) * 2
    ),
}

IN_BFLOAT16 = {
    "train_step": ("dapo", "gspo", "epochs", "lora", "sft", "dpo", "zero_0", "zero_3"),
    "program": ("ppo", "zero_0", "zero_3"),
}
"""Cases of both dtypes. A loss gets log-probs in float32 in either, so the others are not."""

CASES = {
    f"{kind}-{name}-{dtype}": dataclasses.replace(case, training=case.training | {"dtype": dtype})
    for kind, cases in (("train_step", TRAIN_STEP), ("program", PROGRAMS))
    for name, case in cases.items()
    for dtype in (DTYPES if name in IN_BFLOAT16[kind] else ("float32",))
}


@dataclass(frozen=True)
class Step:
    """What a step answered, and digests of all of its answer and of the weights after it."""

    loss: float
    grad_norm: float
    answer: str
    weights: str

    def __str__(self) -> str:
        return f"{self.loss!r} {self.grad_norm!r} {self.answer} {self.weights}"

    @staticmethod
    def parse(line: str) -> Step:
        loss, grad_norm, answer, weights = line.split()
        return Step(float(loss), float(grad_norm), answer, weights)


def machine() -> dict[str, str]:
    """What the bits of a result depend on, apart from our code."""
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")}
    versions = {name: metadata.version(name) for name in ("deepspeed", "peft", "transformers")}
    return versions | {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": f"AVX512 {torch.cpu._is_avx512_bf16_supported()}, "
        f"AMX {torch.cpu._is_amx_tile_supported()}",
        "processor": ", ".join(sorted(names)),
    }


def preferences(examples: tuple[Example, ...]) -> tuple[Example, ...]:
    """Returns each example as the chosen answer of a pair, and the next one's as the rejected."""
    pairs = zip(examples, [*examples[1:], examples[0]], strict=True)
    return tuple(
        one
        for chosen, other in pairs
        for one in (
            chosen.model_copy(update={"advantage": 1.0}),
            other.model_copy(
                update={"advantage": -1.0, "prompt_token_ids": chosen.prompt_token_ids}
            ),
        )
    )


def by_token(examples: tuple[Example, ...]) -> tuple[Example, ...]:
    """Returns the examples with an advantage of its own for each token, and half of the tokens in
    the ratio of their sequence."""
    return tuple(
        example.model_copy(
            update={
                "advantages": Logprobs(
                    [example.advantage * (-0.7) ** t for t in range(len(example.token_ids))]
                ),
                "ratio_mask": Mask([(t + 1) % 2 for t in range(len(example.token_ids))]),
            }
        )
        for example in examples
    )


def run(job: Job, case: Case, examples: tuple[Example, ...], folder: Path) -> list[Step]:
    """Takes two steps."""
    engine = an_engine(job)
    steps = []
    for batch in (examples[:8], examples[4:]):
        if case.losses is not None:
            calls = [engine.forward_backward(by_token(batch), loss) for loss in case.losses]
            grad_norm = engine.optim_step(
                Optimization(learning_rate=RATE, weight_decay=0.01, max_grad_norm=0.5)
            )
            loss, answer = sum(loss for loss, _ in calls), [list(found) for _, found in calls]
        else:
            chosen = preferences(batch) if job.training.objective == "dpo" else batch
            update = engine.update(chosen, RATE, None, None, supervised=case.supervised)
            loss, grad_norm = update.loss, update.grad_norm
            answer = [
                sorted(update.metrics.items()),
                *map(list, (update.logprobs, update.entropies)),
            ]
        digests = engine.save_weights(folder)
        steps.append(Step(loss, grad_norm, _digest(answer), _digest(sorted(digests.items()))))
    engine.close()
    return steps


def _digest(value: Any) -> str:
    """Returns the first 64 bits of SHA-256."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def rank(tmp_path_factory) -> Iterator[Ranks]:
    with Ranks(1, tmp_path_factory.mktemp("rank")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def steps_of(case: Case, rank: Ranks, model: Path, folder: Path) -> list[Step]:
    memory = {"micro_batch_tokens": 40} | case.memory
    job = a_job(model, training=case.training, memory=memory, **case.sections)
    folder.mkdir(exist_ok=True)
    return rank.call(run, job, case, some_examples(model), folder)


@pytest.mark.parametrize("name", CASES)
def test_each_loss_trains_to_the_recorded_weights(rank, model, tmp_path, name):
    recorded = json.loads(RECORDED.read_text())
    expected = [Step.parse(step) for step in recorded["cases"][name]]
    is_same_machine = recorded["machine"] == machine()
    if not is_same_machine and name.endswith("bfloat16"):
        pytest.skip(f"recorded with {recorded['machine']}; bfloat16 rounds differently elsewhere")
    found = steps_of(CASES[name], rank, model, tmp_path)
    if is_same_machine:
        assert found == expected
        return
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-3, abs=1e-3)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)


def test_every_case_is_recorded():
    assert list(json.loads(RECORDED.read_text())["cases"]) == list(CASES)


def record(path: Path) -> None:
    """Writes what each case does now."""
    with tempfile.TemporaryDirectory() as folder, Ranks(1, Path(folder) / "ranks") as rank:
        model = make_tiny_model(Path(folder) / "model")
        cases = {
            name: [str(step) for step in steps_of(case, rank, model, Path(folder))]
            for name, case in CASES.items()
        }
    path.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)
