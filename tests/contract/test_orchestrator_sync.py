"""Weights that arrive on paper only: each fault of a sync is caught, by name, and pushed again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, cast

import pydantic
import pytest

from services.orchestrator.errors import SyncFailed
from services.orchestrator.samplers import syncing
from services.orchestrator.samplers.clients import TrainerClient
from services.orchestrator.samplers.syncing import Gpus, candidates
from shared.errors import Conflict, Failed, Unavailable
from shared.http.client import Client
from shared.job import Job, LoraSpec, SyncMethod
from shared.wire import (
    Canary,
    CheckedWeights,
    FolderWeights,
    Logprobs,
    Published,
    PublishRequest,
    ServingWeights,
    TokenIds,
    WeightsRef,
)
from tests.contract.test_orchestrator_faults import warnings
from tests.support import orchestrator_stack
from tests.support.fake_services import WHERE, logprobs_of
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

NO_GPUS = Gpus(None, ())
OURS = Canary(token_ids=TokenIds((1, 2, 3)), logprobs=Logprobs((-1.0, -2.0)))


def serving(*logprobs: float, dtype: str = "float32") -> ServingWeights:
    return ServingWeights(canary_logprobs=Logprobs(logprobs), dtype=dtype)


def test_the_difference_is_the_mean_over_the_canary_or_infinite() -> None:
    assert syncing.difference(OURS, serving(-1.1, -2.3)) == pytest.approx(0.2)
    assert syncing.difference(OURS, serving(-1.0)) == float("inf")
    assert syncing.difference(OURS, serving(float("nan"), -2.0)) == float("inf")


@pytest.mark.parametrize(
    ("trainer", "noise", "sampler", "gap", "agrees"),
    [
        ("float32", 0.0, "float32", 0.0009, True),
        ("float32", 0.0, "float32", 0.0011, False),
        ("float32", 2e-6, "float32", 0.0011, False),
        ("bfloat16", 0.0, "bfloat16", 0.019, True),
        ("bfloat16", 0.0, "bfloat16", 0.021, False),
        ("bfloat16", 0.07, "bfloat16", 0.139, True),  # twice the noise of 24 layers
        ("bfloat16", 0.07, "bfloat16", 0.141, False),
        ("bfloat16", 0.07, "float32", 0.139, True),
        ("float32", 1e-6, "bfloat16", 0.130, True),  # 2 * 1e-6 * 2**16 = 0.131
        ("float32", 1e-6, "bfloat16", 0.132, False),
        ("bfloat16", 2.0, "bfloat16", 0.249, True),  # half of the log-probs' deviation of 0.5
        ("bfloat16", 2.0, "bfloat16", 0.251, False),
        ("float32", 1e-4, "bfloat16", 0.251, False),  # 2 * 1e-4 * 2**16 = 13
    ],
)
def test_the_tolerance_is_twice_the_noise_in_the_looser_dtype(
    trainer: str, noise: float, sampler: str, gap: float, agrees: bool
) -> None:
    ours = OURS.model_copy(update={"dtype": trainer, "noise": noise})
    found = syncing.fault(ours, serving(-1.0 - gap, -2.0 - gap, dtype=sampler))
    assert (found is None) == agrees


@pytest.mark.parametrize(
    ("dtype", "gap", "rounding"),
    [("bfloat16", 0.199, True), ("bfloat16", 0.201, False), ("float32", 0.002, False)],
)
def test_rounding_makes_at_most_a_tenth_of_the_spread(
    dtype: str, gap: float, rounding: bool
) -> None:
    ours = Canary(token_ids=OURS.token_ids, logprobs=Logprobs((-12.0, -16.0)))  # deviation 2
    assert syncing.may_be_rounding(ours, serving(-12.0 - gap, -16.0 + gap, dtype=dtype)) == rounding


@pytest.mark.parametrize(
    ("found", "served"),
    [
        ({}, True),
        ({"unread": ("norm",)}, False),
        ({"unread": ("layers.0.mlp.experts.0.up_proj.weight",)}, True),
        ({"differing": ("norm",)}, False),
    ],
)
async def test_a_canary_off_by_rounding_needs_every_tensor_read_back(
    found: dict[str, Any], served: bool
) -> None:
    class Sampler:
        async def call(self, *_: Any, **__: Any) -> CheckedWeights:
            return CheckedWeights(version=3, replica="", num_tensors=2, **found)

    ours = Canary(token_ids=OURS.token_ids, logprobs=Logprobs((-12.0, -16.0)))
    ref = FolderWeights(
        method="shm", path="/w", job_id="j", version=3, digest="d", size_bytes=1, canary=ours
    )
    answer = serving(-12.1, -15.9, dtype="bfloat16").model_copy(
        update={"version": 3, "digest": "d"}
    )
    proving = syncing.prove(cast(Client, Sampler()), WeightsRef(ref), answer)
    if served:
        await proving
    else:
        with pytest.raises(SyncFailed, match="differ by 0"):
            await proving


def lying(stack: Stack, times: int, **changes: Any) -> None:
    """Makes the sampler answer `changes` for version 3, that many times."""
    left = [None] * times

    def lie(answer: ServingWeights) -> ServingWeights:
        if answer.version != 3 or not left:
            return answer
        left.pop()
        return answer.model_copy(update=changes)

    stack.fakes.change["reload"] = lie


async def finished(stack: Stack, **changes: Any) -> str:
    record = await stack.run(**changes)
    assert (record.status, record.recoveries) == ("succeeded", 0)
    return record.id


async def test_a_load_that_did_nothing_is_caught_and_pushed_again_as_such(stack: Stack) -> None:
    lying(stack, 1, canary_logprobs=logprobs_of(2))  # the label and digest of 3, the weights of 2
    job_id = await finished(stack)
    assert [(ref.version, ref.again) for ref in stack.fakes.reloads][2:6] == [
        (2, False),
        (3, False),
        (3, True),
        (4, False),
    ]
    (warning,) = await warnings(stack, job_id)
    assert warning == (
        "weight sync: the sampler does not compute with version 3: the log-probs of the canary "
        "differ by 0.05 nats on average, expected at most 0.001 in float32 (1 of 2 tensors of "
        "the engine are not those published, the first is 'norm'); the weights are pushed again"
    )


async def test_what_the_disk_did_not_bring_a_new_engine_does(stack: Stack) -> None:
    lying(stack, 1, canary_logprobs=logprobs_of(2))
    await finished(stack, weight_sync="disk")
    assert [ref.method for ref in stack.fakes.reloads if ref.version == 3] == ["disk", "restart"]


async def test_a_paused_sampler_is_told_apart_from_a_wrong_one(stack: Stack) -> None:
    lying(stack, 1, canary_logprobs=Logprobs())
    (warning,) = await warnings(stack, await finished(stack))
    assert warning.startswith("the sampler gave no log-probs for version 3")


async def test_auto_takes_what_the_sampler_sees_and_says_why(stack: Stack) -> None:
    async def blind(ref: Published) -> None:
        if getattr(ref, "method", None) in ("shm", "disk"):
            raise Failed("'path': got '/w', which is not a folder here", code="not_seen")

    stack.fakes.fault["reload"] = blind
    job_id = await finished(stack)
    assert [ref.method for ref in stack.fakes.reloads] == ["delta"] * 9
    assert [event.message for event in await stack.events(job_id) if "go by" in event.message] == [
        'weights go by "delta": not every sampler sees the trainer\'s folders, and at a learning '
        "rate of 1e-06 few elements change in a step"
    ]
    assert await warnings(stack, job_id) == []


def test_auto_tries_shared_memory_whatever_the_addresses_of_the_samplers_say(job: Job) -> None:
    fast = job.training.model_copy(update={"learning_rate": 1e-4})
    slow = candidates(job, NO_GPUS, one_host=False)
    assert [method for method, _ in slow] == ["shm", "delta"]
    faster = candidates(job.model_copy(update={"training": fast}), NO_GPUS, one_host=True)
    assert [method for method, _ in faster] == ["shm", "disk", "http"]


@pytest.mark.parametrize(
    ("trainer", "samplers", "method", "why"),
    [
        ("A", (("A",),), "ipc", "trainer and sampler compute on the same GPU, A"),
        ("A", (("B",), ("C", "D")), "nccl", "the trainer's GPU and the samplers' 3 are different"),
        ("A", (("A", "B"),), None, ""),
        ("A", (("B",), ("A",)), None, ""),
        ("A", (("B",), ()), None, ""),
        (None, (("B",),), None, ""),
        ("A", (), None, ""),
    ],
)
def test_auto_goes_from_gpu_to_gpu_only_where_both_sides_can(
    job: Job, trainer: str | None, samplers: Any, method: str | None, why: str
) -> None:
    first, reason = candidates(job, Gpus(trainer, samplers, one_space=True), one_host=True)[0]
    assert first == (method or "shm")
    assert why in reason
    spread = job.memory.model_copy(update={"zero_stage": 3})
    spread_job = job.model_copy(update={"memory": spread})
    assert candidates(spread_job, Gpus(trainer, samplers), one_host=True)[0][0] == "shm"


async def test_what_the_gpus_did_not_bring_goes_by_http_from_then_on(stack: Stack) -> None:
    async def fails(ref: Published) -> None:
        if getattr(ref, "method", None) == "nccl" and ref.version == 3:
            raise Failed("the trainer did not send version 3", code="not_loaded")

    stack.fakes.fault["reload"] = fails
    job_id = await finished(stack, weight_sync="nccl")
    assert [(ref.version, ref.method, ref.again) for ref in stack.fakes.reloads][2:6] == [
        (2, "nccl", False),
        (3, "http", True),
        (4, "http", False),
        (5, "http", False),
    ]
    assert await warnings(stack, job_id) == [
        'weight sync: the trainer did not send version 3; the weights are pushed again by "http", '
        'and later versions do not go by "nccl"'
    ]


async def test_what_cannot_be_taken_off_the_trainers_gpu_goes_by_the_next_way(stack: Stack) -> None:
    async def fails(request: PublishRequest) -> None:
        if request.method == "nccl":
            raise Conflict("2 tensors of the version have another name while they are trained")

    stack.fakes.fault["publish"] = fails
    stack.fakes.gpus = "GPU-1", ("GPU-2",)
    job_id = await finished(stack)
    assert {ref.method for ref in stack.fakes.reloads} == {"shm"}
    assert await warnings(stack, job_id) == []
    said = [event.message for event in await stack.events(job_id) if "not go by" in event.message]
    assert said == [
        "weight sync: 2 tensors of the version have another name while they are trained; weights "
        'do not go by "nccl"'
    ]


@pytest.mark.parametrize(("own", "method"), [("here", "ipc"), ("there", "shm"), (None, "shm")])
async def test_a_sampler_in_a_container_of_its_own_reads_no_memory_of_the_trainers_gpu(
    stack: Stack, own: str | None, method: str
) -> None:
    """They have the same GPU, and other PID namespaces and /dev/shm."""
    stack.fakes.gpus, stack.fakes.spaces = ("GPU-1", ("GPU-1",)), ("here", own)
    await finished(stack)
    assert {ref.method for ref in stack.fakes.reloads} == {method}


async def test_gpus_that_do_not_reach_each_other_are_tried_once_in_a_job(
    stack: Stack, job: Job
) -> None:
    """Also after the job was loaded again."""
    tried: list[int] = []

    async def unreached(ref: Published) -> None:
        if getattr(ref, "method", None) == "nccl":
            tried.append(ref.version)
            raise Failed("trainer and sampler did not meet within 15 s", code="not_met")

    async def fails_once(body: Any) -> None:
        if body.step == 3 and not stack.fakes.calls["failed"]:
            stack.fakes.calls["failed"] += 1
            raise Failed("the step failed")

    stack.fakes.fault |= {"reload": unreached, "train_step": fails_once}
    stack.fakes.gpus = "GPU-1", ("GPU-2",)
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 1)
    assert tried == [0]
    assert [ref.method for ref in stack.fakes.reloads] == ["shm"] * 10
    ways = [event for event in await stack.events(record.id) if "go by" in event.message]
    refused = "weight sync: trainer and sampler did not meet within 15 s; weights do not go by"
    assert [event.message for event in ways] == [
        f'{refused} "nccl"',
        *['weights go by "shm": every sampler sees the trainer\'s shared memory'] * 2,
    ]
    assert ways[1].data["weight_sync"] == "shm" and ways[1].data["seconds"] >= 0


async def test_no_files_are_written_when_every_sampler_takes_what_is_sent(
    stack: Stack,
) -> None:
    published: list[tuple[int, str]] = []

    async def note(request: PublishRequest) -> None:
        published.append((request.version, request.method))

    stack.fakes.fault["publish"] = note
    await finished(stack, weight_sync="nccl")
    assert published == [(version, "nccl") for version in range(9)]


class Publishes:
    """Stands for the trainer: publishes what is next in `answers`, and notes by which method."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.methods: list[str] = []

    async def publish_weights(self, version: int, method: SyncMethod) -> WeightsRef:
        await asyncio.sleep(0)
        self.methods.append(method)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return WeightsRef.model_validate(
            {"job_id": "j", "version": version, "method": method, "size_bytes": 1, "digest": answer}
            | WHERE[method]
        )


