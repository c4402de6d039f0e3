"""Tinker's requests as operations of a model, and what they did in Tinker's shape."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import ValidationError

from services.orchestrator.tinker import messages
from shared.errors import BadRequest
from shared.job import ENDLESS, Job, name_of
from shared.wire import (
    MAX_TOP,
    Example,
    OperationOutcome,
    Optimization,
    ProgramOperation,
    RolloutGroup,
    SampleOrder,
    Sampling,
    TokenLoss,
)
from shared.wire.packed import Logprobs, Mask, TokenIds

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")

BOUNDS = {"clip_low_threshold": "ratio_low", "clip_high_threshold": "ratio_high"}

CONFIG = {"ppo": BOUNDS, "cispo": BOUNDS, "gspo": BOUNDS, "dro": {"beta": "beta"}}
"""Tinker's keys of a loss's configuration, and ours."""

INPUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LOSSES[1:], ("logprobs", "advantages")),
    "cross_entropy": (),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}
"""What a loss needs beside `target_tokens`."""

WEIGHTS = dict.fromkeys(LOSSES, "advantages") | {"cross_entropy": "weights"}
"""What a loss multiplies its tokens by."""

ALPHA = 32.0
"""LoRA's alpha, whatever the rank: Tinker's."""

NUMBERS = {messages.FLOAT32: "<f4", messages.INT64: "<i8", messages.INT32: "<i4"}


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def job_document(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job of a new model. Raises BadRequest for what is not supported."""
    lora = body.get("lora_config")
    optimizer = (body.get("optimizer_config") or {}).get("type", "adamw")
    if optimizer != "adamw":
        raise BadRequest(f"optimizer_config.type is {optimizer!r}; expected 'adamw'")
    base = body.get("base_model")
    if not isinstance(base, str) or not base:
        raise BadRequest(f"'base_model': got {base!r}; expected a model's folder or id")
    document: dict[str, Any] = {
        "name": name_of(base.rstrip("/").rpartition("/")[2], "program"),
        "model": base,
        "steps": ENDLESS,
        "rewards": [],
        "training": {"objective": "program"},
        "metadata": _metadata(body),
    }
    if lora:
        document["lora"] = {"rank": lora.get("rank"), "alpha": ALPHA}
        document["seed"] = lora.get("seed") or 0
    return document


def loaded_document(body: Mapping[str, Any], source: Job, checkpoint: str) -> dict[str, Any]:
    """Returns the job of a new model that begins with a checkpoint of `source`. Raises BadRequest
    for what is not supported."""
    base = body.get("base_model")
    if base is not None and base != source.model:
        raise BadRequest(
            f"'base_model': got {base!r:.200}, expected {source.model!r}, the checkpoint's"
        )
    document = source.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    training = {"start_from": checkpoint, "start_optimizer": body.get("optimizer") is True}
    return document | {
        "training": document.get("training", {}) | training,
        "metadata": _metadata(body),
    }


def sampler_document(body: Mapping[str, Any], source: Job | None = None) -> dict[str, Any]:
    """Returns the job of a model that only samples: the base model, or snapshots of `source`."""
    if source is None:
        document = job_document({**body, "lora_config": {"rank": SAMPLER_RANK}})
        return document | {"metadata": {}}
    document = source.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    return document | {"training": {"objective": "program"}}


SAMPLER_RANK = 32
"""The rank of the adapter, which stays unused, of a model that samples the base model."""

MODEL = "tinker_model"
"""The name, in a job's metadata, of the id that the SDK gives a model by itself."""


def model_id_of(body: Mapping[str, Any]) -> str:
    """Returns the id that the SDK gives the model that it creates."""
    return f"{body.get('session_id')}:train:{body.get('model_seq_id')}"


def _metadata(body: Mapping[str, Any]) -> dict[str, str]:
    given = body.get("user_metadata") or {}
    own = {str(name)[:64]: str(value)[:512] for name, value in [*given.items()][:15]}
    return own | {MODEL: model_id_of(body)[:512]}


