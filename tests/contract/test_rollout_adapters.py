"""Adapters beside the model, over HTTP: the real app and client, an engine that fails on demand at
the `Engine` seam. The model has one layer, `layer.w` of shape [3, 2]."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from services.rollout.weights.adapters import one_call
from shared.errors import Conflict, Failed, HoneError, StateLost
from shared.weights.folders import CONFIG, WEIGHTS
from shared.wire import (
    AdapterWeights,
    Canary,
    CheckedWeights,
    ModelRequest,
    NoBody,
    ServingWeights,
    SleepRequest,
)
from tests.contract.test_rollout_transfer import sent
from tests.support.rollout_bench import RolloutBench

A, B = (f"base_model.model.layer.w.lora_{which}.weight" for which in "AB")
SPEC = ModelRequest(model="tiny", max_lora_rank=4)


class Bench(RolloutBench):
    base = MappingProxyType(
        {"layer.w.weight": np.zeros((3, 2), np.float32), "layer.b": np.zeros(3, np.float32)}
    )


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    async with bench.client:
        await bench.put(SPEC)
        yield bench


def held(bench: Bench) -> list[str]:
    """Returns the adapters that the engine has."""
    return sorted(adapter.name for adapter in bench.engine.adapters.values())


async def until_held(bench: Bench, *names: str) -> None:
    async with asyncio.timeout(60):
        while held(bench) != sorted(names):
            await asyncio.sleep(0.001)


async def text(bench: Bench, **request: Any) -> str:
    return (await bench.generate(**request)).rollouts[0].text


async def test_an_adapter_is_loaded_beside_the_model_without_a_pause(bench: Bench) -> None:
    serving = await bench.reload(ref := bench.publish_adapter(3))
    assert (serving.version, serving.digest, serving.paused_s) == (3, ref.digest, 0.0)
    assert bench.engine.calls == ["job/v3-0.0"]
    (rollout,) = (await bench.generate(job_id="job", min_version=3)).rollouts
    assert (rollout.text, rollout.versions) == ("job/v3-0.0", (3,))


async def test_the_canary_is_measured_with_the_adapter_on(bench: Bench) -> None:
    ref = bench.publish_adapter(3)
    ours = Canary(token_ids=(1, 2, 3), logprobs=(-2.0, -3.0))
    serving = await bench.reload(ref.model_copy(update={"canary": ours}))
    assert bench.engine.calls[-1] == ["job/v3-0.0", 1, 2, 3]
    assert tuple(serving.canary_logprobs) == (-2.0, -3.0)


async def test_the_version_before_is_unloaded_once_no_request_names_it(bench: Bench) -> None:
    await bench.reload(bench.publish_adapter(3))
    old = await bench.frozen_generate(job_id="job")
    await bench.reload(bench.publish_adapter(4))
    assert held(bench) == ["job/v3-0.0", "job/v4-0.0"]
    bench.engine.frozen.set()
    rollout = (await old).rollouts[0]
    assert (rollout.text, rollout.versions) == ("job/v3-0.0", (3,))
    await until_held(bench, "job/v4-0.0")
    assert len(list((bench.copies / "adapters").iterdir())) == 1
    assert await text(bench, job_id="job") == "job/v4-0.0"


async def test_every_load_has_a_number_of_its_own(bench: Bench) -> None:
    """Under a number that was used before, vLLM takes cached prefixes for this adapter's."""
    ref = bench.publish_adapter(3)
    await bench.reload(ref)
    (first,) = bench.engine.adapters
    await bench.reload(ref.model_copy(update={"again": True}))
    await until_held(bench, "job/v3-0.0")
    assert first not in bench.engine.adapters


async def test_adapters_of_several_jobs_are_offered_up_to_the_limit(bench: Bench) -> None:
    for job in ("one", "two"):
        await bench.reload(bench.publish_adapter(3, job))
    assert bench.engine.offers is not None
    assert list(bench.engine.offers.names()) == ["one", "two"]
    await bench.reload(bench.publish_adapter(4, "one", fence=(0, 1)))
    await bench.reload(bench.publish_adapter(1, "three", fence=(0, 2)))
    assert list(bench.engine.offers.names()) == ["one", "three"]
    await until_held(bench, "one/v4-0.1", "three/v1-0.2")
    assert not bench.engine.offers.knows("two")