async def fuller(*answers: Any) -> tuple[Publishes, syncing.Fallback]:
    trainer = Publishes("sent", *answers)
    sent = await trainer.publish_weights(3, "nccl")
    return trainer, syncing.Fallback(cast(TrainerClient, trainer), sent)


async def test_the_files_of_what_was_sent_are_asked_for_once_by_all_who_need_them() -> None:
    trainer, files = await fuller("sent")
    found = await asyncio.gather(files(), files())
    assert [(ref.root.version, ref.root.method, ref.root.again) for ref in found] == [
        (3, "http", True)
    ] * 2
    assert trainer.methods == ["nccl", "http"]


async def test_once_the_trainer_has_gone_on_a_sampler_waits_for_the_next_version() -> None:
    _, files = await fuller(Conflict("got version 3, expected 4", code="out_of_order"), "sent")
    with pytest.raises(
        Unavailable, match=r"the trainer has begun the next step: .* gets the next version"
    ):
        await files()


async def test_files_of_another_digest_than_what_was_sent_are_not_loaded() -> None:
    _, files = await fuller("other")
    with pytest.raises(SyncFailed, match="have digest other, and what was sent sent"):
        await files()


LORA = {"lora": LoraSpec(rank=12)}


async def chosen(stack: Stack, job_id: str) -> list[str]:
    return [event.message for event in await stack.events(job_id) if "go by" in event.message]


