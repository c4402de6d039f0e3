"""Weights from device to device, in the sampler's own rules: what was received is read back before
anything is sampled, and what was not changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from shared.errors import Failed, StateLost
from shared.weights.folders import digest, stored_tensors, tensor_digests
from shared.wire import BroadcastWeights, SentTensor
from tests.support.rollout_bench import RolloutBench

SHAPES = {"b": (2,), "w": (2, 2)}


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    bench = RolloutBench(tmp_path)
    async with bench.client:
        await bench.put()
        await bench.reload(bench.publish(1))
        yield bench


def sent(
    bench: RolloutBench,
    version: int,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    **tensors: np.ndarray,
) -> BroadcastWeights:
    """Returns a version that the engine holds once it was received."""
    folder = Path(bench.publish(version, **tensors).path)
    bench.engine.loaded = tensor_digests(stored_tensors(folder))
    return BroadcastWeights(
        job_id="job",
        version=version,
        method="nccl",
        digest=digest(bench.engine.loaded),
        tensors=dict(bench.engine.loaded),
        size_bytes=24,
        deadline_s=1.0,
        port=1,
        key="k",
        chunks=(
            tuple(SentTensor(name=n, dtype="float32", shape=shape) for n, shape in shapes.items()),
        ),
    )


async def test_what_was_received_serves_once_it_was_read_back(serving: RolloutBench) -> None:
    ref = sent(serving, 2)
    answer = await serving.reload(ref)
    assert (answer.version, answer.digest, answer.received_bytes) == (2, ref.digest, 24)
    assert serving.engine.calls[-4:] == ["pause", "nccl", 2, "resume"]


async def test_a_trainer_that_does_not_come_leaves_the_old_version_serving(
    serving: RolloutBench,
) -> None:
    ref = sent(serving, 2)
    before = list(serving.engine.calls)
    serving.engine.fail_meeting = Failed("the trainer did not send version 2", code="not_met")
    with pytest.raises(Failed, match="did not send version 2") as caught:
        await serving.reload(ref)
    assert caught.value.code == "not_met"
    assert serving.engine.calls == [*before, "meet"]
    assert serving.sampler.serving.version == 1
    assert (await serving.generate()).rollouts[0].spans[0].version == 1


async def test_while_trainer_and_sampler_meet_the_old_version_is_sampled(
    serving: RolloutBench,
) -> None:
    ref = sent(serving, 2)
    serving.engine.meeting.clear()
    loading = asyncio.create_task(serving.reload(ref))
    while serving.engine.calls[-1] != "meet":
        await asyncio.sleep(0.001)
    assert (await serving.generate()).rollouts[0].spans[0].version == 1
    serving.engine.meeting.set()
    assert (await loading).version == 2
    assert serving.engine.calls[-5:] == ["meet", "pause", "nccl", 2, "resume"]


@pytest.mark.parametrize("fault", ["half", "other bytes", "unread"])
async def test_what_was_half_received_never_samples_and_files_heal_it(
    serving: RolloutBench, fault: str
) -> None:
    ref = sent(serving, 2)
    if fault == "half":
        serving.engine.fail_load = Failed("the connection was closed", code="not_loaded")
    elif fault == "other bytes":
        serving.engine.loaded["w"] = "0" * 64
    else:
        del serving.engine.loaded["w"]
    whys = {
        "half": "the connection was closed",
        "other bytes": "1 of the tensors that the trainer sent have other bytes, the first is 'w'",
        "unread": "1 tensors could not be read back, the first is 'w'",
    }
    with pytest.raises(Failed, match=whys[fault]) as caught:
        await serving.reload(ref)
    assert caught.value.code == "not_loaded"
    with pytest.raises(StateLost, match="so the engine's weights are unknown"):
        await serving.generate()
    serving.engine.fail_load = None
    healed = await serving.reload(serving.publish(2).model_copy(update={"again": True}))
    assert (healed.version, healed.digest) == (2, ref.digest)
    assert (await serving.generate()).rollouts[0].spans[0].version == 2


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"digest": "0" * 64},
            "digest_differs",
            "announces tensors that do not have its digest 0+",
        ),
        ({"tensors": {}}, "digest_differs", "announces tensors"),
    ],
)
async def test_an_announcement_that_contradicts_itself_stops_nothing(
    serving: RolloutBench, changes: dict[str, object], code: str, message: str
) -> None:
    ref = sent(serving, 2).model_copy(update=changes)
    before = list(serving.engine.calls)
    with pytest.raises(Failed, match=message) as caught:
        await serving.reload(ref)
    assert (caught.value.code, serving.engine.calls) == (code, before)


async def test_a_tensor_of_another_shape_is_refused_before_anything_is_sent(
    serving: RolloutBench,
) -> None:
    ref = sent(serving, 2, {"b": (2,), "w": (4,)})
    with pytest.raises(Failed, match=r"'w' has shape \[4\], expected \[2, 2\]") as caught:
        await serving.reload(ref)
    assert caught.value.code == "tensors_differ"
    assert np.prod(SHAPES["w"]) == 4  # as many elements, and yet another tensor