async def test_a_finished_jobs_adapter_is_found_by_its_job_and_stays_for_the_call(
    bench: Bench,
) -> None:
    for job in ("one", "two"):
        await bench.reload(bench.publish_adapter(3, job))
    offers = bench.engine.offers
    assert offers is not None
    with one_call():
        found = [offers.find(name) for name in ("one", "one/v3-0.0", "two", None, "tiny")]
        await bench.reload(bench.publish_adapter(4, "one", fence=(0, 1)))
        assert "one/v3-0.0" in held(bench)
    assert [adapter and adapter.name for adapter in found] == [
        *("one/v3-0.0", "one/v3-0.0", "two/v3-0.0", "two/v3-0.0"),
        None,
    ]
    await until_held(bench, "two/v3-0.0", "one/v4-0.1")


async def test_a_job_of_the_same_model_continues_with_the_engine_and_its_adapters(
    bench: Bench,
) -> None:
    await bench.reload(bench.publish_adapter(3, "one"))
    await bench.put(ModelRequest(model="tiny", max_lora_rank=2, seed=7, job_id="two", epoch=1))
    await bench.reload(bench.publish_adapter(0, "two", fence=(0, 1)))
    assert (len(bench.engines), held(bench)) == (1, ["one/v3-0.0", "two/v0-0.1"])


@pytest.mark.parametrize(
    "spec",
    [
        ModelRequest(model="other", max_lora_rank=4),
        ModelRequest(model="tiny"),
        ModelRequest(model="tiny", max_lora_rank=8),
        ModelRequest(model="tiny", max_lora_rank=4, dtype="float32"),
    ],
)
async def test_another_model_or_none_with_adapters_is_another_engine_without_them(
    bench: Bench, spec: ModelRequest
) -> None:
    await bench.reload(bench.publish_adapter(3))
    await bench.put(spec)
    assert len(bench.engines) == 2
    assert not (bench.copies / "adapters").exists()
    assert bench.engine.offers is not None and bench.engine.offers.names() == {}


async def test_tensors_that_do_not_fit_are_refused_whole_and_the_old_adapter_serves(
    bench: Bench,
) -> None:
    await bench.reload(bench.publish_adapter(3))
    tensors = {A: np.ones((1, 2), np.float32), B: np.ones((3, 1), np.int32)}
    with pytest.raises(Failed, match=f"'{B}' has dtype I32, expected F32") as refused:
        await bench.reload(bench.publish_adapter(4, **tensors))
    assert refused.value.code == "tensors_differ"
    assert await text(bench, job_id="job", min_version=3) == "job/v3-0.0"
    assert len(list((bench.copies / "adapters").iterdir())) == 1


