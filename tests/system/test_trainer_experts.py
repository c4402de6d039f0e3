"""Mixtures of experts: the update of all weights, router and experts included, on one rank and on
two, and that of adapters, against plain transformers with its experts computed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_ranks import SPREAD_SMALL, Ranks, a_job
from tests.support.tiny_experts import KINDS, make_tiny_experts
from tests.support.trainer_reference import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    difference,
    load,
    optimizer,
    reference_loss,
    relative,
    some_examples,
    step,
    weights,
)

pytestmark = [pytest.mark.engine, pytest.mark.system]


def train(folder: Path, model: Path, examples, stages) -> dict:
    """Each stage's Update; its weights are published into a folder of its own."""
    import torch

    from services.trainer.zero.deepspeed_engine import start_engine

    updates = {}
    for stage in stages:
        memory = {
            "zero_stage": stage,
            "micro_batch_tokens": 64,
            "deepspeed": SPREAD_SMALL if stage == 3 else {},
        }
        job = a_job(
            model,
            memory=memory,
            training={"max_grad_norm": MAX_GRAD_NORM},
            correction={"ratio_base": "sampler"},
        )
        engine = start_engine(job, torch.device("cpu"))
        updates[stage] = engine.update(examples, LEARNING_RATE)
        engine.save_weights(folder / str(stage))
        engine.close()
    return updates


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, marks=pytest.mark.soak, id="one rank"),
        pytest.param(2, id="two ranks"),
    ],
)
def ranks(request, tmp_path_factory) -> Iterator[Ranks]:
    with Ranks(request.param, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", KINDS)
def test_all_experts_and_the_router_are_updated_as_in_plain_torch(ranks, tmp_path, kind):
    model = make_tiny_experts(kind, tmp_path / "model")
    examples, before = some_examples(model), weights(model)
    updates = ranks.call(train, tmp_path, model, examples, (0, 2, 3))
    plain = load(model)
    plain.set_experts_implementation("eager")
    loss = reference_loss(plain, examples)
    norm = step(plain, optimizer(plain, LEARNING_RATE), loss, MAX_GRAD_NORM)
    plain.save_pretrained(tmp_path / "plain")
    expected = difference(weights(tmp_path / "plain"), before)
    for part in ("gate.weight", "experts.0.", "experts.3.", "q_proj", "embed_tokens", "lm_head"):
        assert sum(d.abs().sum() for name, d in expected.items() if part in name) > 0, part
    for stage, update in updates.items():
        ours = difference(weights(tmp_path / str(stage)), before)
        distance = relative(ours, expected)
        print(f"{kind}, ZeRO-{stage}: relative difference of the update {distance:.2g}")
        assert ours.keys() == expected.keys() and distance < 1e-5
        assert update.loss == pytest.approx(loss.item(), rel=1e-4)
        assert update.grad_norm == pytest.approx(norm, rel=1e-4)