def read_forward_backward(body: bytes) -> tuple[str, int, ProgramOperation]:
    """Returns the model, the operation's number and the operation. Raises BadRequest."""
    message = messages.new("ForwardBackwardRequest")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    name = message.loss_fn
    if name not in LOSSES:
        raise BadRequest(
            f"loss_fn is {name!r}; expected one of {', '.join(LOSSES)} (forward_backward_custom "
            "works too)"
        )
    config = {key: one.number for key, one in message.loss_fn_config_v2.items()}
    config = config or dict(message.loss_fn_config.items())
    known = CONFIG.get(name, {})
    if unknown := sorted(set(config) - set(known)):
        raise BadRequest(
            f"loss_fn_config has {unknown[0]!r}; expected {', '.join(known) or 'no key'} with "
            f"loss_fn {name!r}"
        )
    if message.forward_only and name != "cross_entropy":
        raise BadRequest(
            f"loss_fn is {name!r} of a forward; expected 'cross_entropy': a forward pass gives "
            "log-probs, and of other losses no sum"
        )
    if not message.data:
        raise BadRequest("'data' is empty; expected at least one datum")
    if name == "gspo" and len(config) < len(BOUNDS):
        raise BadRequest(
            f"loss_fn_config has {', '.join(config) or 'no key'}; expected {' and '.join(BOUNDS)} "
            "with loss_fn 'gspo', for example 0.9997 and 1.0004 (arXiv 2507.18071)"
        )
    try:
        loss = TokenLoss(name=name, **{known[key]: value for key, value in config.items()})
    except ValidationError as error:
        raise BadRequest(f"loss_fn_config: {error.errors()[0]['msg']}; got {config}") from error
    data = [_examples(datum, name, at) for at, datum in enumerate(message.data)]
    operation = ProgramOperation(
        kind="forward" if message.forward_only else "forward_backward",
        digest=digest(body),
        examples=tuple(itertools.chain.from_iterable(data)),
        num_targets=tuple(map(len, data)) if max(map(len, data)) > 1 else (),
        loss=loss,
    )
    return message.model_id, message.seq_id, operation


def _examples(datum: Any, loss: str, at: int) -> list[Example]:
    """Returns the datum's examples: one for each target that its tokens have. They read the same
    tokens."""
    where = f"datum {at}"
    chunks = [chunk for chunk in datum.model_input if chunk.HasField("encoded_text")]
    if len(chunks) < len(datum.model_input):
        raise BadRequest(f"{where} has an image or audio; expected text alone")
    inputs = np.concatenate(
        [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in chunks]
        or [np.zeros(0, "<i4")]
    )
    given = {name: _array(one, f"{where}, {name!r}") for name, one in datum.loss_fn_inputs.items()}
    if not len(inputs) or "target_tokens" not in given:
        raise BadRequest(
            f"{where} has {len(inputs)} tokens and {', '.join(given) or 'no'} inputs; "
            "expected tokens and 'target_tokens'"
        )
    shape = inputs.shape
    if loss == "cross_entropy" and given["target_tokens"].ndim == 2:
        shape = (*shape, max(given["target_tokens"].shape[1], 1))
    for name, values in given.items():
        if values.shape != shape:
            raise BadRequest(
                f"{where}, {name!r} has the shape {values.shape}, expected {shape}, one for each "
                "token of model_input"
            )
    if missing := next((name for name in INPUTS[loss] if name not in given), None):
        raise BadRequest(f"{where} has no {missing!r}, which {loss!r} needs")
    if loss == "gspo" and not given["sequence_ratio_mask"].any():
        raise BadRequest(f"{where}, 'sequence_ratio_mask' marks no token; expected at least one")
    if len(shape) == 1:
        return [_example(inputs, given, loss)]
    of_each = ({name: values[:, k] for name, values in given.items()} for k in range(shape[1]))
    return [_example(inputs, one, loss) for one in of_each]


def _example(inputs: NDArray[Any], given: Mapping[str, NDArray[Any]], loss: str) -> Example:
    targets = given["target_tokens"].astype("<i4")
    is_moved = (targets[:-1] == inputs[1:]).all()
    read = np.append(inputs[1:], targets[-1:]).astype("<i4")
    of_tokens = given.get(WEIGHTS[loss], np.ones(len(inputs))).astype("<f4")
    old = given["logprobs"].astype("<f4") if "logprobs" in INPUTS[loss] else np.zeros(0, "<f4")
    marked = given["sequence_ratio_mask"] != 0 if loss == "gspo" else np.zeros(0)
    return Example(
        prompt_token_ids=TokenIds(inputs[:1].astype("<i4").tobytes()),
        token_ids=TokenIds(targets.tobytes()),
        context_ids=TokenIds() if is_moved else TokenIds(read.tobytes()),
        ratio_mask=Mask(marked.astype("u1").tobytes()),
        old_logprobs=Logprobs(old.tobytes()),
        advantage=1.0,
        advantages=Logprobs(of_tokens.tobytes()),
    )


