"""Every knob of `memory` through the real engine: "nothing here changes its result"."""

from __future__ import annotations

import pytest

from tests.support.engine_ranks import SPREAD_SMALL, a_job, train
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_reference import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    difference,
    relative,
    some_examples,
    weights,
)

pytestmark = pytest.mark.engine

PLAIN = {"zero_stage": 0, "packing": "off", "micro_batch_tokens": 10_000}
PACKED = {"packing": "on", "shared_prefix": "off"}
SPREAD = {
    "zero_stage": 3,
    "deepspeed": SPREAD_SMALL,
}
KNOBS = {
    "packed": {**PACKED, "micro_batch_tokens": 64},
    "eager, packed": {**PACKED, "attention": "eager", "zero_stage": 1},
    "shared": {"packing": "auto", "shared_prefix": "on", "micro_batch_tokens": 64},
    "three tokens a chunk": {"chunk_tokens": 3},
    "layers recomputed": {"gradient_checkpointing": True},
    "everything": {
        **SPREAD,
        "packing": "auto",
        "micro_batch_tokens": 64,
        "gradient_checkpointing": True,
    },
}


@pytest.mark.parametrize(
    ("tied", "names"), [(True, list(KNOBS)), (False, ["everything"])], ids=["tied", "untied"]
)
def test_no_memory_setting_changes_the_update(rank, tmp_path, tied, names):
    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    examples = some_examples(model, prefix=tuple(range(20)))
    before, updates = weights(model), {}
    for name, knobs in {"plain": {}, **{name: KNOBS[name] for name in names}}.items():
        job = a_job(model, memory={**PLAIN, **knobs}, training={"max_grad_norm": MAX_GRAD_NORM})
        (update,) = rank.call(train, job, [examples], LEARNING_RATE, tmp_path / name)
        metrics = update.metrics
        updates[name] = difference(weights(tmp_path / name), before)
        assert (metrics["padding_fraction"] == 0) == ("packing" in knobs)
        shared = ("packing" in knobs and "shared_prefix" not in knobs) or name == "shared"
        assert (metrics["tokens/shared_fraction"] > 0.3) == shared
    for name in names:
        distance = relative(updates[name], updates["plain"])
        assert distance < 1e-6, (name, distance)
