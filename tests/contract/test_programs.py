"""Tinker's API before fake services: what is accepted, in which order it is done, and what a death
leaves."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from services.orchestrator.extensions.tinker import (
    driving,
    log,
    messages,
    models,
    routes,
)
from services.orchestrator.extensions.tinker.log import SavedFolder
from shared.errors import Conflict, Failed, StateLost
from shared.weights.folders import MANIFEST, STATE
from shared.wire import (
    GenerateRequest,
    LogStart,
    OptimStepRequest,
    ProgramOperation,
    SampleOrder,
    Sampling,
    SamplingSession,
    TokenIds,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

LORA = {"rank": 4, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True}
ZSTD = {"content-encoding": "zstd"}
ADAM = {"adam_params": {"learning_rate": 0.1, "grad_clip_norm": 1.0}}


ORDER = {
    "num_samples": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
    "sampling_params": {"max_tokens": 4},
}


async def post(stack: Stack, path: str, body: Any = None, **headers: str) -> Any:
    """Returns the answer; fails unless its status is 200."""
    response = await asked(stack, path, body, **headers)
    assert response.status_code == 200, response.text
    return response.json()


async def asked(stack: Stack, path: str, body: Any = None, **headers: str) -> Any:
    given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
    return await stack.http.post(f"/api/v1/{path}", headers=headers, **given)


async def created(stack: Stack, session: str = "s", **changes: Any) -> str:
    body = {"session_id": session, "model_seq_id": 0, "base_model": "owner/model"}
    answer = await post(stack, "create_model", body | {"lora_config": LORA} | changes)
    future = await post(stack, "retrieve_future", {"request_id": answer["request_id"]})
    assert future == {"type": "create_model", "model_id": answer["model_id"]}
    return str(answer["model_id"])


def call(
    model: str,
    number: int,
    tokens: Sequence[int] = (5, 6, 7),
    loss: str = "cross_entropy",
    **more: Any,
) -> bytes:
    """A call of one datum whose first tokens are the prompt and the last one the answer."""
    message = messages.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model, number, loss
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    inputs = {"target_tokens": np.array(tokens[1:], "<i8")} | {
        name: np.array(values, "<f4") for name, values in more.items()
    }
    for name, values in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), 2 if name == "target_tokens" else 1
        tensor.shape.extend(values.shape)
    return bytes(message.SerializeToString())


async def result(stack: Stack, answer: dict[str, Any], kind: str = "ForwardBackwardOutput") -> Any:
    """The result of a future, as JSON or as a message of this kind."""
    async with asyncio.timeout(60):
        while True:
            response = await asked(stack, "retrieve_future", {"request_id": answer["request_id"]})
            if response.status_code != 408:
                break
            assert response.json()["type"] == "try_again"
    assert response.status_code == 200, response.text
    if response.headers["content-type"] != "application/x-protobuf":
        return response.json()
    found = messages.new(kind)
    found.ParseFromString(response.content)
    return found


async def test_a_model_learns_serves_and_ends(stack: Stack) -> None:
    model = await created(stack)
    assert await created(stack) == model, "the same model of a session is the same job"
    info = await post(stack, "get_info", {"model_id": model})
    assert (info["lora_rank"], info["model_data"]["tokenizer_id"]) == (4, "owner/model")
    packed = zstandard.ZstdCompressor().compress(call(model, 1, weights=[0, 1]))
    first = await post(stack, "forward_backward", packed, **ZSTD)
    step = await post(stack, "optim_step", {"model_id": model, "seq_id": 2, **ADAM})
    found = await result(stack, first)
    assert dict(found.metrics) == {"loss:sum": 2.0}
    (record,) = found.loss_fn_outputs
    assert np.frombuffer(record.fields["logprobs"].data, "<f4").tolist() == [-0.5, -0.5]
    assert np.frombuffer(record.fields["logprobs"].offsets, "<i8").tolist() == [0, 8]
    assert (await result(stack, step))["metrics"] == {"grad_norm:mean": 2.0}
    sent, optim = stack.fakes.operations
    assert tuple(sent.examples[0].advantages) == (0.0, 1.0)
    assert isinstance(optim, OptimStepRequest) and optim.optimization.max_grad_norm == 1.0

    snapshot = {"model_id": model, "seq_id": 3, "path": "one"}
    path = (await result(stack, await post(stack, "save_weights_for_sampler", snapshot)))["path"]
    assert path == f"tinker://{model}/sampler_weights/one"
    assert [ref.version for ref in stack.fakes.reloads] == [0, 2]
    session = await session_on(stack, model_path=path)
    order = ORDER | {"sampling_session_id": session, "seq_id": 0, "num_samples": 2}
    sample = await post(stack, "asample", order)
    assert len(sample["sample_sequence_ids"]) == 2
    again = await post(stack, "asample", order)
    assert again["request_id"] == sample["request_id"]
    other = await asked(stack, "asample", order | {"num_samples": 3})
    assert other.status_code == 422 and "ordered with another body" in other.json()["detail"]
    samples = await result(stack, sample, "SampleResponse")
    assert [np.frombuffer(one.tokens, "<i4").tolist() for one in samples.sequences] == [[1, 2]] * 2
    assert stack.fakes.calls["generate"] == 1
    order["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    for wanted, expected in (({}, [-1.0, -2.0]), ({"prompt_logprobs_last_n": 1}, [-2.0])):
        more = {"seq_id": len(expected), "prompt_logprobs": True, **wanted}
        sample = await post(stack, "asample", order | more)
        samples = await result(stack, sample, "SampleResponse")
        found = np.frombuffer(samples.prompt_logprobs, "<f4")
        assert len(found) == 3 and found[~np.isnan(found)].tolist() == expected

    more = {"seq_id": 9, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    samples = await result(stack, await post(stack, "asample", order | more), "SampleResponse")
    top = samples.topk_prompt_logprobs
    assert (top.k, top.length) == (2, 3)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [0, 0, 9, 10, 11, 12]
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-99999, -99999, 0, -1, -2, -3]
    top = samples.sequences[1].topk_sampled_logprobs
    assert (top.k, top.length) == (2, 2)
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [1, 3, 2, 3]

    saved = await post(stack, "save_weights", {"model_id": model, "seq_id": 4, "path": "end"})
    assert (await result(stack, saved))["path"] == f"tinker://{model}/weights/end"
    ended = await post(stack, "unload_model", {"model_id": model})
    assert (await result(stack, ended))["type"] == "unload_model"
    assert (await stack.until(model)).status == "succeeded"


async def session_on(stack: Stack, number: int = 0, **weights: str) -> str:
    body = {"session_id": "s", "sampling_session_seq_id": number, **weights}
    return (await post(stack, "create_sampling_session", body))["sampling_session_id"]


async def sampled_by(stack: Stack, session: str, number: int = 0) -> GenerateRequest:
    """Samples once in the session, and returns what the sampler was asked for."""
    asked_for: list[GenerateRequest] = []

    async def note(body: GenerateRequest) -> None:
        asked_for.append(body)

    stack.fakes.fault["generate"] = note
    order = ORDER | {"sampling_session_id": session, "seq_id": number}
    sample = await post(stack, "asample", order)
    await result(stack, sample, "SampleResponse")
    (request,) = asked_for
    return request


async def snapshot(stack: Stack, model: str, number: int, name: str | None) -> Any:
    body = {"model_id": model, "seq_id": number, "path": name}
    return await result(stack, await post(stack, "save_weights_for_sampler", body))


async def test_every_snapshot_can_be_sampled_also_of_a_model_that_has_ended(stack: Stack) -> None:
    model = await created(stack)
    first = (await snapshot(stack, model, 1, None))["sampling_session_id"]
    await post(stack, "forward_backward", call(model, 2))
    await result(stack, await post(stack, "optim_step", {"model_id": model, "seq_id": 3, **ADAM}))
    path = (await snapshot(stack, model, 4, "new"))["path"]
    second = await session_on(stack, model_path=path)
    for session, version in ((first, 0), (second, 2)):
        request = await sampled_by(stack, session)
        assert request.snapshot is not None and request.snapshot.version == version
        assert (request.job_id, request.own_weights) == (model, False)
    differs = {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "owner/model"}
    refused = await asked(stack, "create_sampling_session", differs)
    assert refused.status_code == 422 and "was opened with another body" in refused.text
    other = await session_on(stack, 1, model_path=path)
    assert (await sampled_by(stack, other)).snapshot, "number 0 is free in each session"

    await result(stack, await post(stack, "unload_model", {"model_id": model}))
    await stack.until(model)
    twin = await created(stack, model_seq_id=1)
    late = await session_on(stack, 2, model_path=path)
    request = await sampled_by(stack, late)
    assert request.job_id == twin and request.snapshot and request.snapshot.job_id == model
    told = await stack.http.get(f"/api/v1/samplers/{late}")
    assert told.json() == {"sampler_id": late, "base_model": "owner/model", "model_path": path}


async def test_a_base_model_is_sampled_beside_a_model_or_by_one_of_its_own(stack: Stack) -> None:
    alone = await session_on(stack, base_model="owner/model")
    request = await sampled_by(stack, alone)
    assert request.own_weights and request.snapshot is None
    assert await session_on(stack, base_model="owner/model") == alone, "it is the same session"
    job = (await stack.get(str(request.job_id))).job
    assert job.lora is not None and job.lora.rank == 32
    beside = await session_on(stack, 1, base_model="owner/model")
    assert beside.startswith(f"{request.job_id}:"), "one session's are beside each other"


async def test_a_base_model_is_sampled_beside_the_same_programs_models_alone(stack: Stack) -> None:
    other, model = await created(stack, "t"), await created(stack)
    session = await session_on(stack, base_model="owner/model")
    assert session.startswith(f"{model}:") and not session.startswith(other)
    order = ORDER | {"sampling_session_id": session, "seq_id": 0}
    for one in (other, model):
        await post(stack, "unload_model", {"model_id": one})
        await stack.until(one)
    refused = await asked(stack, "asample", order)
    assert refused.status_code == 422 and "which samples for this session, is succ" in refused.text
    again = await session_on(stack, 1, base_model="owner/model")
    assert not again.startswith(f"{model}:"), "a new session has a model that runs"


async def test_operations_are_done_once_in_the_order_of_their_numbers(stack: Stack) -> None:
    model = await created(stack)
    body = call(model, 1)
    answers = [
        await post(stack, "optim_step", {"model_id": model, "seq_id": 3, **ADAM}),
        await post(stack, "forward_backward", call(model, 2, (9, 8, 7))),
        await post(stack, "forward_backward", body),
    ]
    assert await post(stack, "forward_backward", body) == answers[2]
    for answer in answers:
        await result(stack, answer)
    kinds = [type(one).__name__ for one in stack.fakes.operations]
    assert kinds == ["ForwardBackwardRequest"] * 2 + ["OptimStepRequest"]
    first = stack.fakes.operations[0]
    assert tuple(first.examples[0].token_ids) == (6, 7)
    assert await post(stack, "forward_backward", body) == answers[2]
    refused = await asked(stack, "forward_backward", call(model, 1, (9, 9)))
    assert refused.status_code == 422
    assert "operation 1 was accepted with another body" in refused.json()["detail"]
    assert stack.fakes.calls["forward_backward"] == 2


async def test_a_model_is_unloaded_once_though_operations_come_at_the_same_time(
    stack: Stack,
) -> None:
    model = await created(stack)
    calls = [asked(stack, "forward_backward", call(model, number)) for number in range(1, 9)]
    unload = post(stack, "unload_model", {"model_id": model})
    *answers, ended = await asyncio.gather(*calls, unload)
    assert (await result(stack, ended))["type"] == "unload_model"
    record = await stack.until(model)
    assert record.status == "succeeded"
    assert await post(stack, "unload_model", {"model_id": model}) == ended, "it has ended once"
    assert {answer.status_code for answer in answers} <= {200, 422}
    known = log.OperationLog(Path(record.run_dir))
    known.accept(known.newest() + 1, ProgramOperation(kind="refused", digest="another"))
    assert await post(stack, "unload_model", {"model_id": model}) == ended


async def test_after_a_trainers_death_its_operations_are_done_again(stack: Stack) -> None:
    """The trainer comes back from its checkpoint of operation 2."""
    model = await created(stack)

    async def step(number: int) -> Any:
        await post(stack, "forward_backward", call(model, number, (number, 2)))
        done = await post(stack, "optim_step", {"model_id": model, "seq_id": number + 1, **ADAM})
        return await result(stack, done)

    await step(1)
    saved = {"model_id": model, "seq_id": 3, "path": "c"}
    await result(stack, await post(stack, "save_weights", saved))
    await step(4)
    before = list(stack.fakes.operations)
    died: list[int] = []

    async def die(body: Any) -> None:
        if body.step == 5 and not died:
            died.append(stack.fakes.step)
            stack.fakes.restart_trainer()
            raise StateLost("it is another trainer")

    stack.fakes.fault["forward_backward"] = die
    await step(6)
    assert died == [4] and stack.fakes.checkpointed == {0, 2}
    assert stack.fakes.operations[:4] == before
    assert [one.step for one in stack.fakes.operations] == [1, 2, 3, 4, 5, 6]
    assert stack.fakes.calls["forward_backward"] == 2 + 1 + 1 + 1, "3 and 5 came twice"


async def test_what_two_checkpoints_have_is_forgotten_and_not_done_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "KEPT_S", -1.0)
    model = await created(stack)
    folder = Path((await stack.get(model)).run_dir)
    for first in (1, 4, 7):
        await post(stack, "forward_backward", call(model, first))
        await post(stack, "optim_step", {"model_id": model, "seq_id": first + 1, **ADAM})
        saved = {"model_id": model, "seq_id": first + 2, "path": f"c{first}"}
        await result(stack, await post(stack, "save_weights", saved))
    known = log.OperationLog(folder)
    assert known.start() == LogStart(number=7, done=4)
    assert [number for number in range(1, 10) if known.operation(number)] == [7, 8, 9]
    assert known.operation(1) is None and known.outcome(1) is None
    late = await asked(stack, "forward_backward", call(model, 1))
    assert late.status_code == 422 and "operation 1 was done long ago" in late.json()["detail"]
    stack.fakes.restart_trainer()
    await post(stack, "forward_backward", call(model, 10))
    done = await post(stack, "optim_step", {"model_id": model, "seq_id": 11, **ADAM})
    assert (await result(stack, done))["metrics"] == {"grad_norm:mean": 2.0}
    assert [one.step for one in stack.fakes.operations] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one.name for one in SavedFolder(folder).all()] == ["c1", "c4", "c7"]
    assert known.newest() == 11


async def test_a_model_whose_newest_checkpoints_are_gone_says_so(stack: Stack) -> None:
    model = await created(stack)
    await result(stack, await post(stack, "forward_backward", call(model, 1)))
    known = log.OperationLog(Path((await stack.get(model)).run_dir))
    known.advance(LogStart(number=2, done=1))
    stack.fakes.restart_trainer()
    await post(stack, "forward_backward", call(model, 2))
    paused = await stack.until(model, "paused")
    assert "continued from operation 0, and the log begins after operation 1" in str(paused.error)


async def test_a_refused_step_drops_the_gradient_again_after_a_death(stack: Stack) -> None:
    """The step of operation 2 is refused, and then the trainer comes back at its start."""
    model = await created(stack)
    refusals: list[int] = []

    async def refuse(body: Any) -> None:
        if body.step == 2 and len(refusals) < 2:
            refusals.append(body.step)
            raise Failed("the gradient is not finite", code="not_finite")

    stack.fakes.fault["optim_step"] = refuse
    await result(stack, await post(stack, "forward_backward", call(model, 1)))
    step = {"model_id": model, **ADAM}
    refused = await result(stack, await post(stack, "optim_step", step | {"seq_id": 2}))
    assert refused == {"error": "the gradient is not finite", "category": "user"}
    died: list[int] = []

    async def die(body: Any) -> None:
        if body.step == 2 and not died:
            died.append(1)
            stack.fakes.restart_trainer()
            raise StateLost("it is another trainer")

    stack.fakes.fault["forward_backward"] = die
    await result(stack, await post(stack, "forward_backward", call(model, 3, (9, 8, 7))))
    done = await result(stack, await post(stack, "optim_step", step | {"seq_id": 4}))
    assert done["metrics"] == {"grad_norm:mean": 2.0}
    assert refusals == [2, 2], "again between the calls that were done again"
    kinds = [type(one).__name__ for one in stack.fakes.operations]
    assert kinds == ["ForwardBackwardRequest"] * 2 + ["OptimStepRequest"]


async def test_a_model_that_rests_makes_room_and_comes_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "IDLE_S", 0.2)
    first = await created(stack)
    await result(stack, await post(stack, "forward_backward", call(first, 1)))
    second = await created(stack, "t")
    await result(stack, await post(stack, "forward_backward", call(second, 1, (3, 4))))
    waiting = await stack.get(first)
    assert waiting.status == "paused" and (waiting.error or "").startswith("preempted: its program")
    assert waiting.pause_reason == "preempted" and "hone resume" not in (waiting.error or "")
    done = await post(stack, "optim_step", {"model_id": first, "seq_id": 2, **ADAM})
    assert (await result(stack, done))["metrics"] == {"grad_norm:mean": 2.0}
    assert [one.job_id for one in stack.fakes.operations] == [first, first]
    assert tuple(stack.fakes.operations[0].examples[0].token_ids) == (6, 7)


async def test_a_program_waits_while_somebody_has_paused_its_model(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "WAIT_S", 0.2)
    model = await created(stack)
    await result(stack, await post(stack, "forward_backward", call(model, 1)))
    await stack.http.post(f"/v1/jobs/{model}/pause")
    await stack.until(model, "paused")
    answer = await post(stack, "forward_backward", call(model, 2))
    waiting = await asked(stack, "retrieve_future", {"request_id": answer["request_id"]})
    assert waiting.status_code == 408 and waiting.json() == {
        "type": "try_again",
        "request_id": answer["request_id"],
        "queue_state": "paused_capacity",
        "queue_state_reason": f"it was paused on request; `hone resume {model}` continues it",
    }
    await stack.http.post(f"/v1/jobs/{model}/resume")
    assert dict((await result(stack, answer)).metrics) == {"loss:sum": 2.0}


async def test_a_model_whose_samples_are_under_way_is_not_evicted(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "IDLE_S", 0.2)
    first = await created(stack)
    session = (await snapshot(stack, first, 1, None))["sampling_session_id"]
    going = asyncio.Event()

    async def wait(_: GenerateRequest) -> None:
        await going.wait()

    stack.fakes.fault["generate"] = wait
    sample = await post(stack, "asample", ORDER | {"sampling_session_id": session, "seq_id": 0})
    second = await created(stack, "t")
    await asyncio.sleep(1.0)
    assert [(await stack.get(one)).status for one in (first, second)] == ["running", "queued"]
    going.set()
    async with asyncio.timeout(30):
        done = await asked(stack, "retrieve_future", {"request_id": sample["request_id"]})
    assert done.headers["content-type"] == "application/x-protobuf"
    await result(stack, await post(stack, "forward_backward", call(second, 1)))
    assert (await stack.get(first)).status == "paused", "then it makes room"


async def test_samples_that_fail_again_and_again_hold_no_place(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "IDLE_S", 0.3)
    first = await created(stack)
    session = (await snapshot(stack, first, 1, None))["sampling_session_id"]

    async def fail(_: GenerateRequest) -> None:
        raise Conflict("another version serves", code="out_of_order")

    stack.fakes.fault["generate"] = fail
    await post(stack, "asample", ORDER | {"sampling_session_id": session, "seq_id": 0})
    second = await created(stack, "t")
    async with asyncio.timeout(30):
        await result(stack, await post(stack, "forward_backward", call(second, 1)))


async def test_a_momentary_failure_of_a_sampler_is_not_the_samples_result(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "AGAIN_S", 0.01)
    model = await created(stack)
    session = (await snapshot(stack, model, 1, None))["sampling_session_id"]
    tried: list[GenerateRequest] = []
    why = "the adapter's folder is not here yet"

    async def fail(body: GenerateRequest) -> None:
        tried.append(body)
        if len(tried) <= failures:
            raise Failed(why, code="not_seen")

    stack.fakes.fault["generate"] = fail
    for failures, num_tried, error in ((2, 3, None), (5, 5, why)):
        tried.clear()
        order = ORDER | {"sampling_session_id": session, "seq_id": failures}
        found = await result(stack, await post(stack, "asample", order), "SampleResponse")
        assert (found["error"] if isinstance(found, dict) else None) == error
        assert len(tried) == num_tried


async def test_models_that_wait_for_a_lost_number_do_not_evict_each_other(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("GAP_S", 1.0), ("IDLE_S", 0.3), ("LOOK_S", 0.1)):
        monkeypatch.setattr(driving, name, seconds)
    models = [await created(stack, session) for session in "st"]
    late = [await post(stack, "forward_backward", call(model, 2)) for model in models]
    for answer in late:
        await result(stack, answer)
    assert stack.fakes.calls["job"] <= 3


async def test_an_order_of_samples_is_carried_out_though_no_one_asks(stack: Stack) -> None:
    """Another orchestrator may have accepted it, or this one before it died."""
    model = await created(stack)
    session = (await snapshot(stack, model, 1, None))["sampling_session_id"]
    known = log.OperationLog(Path((await stack.get(model)).run_dir))
    weights = SavedFolder(Path((await stack.get(model)).run_dir)).all()[0]
    order = SampleOrder(
        session=SamplingSession(step=0, adapter=weights.adapter),
        prompt_token_ids=TokenIds([5, 6]),
        sampling=Sampling(n=1),
    )
    id = f"{session.rpartition(':')[2]}-7"
    known.order(id, order)
    async with asyncio.timeout(20):
        while known.samples(id) is None:
            await asyncio.sleep(0.05)
    assert known.undelivered() == []


async def test_a_body_that_unpacks_to_too_much_is_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_CALL_BYTES", 1000)
    packed = zstandard.ZstdCompressor().compress(bytes(1001))
    refused = await asked(stack, "forward_backward", packed, **ZSTD)
    assert "more than 1000 bytes" in refused.json()["detail"]
    refused = await asked(stack, "forward_backward", b"x", **ZSTD)
    assert "the body is no zstd" in refused.json()["detail"]
    refused = await asked(stack, "get_info", packed, **ZSTD)
    assert "Content-Encoding is 'zstd'; expected none for JSON" in refused.json()["detail"]
    refused = await asked(stack, "forward_backward", packed, **{"content-encoding": "br"})
    assert "Content-Encoding is 'br'; expected 'zstd', or none" in refused.json()["detail"]
    refused = await asked(stack, "get_info", b" " * (routes.MAX_JSON_BYTES + 1))
    assert f"more than {routes.MAX_JSON_BYTES} bytes" in refused.json()["detail"]


async def test_bodies_are_unpacked_one_at_a_time_and_not_on_the_loop(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked, under_way, most = routes._unpacked, [0], [0]

    def noted(body: bytes, encoding: str | None) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        try:
            time.sleep(0.01)
            return unpacked(body, encoding)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(routes, "_unpacked", noted)
    packed = zstandard.ZstdCompressor().compress(b"no message")
    sent = (asked(stack, "forward_backward", packed, **ZSTD) for _ in range(10))
    assert {one.status_code for one in await asyncio.gather(*sent)} == {422}
    assert most == [1]


SESSION = {"session_id": "s", "sampling_session_seq_id": 0}


async def test_a_bad_request_is_refused_with_a_sentence(stack: Stack) -> None:
    bad: tuple[tuple[str, Any, int, str], ...] = (
        ("create_model", {"base_model": ""}, 422, "'base_model': got ''; expected a model's"),
        (
            "create_model",
            {"optimizer_config": {"type": "muon"}},
            422,
            "is 'muon'; expected 'adamw'",
        ),
        ("create_sampling_session", SESSION | {"base_model": "x"}, 422, "no folder 'x' here"),
        ("create_sampling_session", SESSION, 422, "'base_model': got None; expected a model's"),
        (
            "create_sampling_session",
            {"base_model": "x"},
            422,
            "'session_id' is None and 'sampling_",
        ),
        (
            "create_sampling_session",
            SESSION | {"model_path": "x"},
            422,
            "expected tinker://MODEL/sampler_w",
        ),
        (
            "load_weights",
            {"path": "tinker://a/weights/b"},
            422,
            "cannot be loaded into an existing model",
        ),
        ("retrieve_future", {"request_id": "nobody:1"}, 404, "nobody"),
        ("get_info", {"model_id": "../x"}, 404, "../x"),
        ("asample", {"sampling_session_id": "x", "seq_id": 1}, 422, "expected a session of this"),
        ("optim_step", [1], 422, "the body is [1]; expected a JSON object"),
        ("optim_step", b"{", 422, "the body is no JSON"),
        ("forward_backward", b"no message", 422, "the body is not a ForwardBackwardRequest"),
    )
    for path, body, status, message in bad:
        refused = await asked(stack, path, body)
        assert refused.status_code == status, refused.text
        assert message in refused.json()["detail"]


async def test_a_model_begins_with_a_checkpoint_of_another(stack: Stack) -> None:
    first = await created(stack)
    await result(stack, await post(stack, "forward_backward", call(first, 1, weights=[0, 1])))
    await result(stack, await post(stack, "optim_step", {"model_id": first, "seq_id": 2, **ADAM}))
    saving = {"model_id": first, "seq_id": 3, "path": "kept"}
    path = (await result(stack, await post(stack, "save_weights", saving)))["path"]
    twice = saving | {"seq_id": 4, "path": "twice"}
    await result(stack, await post(stack, "save_weights", twice))
    known = log.OperationLog(Path((await stack.get(first)).run_dir))
    assert known.start() == LogStart(), "two checkpoints of one step are one to fall back on"
    folder = (await stack.store.checkpoints(first))[-1].path
    (Path(folder) / STATE).mkdir(parents=True, exist_ok=True)
    source = (await stack.get(first)).job.model_dump(mode="json")
    (Path(folder) / MANIFEST).write_text(json.dumps({"job": source}))
    info = await post(stack, "weights_info", {"tinker_path": path})
    assert info == {"base_model": "owner/model", "is_lora": True, "lora_rank": 4}
    await result(stack, await post(stack, "unload_model", {"model_id": first}))

    asks = {"session_id": "s", "model_seq_id": 1, "path": path, "optimizer": True}
    answer = await post(stack, "load_weights", asks)
    second = answer["model_id"]
    future = await post(stack, "retrieve_future", {"request_id": answer["request_id"]})
    assert future == {"type": "load_weights", "model_id": second} and second != first
    assert (await post(stack, "load_weights", asks))["model_id"] == second
    job = (await stack.store.get(second)).job
    assert (job.training.start_from, job.training.start_optimizer) == (folder, True)
    assert job.lora is not None and job.lora.rank == 4
    alias = "s:train:1"  # what the SDK calls it by
    assert (await post(stack, "get_info", {"model_id": alias}))["model_id"] == second
    step = {"model_id": alias, "seq_id": 1, **ADAM}
    assert (await result(stack, await post(stack, "optim_step", step)))["type"] == "optim_step"
    assert 0 in stack.fakes.checkpointed


async def test_what_cannot_be_loaded_is_refused(stack: Stack) -> None:
    model = await created(stack)
    await result(stack, await post(stack, "forward_backward", call(model, 1, weights=[0, 1])))
    await result(stack, await post(stack, "optim_step", {"model_id": model, "seq_id": 2, **ADAM}))
    saving = {"model_id": model, "seq_id": 3, "path": "kept"}
    path = (await result(stack, await post(stack, "save_weights", saving)))["path"]
    asks = {"session_id": "s", "model_seq_id": 1, "path": path, "optimizer": False}
    existing = {"session_id": None, "model_id": model, "seq_id": 4}
    for changes, status, message in (
        ({"path": f"tinker://{model}/weights/none"}, 404, "has no checkpoint 'none'"),
        ({"path": "/etc"}, 422, "expected tinker://MODEL/weights/NAME"),
        (existing, 422, "expected a new model"),
        ({"base_model": "owner/other"}, 422, "expected 'owner/model', the checkpoint's"),
    ):
        refused = await asked(stack, "load_weights", asks | changes)
        assert refused.status_code == status, refused.text
        assert message in refused.json()["detail"]


async def test_a_refused_operation_keeps_no_one_waiting(stack: Stack) -> None:
    model = await created(stack)
    refused = await asked(stack, "forward_backward", call(model, 1, loss="ppo"))
    assert refused.status_code == 422
    bad = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": -1}}
    refused = await asked(stack, "optim_step", bad)
    assert "adam_params: 'learning_rate': got -1" in refused.json()["detail"]
    began = time.monotonic()
    await result(stack, await post(stack, "forward_backward", call(model, 3)))
    assert time.monotonic() - began < driving.GAP_S / 2
    told = await result(stack, {"request_id": f"{model}:1"})
    assert told["category"] == "user" and "datum 0 has no 'logprobs'" in told["error"]


async def test_a_gap_of_numbers_is_waited_for_once_and_late_ones_are_told_so(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "GAP_S", 2.0)
    model = await created(stack)
    began = time.monotonic()
    await result(stack, await post(stack, "forward_backward", call(model, 40)))
    assert time.monotonic() - began < 15, "and not 39 times 2 s"
    late = await result(stack, await post(stack, "forward_backward", call(model, 1)))
    assert "was skipped; expected a new number" in late["error"]
    assert stack.fakes.calls["forward_backward"] == 1
    monkeypatch.setattr(driving, "GAP_S", 1000.0)
    stack.fakes.restart_trainer()  # a number that was passed over is not waited for again
    await result(stack, await post(stack, "forward_backward", call(model, 41)))
    assert stack.fakes.calls["forward_backward"] >= 3


SAMPLE = {"sampling_session_id": "{model}:1", "seq_id": 0, "num_samples": 1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}


async def test_an_odd_value_is_named(stack: Stack) -> None:
    model = await created(stack, "other")
    await snapshot(stack, model, 1, None)
    usual = {"session_id": "s", "model_seq_id": 0, "base_model": "owner/model"}
    odd: tuple[tuple[str, Any, str], ...] = (
        ("optim_step", {"adam_params": {}, "seq_id": 1002}, "the model's newest operation is 1;"),
        ("create_model", {"lora_config": "x"}, "'lora_config': got 'x'; expected an object"),
        ("create_model", {"lora_config": {}}, "lora_config.rank is missing"),
        ("create_model", {"lora_config": {"rank": True}}, "lora_config.rank: got True; expected a"),
        ("create_model", {"optimizer_config": "adamw"}, "'optimizer_config': got 'adamw'"),
        ("create_model", {"user_metadata": "x"}, "'user_metadata': got 'x'; expected an object"),
        ("create_model", {"session_id": ""}, "expected both: the same two name the same model"),
        ("create_model", {"session_id": "s" * 201}, "session_id has at most 200 characters"),
        ("get_info", {"model_id": None}, "'model_id': got None; expected an id from this server"),
        ("unload_model", {"model_id": 5}, "'model_id': got 5; expected text"),
        ("retrieve_future", {"request_id": ""}, "'request_id': got ''; expected an id from this"),
        ("create_model", b"[" * 10_000, "the body is no JSON"),
        ("optim_step", {"adam_params": {"learning_rate": "x"}}, "adam_params.learning_rate: got"),
        ("optim_step", {"adam_params": {"speed": 1}}, "adam_params"),
        ("optim_step", {"adam_params": {}, "seq_id": 2**63}, "beyond 64 bits"),
        ("optim_step", {"adam_params": {}, "seq_id": True}, "'seq_id': got True"),
        ("save_weights", {"path": "a" * 101}, "at most 100"),
        ("save_weights", {"path": ".."}, "expected a name of"),
        ("asample", SAMPLE | {"prompt": "12"}, "'prompt': got '12'; expected an object"),
        ("asample", SAMPLE | {"prompt": {"chunks": [5]}}, "prompt.chunks[0] is 5"),
        (
            "asample",
            SAMPLE | {"prompt": {"chunks": [{"tokens": [10**12]}]}},
            "prompt.chunks[0].tokens has 1000000000000; expected token ids",
        ),
        ("asample", SAMPLE | {"prompt": PROMPT, "sampling_params": []}, "expected an object"),
        (
            "asample",
            SAMPLE | {"prompt": PROMPT, "sampling_params": {"stop": [""]}},
            "sampling_params.stop has ''",
        ),
        (
            "asample",
            SAMPLE | {"prompt": PROMPT, "sampling_params": {"temperature": 2.1}},
            "a temperature of at most 2",
        ),
        ("asample", SAMPLE | {"prompt": PROMPT, "num_samples": 0}, "sampling_params"),
        ("asample", SAMPLE | {"prompt": PROMPT, "seq_id": 10**30}, "beyond 64 bits"),
        ("asample", SAMPLE | {"sampling_session_id": "{model}:99"}, "expected a session of this"),
        ("retrieve_future", {"request_id": "{model}:" + "9" * 300}, "there is no request"),
    )
    for path, body, message in odd:
        if isinstance(body, dict):
            given = usual | {"model_id": model, "seq_id": 2} | body
            body = {k: v.format(model=model) if isinstance(v, str) else v for k, v in given.items()}
        refused = await asked(stack, path, body)
        assert refused.status_code in (404, 422), refused.text
        assert message in refused.json()["detail"], refused.text
    for rest in ("3", "sample:1-1", "sample:../../x", "sample", "x", "-1", ""):
        answer = await asked(stack, "retrieve_future", {"request_id": f"{model}:{rest}"})
        assert answer.status_code == 404, rest


async def test_a_session_says_what_differs_and_lists_what_it_created(stack: Stack) -> None:
    began = await post(stack, "create_session", {"tags": [], "sdk_version": "0.38.0"})
    assert "the loss 'stable_reinforce' is computed as 'cispo'" in began["info_message"]
    assert "warning_message" not in began
    of_project = await post(stack, "create_session", {"project_id": "ours"})
    assert of_project["warning_message"] == "project_id 'ours' is ignored: there are no projects"

    model = await created(stack)
    session = await session_on(stack, base_model="owner/model")
    found = (await stack.http.get("/api/v1/sessions/s")).json()
    assert found == {"training_run_ids": [model], "sampler_ids": [session]}
    refused = await stack.http.get("/api/v1/audit?event_type=all&day=2026-01-01")
    assert (refused.status_code, refused.json()["detail"][:24]) == (422, "there is no audit log; l")


async def test_a_surrogate_of_a_loss_is_told_in_the_models_log_once(stack: Stack) -> None:
    model = await created(stack)
    for number in (1, 2):
        body = call(model, number, loss="stable_reinforce", logprobs=[0, -1], advantages=[0, 1])
        found = await result(stack, await post(stack, "forward_backward", body))
        assert found.metrics["stable_reinforce_computed_as_cispo:max"] == 1.0
    sent = [one.loss.name for one in stack.fakes.operations]
    assert sent == ["cispo", "cispo"]
    told = [event.message for event in await stack.events(model) if event.level == "warning"]
    assert told == [
        "the program's loss 'stable_reinforce' is computed as 'cispo' with ratios bounded by "
        "(0.0, 4.0)"
    ]
