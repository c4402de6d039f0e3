"""What operations and samples gave, as Tinker's messages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from services.orchestrator.extensions.tinker import messages
from services.orchestrator.extensions.tinker.paths import path_to
from shared.wire import OperationOutcome, ProgramOperation, RolloutGroup, SampleOrder, SavedKind

SAVED: dict[SavedKind, str] = {
    "checkpoint": "save_weights",
    "snapshot": "save_weights_for_sampler",
    "export": "save_weights_external",
}
"""The operations that save something, as the SDK calls them."""

NO_LOGPROB = -99999.0
"""Tinker's log-prob of a place that has none; its token id is 0."""


def forward_backward_output(operation: ProgramOperation, outcome: OperationOutcome) -> bytes:
    """Returns Tinker's message of what a call found: log-probs `[T]` of each datum, or `[T, K]`
    where its tokens have K targets each."""
    message = messages.new("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    examples, begin = iter(operation.examples), 0
    found = np.frombuffer(outcome.logprobs.data, "<f4")
    counts = operation.num_targets or (0,) * len(operation.examples)
    for count, group in itertools.groupby(counts):
        num_targets = count or 1
        arrays: list[bytes] = []
        for _ in group:
            length = len(next(examples).token_ids)
            for _ in range(num_targets - 1):
                next(examples)
            end = begin + num_targets * length
            arrays.append(found[begin:end].reshape(num_targets, length).T.tobytes())
            begin = end
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(arrays)
        field.offsets = np.array([0, *itertools.accumulate(map(len, arrays))], "<i8").tobytes()
        field.dtype = messages.FLOAT32
        if count:
            field.trailing_shape.append(count)
    message.metrics["loss:sum"] = outcome.loss
    return message.SerializeToString()


def json_result(
    model_id: str, number: int, operation: ProgramOperation, outcome: OperationOutcome
) -> dict[str, Any]:
    """Returns Tinker's answer for an operation that gives no tensors."""
    if operation.kind == "optim_step":
        return {"type": "optim_step", "metrics": {"grad_norm:mean": outcome.grad_norm}}
    if operation.saves and operation.name:
        path = path_to(model_id, operation.saves, operation.name)
        return {"type": SAVED[operation.saves], "path": path}
    if operation.kind == "unload":
        return {"type": "unload_model", "model_id": model_id}
    session = f"{model_id}:{number}"
    return {"type": "save_weights_for_sampler", "sampling_session_id": session}


def sample_response(order: SampleOrder, group: RolloutGroup) -> bytes:
    """Returns Tinker's message of samples. Log-probs of the prompt are NaN, or `NO_LOGPROB`, where
    they were not wanted, and of its first token."""
    message = messages.new("SampleResponse")
    for one in group.rollouts:
        sequence = message.sequences.add(
            stop_reason=messages.STOP if one.finish_reason == "stop" else messages.LENGTH,
            tokens=one.token_ids.data,
            logprobs=one.logprobs.data,
        )
        if order.top_logprobs:
            top = (one.top_ids.data, one.top_logprobs.data)
            _write_top(sequence.topk_sampled_logprobs, *top, order.top_logprobs)
    num = len(order.prompt_token_ids)
    first = max(1, num - (order.prompt_logprobs or num))
    if order.prompt_logprobs is not None:
        found = np.full(num, np.nan, "<f4")
        found[first:] = np.frombuffer(group.prompt_logprobs.data, "<f4")[first - 1 :]
        message.prompt_logprobs = found.tobytes()
    if k := order.top_prompt_logprobs:
        ids, logprobs = np.zeros((num, k), "<i4"), np.full((num, k), NO_LOGPROB, "<f4")
        ids[first:] = np.frombuffer(group.prompt_top_ids.data, "<i4").reshape(-1, k)[first - 1 :]
        top = np.frombuffer(group.prompt_top_logprobs.data, "<f4").reshape(-1, k)
        logprobs[first:] = top[first - 1 :]
        _write_top(message.topk_prompt_logprobs, ids.tobytes(), logprobs.tobytes(), k)
    return message.SerializeToString()


def _write_top(message: Any, ids: bytes, logprobs: bytes, k: int) -> None:
    message.token_ids, message.logprobs, message.k = ids, logprobs, k
    message.length = len(ids) // (4 * k)
