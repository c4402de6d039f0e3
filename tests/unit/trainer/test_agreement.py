"""Two ranks of which one computes sequences otherwise, or calls its head more often: that is
refused when the job is loaded, on both. They would train on parts of different plans, or wait for
each other for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import HoneError
from shared.job import Job
from tests.support.engine_ranks import SPREAD_SMALL, a_job, an_engine
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", tie_word_embeddings=False)


def refusals(job: Job, broken_rank: int | None = None) -> list[str]:
    """Returns why each rank refuses the job. The forest's attention fails on `broken_rank`."""
    import torch
    import torch.distributed as dist

    from services.trainer.learning.attention import DenseAttention

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    whole, refusal = DenseAttention.attend, ""
    if dist.get_rank() == broken_rank:
        DenseAttention.attend = broken
    try:
        an_engine(job).close()
    except HoneError as error:
        refusal = error.detail
    DenseAttention.attend = whole
    each = [refusal] * dist.get_world_size()
    dist.all_gather_object(each, refusal)
    return each


def test_a_layout_that_one_rank_alone_cannot_compute_is_refused_on_all(pools, model):
    job = a_job(model)
    assert pools[2].call(refusals, job) == ["", ""]
    first, second = pools[2].call(refusals, job, 1)
    assert first == second
    assert first.startswith(
        "rank 1 would put sequences into 'padded' rows and rank 0 into 'shared'"
    )
    assert "because the model cannot compute a forest of sequences: no such kernel" in first


def test_a_head_with_an_adapter_is_refused_where_its_calls_are_collectives(pools, model):
    lora = {"target_modules": ["lm_head", "q_proj"]}
    assert pools[2].call(refusals, a_job(model, lora=lora)) == ["", ""]
    spread = a_job(model, lora=lora, memory={"zero_stage": 3, "deepspeed": SPREAD_SMALL})
    first, second = pools[2].call(refusals, spread)
    assert first == second and "peft.tuners.lora.layer.Linear, expected a plain" in first