async def damaged(ref: AdapterWeights, name: str, data: bytes | None) -> AdapterWeights:
    file = Path(ref.path) / name
    file.write_bytes(file.read_bytes()[:-1] if data is None else data)
    return ref


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (WEIGHTS, None, "is not a whole safetensors file"),
        (CONFIG, b'{"r": 1, "lora_alpha": 4}', f"the first is '{CONFIG}'"),
    ],
)
async def test_a_cut_file_and_another_alpha_are_refused_by_their_digest(
    bench: Bench, name: str, data: bytes | None, message: str
) -> None:
    await bench.reload(bench.publish_adapter(3))
    with pytest.raises(Failed, match=message) as refused:
        await bench.reload(await damaged(bench.publish_adapter(4), name, data))
    assert refused.value.code == "digest_differs"
    assert await text(bench) == "job/v3-0.0"


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        (
            '{"r": 5, "target_modules": ["w"]}',
            Conflict,
            "has rank 5, expected at most 4, with which the engine",
        ),
        ('{"r": 1}', Failed, "adapter_config.json cannot be used: .*target_modules"),
    ],
)
async def test_a_rank_that_the_engine_was_not_started_for_is_refused(
    bench: Bench, config: str, kind: type[HoneError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await bench.reload(bench.publish_adapter(4, config=config))


async def test_an_engine_without_adapters_refuses_them_with_a_code(bench: Bench) -> None:
    await bench.put(ModelRequest(model="tiny"))
    with pytest.raises(Conflict, match="the engine was started without adapters") as refused:
        await bench.reload(bench.publish_adapter(3))
    assert refused.value.code == "no_adapters"


async def test_an_adapter_that_the_engine_refuses_leaves_the_one_before(bench: Bench) -> None:
    await bench.reload(bench.publish_adapter(3))
    bench.engine.refuses_adapters = Conflict("vLLM does not take adapter", code="no_adapters")
    with pytest.raises(Conflict, match="vLLM does not take adapter"):
        await bench.reload(bench.publish_adapter(4))
    assert await text(bench, job_id="job", min_version=3) == "job/v3-0.0"
    assert len(list((bench.copies / "adapters").iterdir())) == 1


def merged(bench: Bench, version: int) -> Any:
    values = {name: np.full_like(value, version) for name, value in bench.base.items()}
    return bench.publish(version, **values)


async def test_merged_weights_end_what_an_adapter_samples_and_the_client_asks_again(
    bench: Bench,
) -> None:
    await bench.reload(bench.publish_adapter(3))
    old = await bench.frozen_generate(job_id="job")
    await bench.reload(merged(bench, 4))
    bench.engine.frozen.set()
    assert (await old).rollouts[0].text == "job:0:0:4", "sampled anew, and by no adapter"
    assert bench.engine.calls == ["job/v3-0.0", "abort", "v4", 4, "resume"]
    assert bench.engine.offers is not None and bench.engine.offers.names() == {}
    await until_held(bench)


async def test_merged_weights_that_were_never_sent_leave_the_adapter_that_serves(
    bench: Bench,
) -> None:
    await bench.reload(bench.publish_adapter(3))
    shapes = {name: value.shape for name, value in bench.base.items()}
    bench.engine.fail_meeting = Failed("the trainer did not send version 4", code="not_met")
    with pytest.raises(Failed, match="did not send version 4"):
        await bench.reload(sent(bench, 4, shapes, **bench.base))
    assert held(bench) == ["job/v3-0.0"]
    assert await text(bench, job_id="job", min_version=3) == "job/v3-0.0"
    await bench.reload(bench.publish_adapter(4))
    assert bench.engine.calls == ["job/v3-0.0", "meet", "job/v4-0.0"]


async def test_after_merged_weights_an_adapter_brings_the_models_own_back(bench: Bench) -> None:
    await bench.reload(merged(bench, 3))
    bench.engine.calls.clear()
    serving = await bench.reload(bench.publish_adapter(4))
    assert bench.engine.calls == ["abort", "model", "job/v4-0.0", "resume"]
    assert serving.paused_s > 0
    assert await text(bench, job_id="job", min_version=4) == "job/v4-0.0"
    await bench.reload(bench.publish_adapter(5))
    assert bench.engine.calls[-1] == "job/v5-0.0"


async def test_if_the_models_own_weights_do_not_come_back_nothing_is_sampled(
    bench: Bench,
) -> None:
    await bench.reload(merged(bench, 3))
    bench.engine.fail_load = OSError("gone")
    with pytest.raises(StateLost, match="loading version 4 of job 'job' failed halfway"):
        await bench.reload(bench.publish_adapter(4))
    with pytest.raises(StateLost, match="failed halfway"):
        await bench.generate()
    bench.engine.fail_load = None
    await bench.reload(bench.publish_adapter(4))
    assert await text(bench, job_id="job", min_version=4) == "job/v4-0.0"


async def test_a_sampler_that_slept_wakes_with_the_base_model_and_the_next_adapter(
    bench: Bench,
) -> None:
    await bench.reload(bench.publish_adapter(3))
    await bench.client.call(
        "POST", "/sleep", SleepRequest(job_id="job"), ServingWeights, deadline_s=2
    )
    await until_held(bench)
    bench.engine.calls.clear()
    await bench.reload(bench.publish_adapter(4))
    assert bench.engine.calls == ["wake weights", "model", "wake cache", "job/v4-0.0", "resume"]
    assert await text(bench, job_id="job", min_version=4) == "job/v4-0.0"


async def test_model_and_adapter_are_both_compared_tensor_by_tensor(bench: Bench) -> None:
    await bench.reload(bench.publish_adapter(3))
    bench.engine.loaded = {"layer.b": "other bytes"}
    checked = await bench.client.call(
        "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=2
    )
    assert (checked.version, checked.num_tensors) == (3, 4)
    assert (checked.differing, checked.unread) == (("layer.b",), ("layer.w.weight",))


async def test_an_adapter_whose_folder_is_not_seen_and_has_no_files_is_not_seen(
    bench: Bench,
) -> None:
    ref = bench.publish_adapter(3).model_copy(update={"path": str(bench.runs / "elsewhere" / "a")})
    with pytest.raises(Failed, match="which is not a folder here") as refused:
        await bench.reload(ref)
    assert refused.value.code == "not_seen"
    assert (await bench.client.get("/weights", ServingWeights)).version is None