async def test_auto_moves_the_adapter_alone_of_a_job_that_trains_one(
    stack: Stack, job: Job
) -> None:
    job_id = await finished(stack, **LORA)
    assert stack.fakes.spec is not None and stack.fakes.spec.max_lora_rank == 12
    assert [ref.method for ref in stack.fakes.reloads] == ["lora"] * 9
    assert await chosen(stack, job_id) == [
        'weights go by "lora": the job trains an adapter, and the engine takes it beside the model'
    ]


async def test_auto_merges_what_the_engine_does_not_take_and_says_so(stack: Stack) -> None:
    async def refusing(ref: Published) -> None:
        if getattr(ref, "method", None) == "lora":
            raise Conflict("vLLM does not take it", code="no_adapters")

    stack.fakes.fault["reload"] = refusing
    job_id = await finished(stack, **LORA)
    assert {ref.method for ref in stack.fakes.reloads} == {"shm"}
    assert await chosen(stack, job_id) == [
        'weights go by "shm": every sampler sees the trainer\'s shared memory'
    ]
    assert await warnings(stack, job_id) == []


async def test_after_an_adapter_that_did_not_arrive_weights_are_merged(stack: Stack) -> None:
    lying(stack, 1, canary_logprobs=logprobs_of(2))
    job_id = await finished(stack, **LORA)
    pushed = [(ref.version, ref.method, ref.again) for ref in stack.fakes.reloads][3:6]
    assert pushed == [(3, "lora", False), (3, "http", True), (4, "shm", False)]
    (warning,) = await warnings(stack, job_id)
    again = '; the weights are pushed again by "http", and later versions do not go by "lora"'
    assert warning.endswith(again)