def _array(tensor: Any, where: str) -> NDArray[Any]:
    if tensor.dtype not in NUMBERS:
        raise BadRequest(f"{where} has dtype {tensor.dtype}; expected float32 or int64")
    if not tensor.dense and 0 not in tensor.shape:
        raise BadRequest(f"{where} is sparse; expected a dense tensor")
    values = np.frombuffer(tensor.dense, NUMBERS[tensor.dtype])
    return values.reshape(tuple(tensor.shape)) if tensor.shape else values


def read_optim_step(body: Mapping[str, Any], digest: str) -> ProgramOperation:
    """Returns the operation. Raises BadRequest."""
    if "adam_params" not in body:
        raise BadRequest("'adam_params' is missing; expected AdamW's parameters")
    given = {**body["adam_params"]}
    how = Optimization(
        learning_rate=given.pop("learning_rate", 1e-4),
        max_grad_norm=given.pop("grad_clip_norm", 0.0),
        **given,
    )
    return ProgramOperation(kind="optim_step", digest=digest, optimization=how)


def forward_backward_output(operation: ProgramOperation, outcome: OperationOutcome) -> bytes:
    """Returns Tinker's message of what a call found: log-probs `[N]` of each datum, or `[N, K]`
    where its tokens have K targets each."""
    message = messages.new("ForwardBackwardOutput")
    message.loss_fn_output_type = "ArrayRecord"
    examples, begin = iter(operation.examples), 0
    found = np.frombuffer(outcome.logprobs.data, "<f4")
    counts = operation.num_targets or (1,) * len(operation.examples)
    for num_targets, group in itertools.groupby(counts):
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
        if num_targets > 1:
            field.trailing_shape.append(num_targets)
    message.metrics["loss:sum"] = outcome.loss
    return message.SerializeToString()


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


NO_LOGPROB = -99999.0
"""Tinker's log-prob of a place that has none; its token id is 0."""


def _write_top(message: Any, ids: bytes, logprobs: bytes, k: int) -> None:
    message.token_ids, message.logprobs, message.k = ids, logprobs, k
    message.length = len(ids) // (4 * k)


REFUSED = ("target_prompt_logprobs", "prompt_alt_tokens_k")
"""Keys of a request for samples that are not supported."""


def read_prompt(body: Mapping[str, Any]) -> TokenIds:
    """Returns the prompt's token ids. Raises BadRequest."""
    for key in REFUSED:
        if body.get(key):
            raise BadRequest(f"{key!r} is {body[key]!r}; it is not supported, expected none")
    chunks = (body.get("prompt") or {}).get("chunks") or []
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise BadRequest("the prompt has an image or audio; expected text alone")
    ids = [id for chunk in chunks for id in chunk.get("tokens", ())]
    if not ids:
        raise BadRequest("the prompt has no tokens; expected at least one")
    return TokenIds(ids)


def read_prompt_logprobs(body: Mapping[str, Any]) -> int | None:
    """Returns for how many of the prompt's last tokens log-probs are wanted; 0: for all; None: for
    none."""
    return (body.get("prompt_logprobs_last_n") or 0) if body.get("prompt_logprobs") else None


def read_top(body: Mapping[str, Any], key: str) -> int:
    """Returns how many of the likeliest tokens are wanted. Raises BadRequest."""
    num = body.get(key) or 0
    if not isinstance(num, int) or not 0 <= num <= MAX_TOP:
        raise BadRequest(f"{key!r}: got {num!r:.40}; expected 0 to {MAX_TOP}")
    return num


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    """Returns how to sample. Raises BadRequest."""
    given = body.get("sampling_params") or {}
    stop = given.get("stop")
    stops: Sequence[Any] = [stop] if isinstance(stop, str) else stop or []
    known = {
        "max_tokens": given.get("max_tokens") or 256,
        "temperature": given.get("temperature", 1.0),
        "top_p": given.get("top_p", 1.0),
        "top_k": max(given.get("top_k", -1), 0),
        "seed": given.get("seed"),
    }
    return Sampling(
        n=body.get("num_samples") or 1,
        stop=tuple(one for one in stops if isinstance(one, str)),
        stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
        **known,
    )
