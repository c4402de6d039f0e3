"""A model sampled as it is in its folder, for an evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from shared.errors import BadRequest, Conflict
from shared.wire import ModelRequest, ServingWeights
from tests.support.rollout_bench import RolloutBench

EVAL = {"job_id": "eval-1", "attempt": 7, "epoch": 1}
OWN = ModelRequest(model="tiny", own_weights=True, **EVAL)  # type: ignore[arg-type]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    bench = RolloutBench(tmp_path)
    async with bench.client:
        yield bench


async def test_a_models_own_weights_serve_as_version_0(bench: RolloutBench) -> None:
    serving = await bench.put(OWN)
    assert (serving.job_id, serving.version, serving.digest) == ("eval-1", 0, None)
    group = await bench.generate(**EVAL, min_version=0)
    assert (group.rollouts[0].versions, group.rollouts[0].text) == ((0,), "eval-1:7:1:0")
    assert await bench.put(OWN) == serving and len(bench.engines) == 1


async def test_an_engine_that_was_loaded_with_a_jobs_weights_is_not_taken_for_the_model(
    bench: RolloutBench,
) -> None:
    await bench.put(ModelRequest(model="tiny", job_id="job", attempt=2))
    await bench.reload(bench.publish(5, fence=(2, 0)))
    await bench.put(OWN)
    assert len(bench.engines) == 2 and bench.engines[0].calls[-1] == "stop"
    await bench.put(OWN.model_copy(update={"epoch": 2}))
    assert len(bench.engines) == 2, "nothing was loaded over it since"


async def test_a_newer_owner_supersedes_the_evaluation(bench: RolloutBench) -> None:
    await bench.put(OWN)
    await bench.put(OWN.model_copy(update={"epoch": 2}))
    with pytest.raises(Conflict) as caught:
        await bench.generate(**EVAL, min_version=0)
    assert caught.value.code == "stale"
    with pytest.raises(Conflict) as caught:
        await bench.put(OWN)
    assert caught.value.code == "stale"
    job = ModelRequest(model="tiny", job_id="job", attempt=8)
    await bench.put(job)
    ref = bench.publish(0, fence=(8, 0))
    assert (await bench.reload(ref)).job_id == "job", "its weights, also of the same version"
    assert (await bench.client.get("/weights", ServingWeights)).digest == ref.digest


class BenchWithLayer(RolloutBench):
    """Of a model that an adapter fits."""

    base = MappingProxyType(
        {"layer.w.weight": np.zeros((3, 2), np.float32), "layer.b": np.zeros(3, np.float32)}
    )


async def test_an_adapter_that_served_is_off(tmp_path: Path) -> None:
    bench = BenchWithLayer(tmp_path)
    spec = ModelRequest(model="tiny", job_id="job", attempt=2, max_lora_rank=1)
    await bench.put(spec)
    await bench.reload(bench.publish_adapter(3, fence=(2, 0)))
    own = OWN.model_copy(update={"max_lora_rank": 1})
    await bench.put(own)
    assert len(bench.engines) == 1, "the model beside the adapter is as it was"
    group = await bench.generate(**EVAL, min_version=0)
    assert group.rollouts[0].text == "eval-1:7:1:0", "the adapter's name otherwise"
    await bench.client.close()


async def test_own_weights_are_of_somebody(bench: RolloutBench) -> None:
    with pytest.raises(BadRequest, match="there is no 'job_id'"):
        await bench.put(ModelRequest(model="tiny", own_weights=True))