@pytest.mark.parametrize(
    ("changes", "one_host", "methods"),
    [
        (LORA, True, ["lora", "shm", "disk", "delta"]),
        (LORA, False, ["lora", "shm", "delta"]),
        ({"lora": LoraSpec(rank=513)}, True, ["shm", "disk", "delta"]),
    ],
)
def test_auto_tries_an_adapter_first_where_vllm_serves_its_rank(
    job: Job, changes: dict[str, Any], one_host: bool, methods: list[str]
) -> None:
    found = candidates(job.model_copy(update=changes), NO_GPUS, one_host=one_host)
    assert [method for method, _ in found] == methods


async def test_every_sync_is_in_the_run_folder(stack: Stack) -> None:
    job_id = await finished(stack)
    lines = (stack.folder(job_id).path / "weights.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["version"] for row in rows] == list(range(9))
    assert (rows[3]["digest"], rows[3]["method"]) == ("digest-3", "shm")
    assert rows[3]["samplers"][0]["canary_difference"] == 0.0


async def test_weights_are_synced_every_n_steps_and_the_staleness_bound_holds(stack: Stack) -> None:
    job_id = await finished(stack, sync_every=3, max_staleness=2)
    # 4 and 8 are evaluated, 8 is the last.
    assert [ref.version for ref in stack.fakes.reloads] == [0, 3, 4, 6, 8]
    staleness = [row.metrics["staleness"] for row in stack.folder(job_id).metrics(0)]
    assert max(staleness) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_sync": "restart", "max_staleness": 1}, "which ends requests under way"),
        ({"weight_sync": "lora", "lora": {"rank": 513}}, "lora.rank 513, expected at most 512"),
        ({"sampling": {"keep_prefixes": True}}, "keep_prefixes is true and max_staleness 0"),
        (
            {"sampling": {"keep_prefixes": True}, "max_staleness": 1, "lora": {"rank": 4}},
            "lora is set and weight_sync is 'auto'",
        ),
    ],
)
def test_a_job_that_could_not_sync_as_it_says_is_refused(
    job: Job, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        Job.model_validate({**job.model_dump(), **changes})


@pytest.mark.parametrize("gpu", [None, "GPU-1"])
async def test_beside_a_trainer_on_a_gpu_the_sampler_has_started_before_the_job_is_loaded(
    stack: Stack, job: Job, gpu: str | None
) -> None:
    asked: list[str] = []
    loaded = asyncio.Event()

    async def start(_: object) -> None:
        asked.append("model")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(loaded.wait(), 0.3)
        asked.append("started")

    async def load(_: object) -> None:
        asked.append("job")
        loaded.set()

    stack.fakes.gpus = (gpu, ())
    stack.fakes.fault |= {"model": start, "job": load}
    record = await stack.run()
    assert (record.status, record.recoveries) == ("succeeded", 0)
    in_turn = ["model", "started", "job"]
    assert (asked == in_turn) is (gpu is not None)
    assert sorted(asked) == sorted(in_turn)
