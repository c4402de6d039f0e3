"""Converts Tinker's requests to operations of a model, and to jobs. Each function raises
BadRequest, with the key and the value, for a value that it cannot read."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from services.orchestrator.extensions.tinker import messages
from shared.errors import BadRequest
from shared.explain import sentences
from shared.job import ENDLESS, Job, name_of
from shared.job.sampling import MAX_TEMPERATURE
from shared.wire import (
    MAX_TOP,
    RATIO_BOUNDS,
    Example,
    Logprobs,
    Mask,
    Optimization,
    ProgramOperation,
    Sampling,
    TokenIds,
    TokenLoss,
    TokenLossName,
)

LOSSES: tuple[str, ...] = get_args(TokenLossName)

SURROGATES: dict[str, TokenLossName] = {"stable_reinforce": "cispo"}
"""Losses whose formulas Tinker does not publish, with the losses that are computed instead.
`stable_reinforce` is documented as a variant of REINFORCE, whose gradient `cispo` has on-policy. A
datum's spans, which refer to statistics that Tinker recorded when sampling, are not read."""

BOUNDS = {"clip_low_threshold": "ratio_low", "clip_high_threshold": "ratio_high"}

CONFIG = {"ppo": BOUNDS, "cispo": BOUNDS, "gspo": BOUNDS, "dro": {"beta": "beta"}}
"""Tinker's keys of a loss's configuration, and Hone's."""

INPUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LOSSES, *SURROGATES), ("logprobs", "advantages")),
    "cross_entropy": (),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}
"""The inputs that a loss needs beside `target_tokens`."""

WEIGHTS = dict.fromkeys((*LOSSES, *SURROGATES), "advantages") | {"cross_entropy": "weights"}
"""The input by which a loss multiplies its tokens' terms."""

NUMBERS = {messages.FLOAT32: "<f4", messages.INT64: "<i8", messages.INT32: "<i4"}


Kind = type | tuple[type, ...]

KINDS: dict[Kind, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    (int, float): "a number",
}

MAX_NUMBER = 2**63
"""Bound of whole numbers."""


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def field(body: Mapping[str, Any], key: str, kind: Kind, where: str | None = None) -> Any:
    """Returns the value of a key of the `kind`; None if it is missing. Raises BadRequest for any
    other value. `where` is its name in the message."""
    value = body.get(key)
    if value is None:
        return None
    is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not is_kind or (isinstance(value, int) and abs(value) >= MAX_NUMBER):
        raise BadRequest(f"{where or repr(key)}: got {value!r:.80}; expected {KINDS[kind]}")
    return value


def id_of(body: Mapping[str, Any], key: str) -> str:
    """Returns the id under the key. Raises BadRequest without one."""
    found = field(body, key, str)
    if not found:
        raise BadRequest(f"{key!r}: got {found!r}; expected an id from this server")
    return str(found)


@contextlib.contextmanager
def checked(model: type[BaseModel], where: str) -> Iterator[None]:
    """Converts the model's validation errors to BadRequest."""
    try:
        yield
    except ValidationError as error:
        faults = sentences(error, model, where)
        raise BadRequest("; ".join(fault["detail"] for fault in faults)) from error


def _loss(name: str, config: Mapping[str, tuple[str, float]]) -> TokenLoss:
    """Returns the loss. `config` has for each of Hone's keys Tinker's key and the value."""
    given = {"name": name, **{key: value for key, (_, value) in config.items()}}
    try:
        return TokenLoss.model_validate(given)
    except ValidationError as error:
        told = f"loss_fn_config is {dict(config.values())} with loss_fn {name!r}"
        if name == "dro":
            raise BadRequest(f"{told}; expected a beta of 0 or more") from error
        default = f" (by default {RATIO_BOUNDS[name]})" if name in RATIO_BOUNDS else ""
        raise BadRequest(
            f"{told}; expected numbers of 0 or more, and a clip_low_threshold below "
            f"clip_high_threshold{default}"
        ) from error


IGNORED = frozenset({"mask"})
"""Inputs of the cookbook that the server ignores."""


MAX_FIELDS = 1 << 20
"""Most fields of a call, in all its messages: some thirty times `MAX_EXAMPLES`. Protobuf reads them
in a tenth of a second, in which other threads are blocked."""


def read_message(body: bytes) -> Any:
    """Returns the message of a `forward_backward` or `forward`. Raises BadRequest."""
    if messages.num_fields(body, "ForwardBackwardRequest", MAX_FIELDS) > MAX_FIELDS:
        raise BadRequest(
            f"the body has more than {MAX_FIELDS} fields; expected at most {MAX_EXAMPLES} data, "
            "each of a few inputs"
        )
    message = messages.new("ForwardBackwardRequest")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is not a ForwardBackwardRequest: {error}") from error
    return message


MAX_TARGETS = 128
"""Most targets of one token."""

MAX_EXAMPLES = 20_480
"""Most sequences that a call's data may expand to, one for each target: the SDK sends up to 1024
data at a time, which may have 20 targets each."""

MAX_LENGTH = 1 << 20
"""Most tokens of a sequence where the model's length is not known."""


def check_size(message: Any, limit: int | None) -> None:
    """Raises BadRequest for data that expand to too many sequences, or are longer than the model's
    `limit` in tokens. Call it before the data are converted."""
    num_examples = 0
    if len(message.data) > MAX_EXAMPLES:
        raise BadRequest(f"'data' has {len(message.data)} data; expected at most {MAX_EXAMPLES}")
    for at, datum in enumerate(message.data):
        num_tokens = sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input) // 4
        if num_tokens > (limit or MAX_LENGTH):
            raise BadRequest(
                f"datum {at} has {num_tokens} tokens, and the model holds {limit or MAX_LENGTH}; "
                "expected no more"
            )
        inputs = datum.loss_fn_inputs
        shape = inputs["target_tokens"].shape if "target_tokens" in inputs else ()
        num_targets = max(shape[1], 1) if len(shape) == 2 else 1
        if num_targets > MAX_TARGETS:
            raise BadRequest(
                f"datum {at}, 'target_tokens' has {num_targets} targets for each token; expected "
                f"at most {MAX_TARGETS}"
            )
        num_examples += num_targets
    if num_examples > MAX_EXAMPLES:
        raise BadRequest(
            f"'data' has {len(message.data)} data with {num_examples} targets together; expected "
            f"at most {MAX_EXAMPLES} in one call"
        )


def check_prompt(prompt: TokenIds, limit: int | None) -> TokenIds:
    """Returns the prompt. Raises BadRequest if the model's `limit` in tokens leaves none for an
    answer."""
    if len(prompt) >= (limit or MAX_LENGTH):
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens, and the model holds {limit or MAX_LENGTH} of "
            "prompt and samples together; expected fewer"
        )
    return prompt


def read_forward_backward(message: Any, digest: str, limit: int | None = None) -> ProgramOperation:
    """Returns the operation of a message for a model of so many tokens. Raises BadRequest."""
    check_size(message, limit)
    name = message.loss_fn
    if name not in INPUTS:
        raise BadRequest(
            f"loss_fn is {name!r:.80}; expected one of {', '.join(INPUTS)} "
            "(forward_backward_custom works too)"
        )
    if message.forward_only and name != "cross_entropy":
        raise BadRequest(
            f"loss_fn is {name!r} of a forward; expected 'cross_entropy': a forward pass returns "
            "log-probs, and for other losses no value"
        )
    config = _config(message)
    if name in SURROGATES and config.get("kl_coeff") == 0:
        del config["kl_coeff"]
    elif name in SURROGATES and "kl_coeff" in config:
        raise BadRequest(
            f"loss_fn_config has the kl_coeff {config['kl_coeff']:g} with loss_fn {name!r}; "
            "expected 0 or none: Tinker does not publish its meaning"
        )
    known = CONFIG.get(name, {})
    if unknown := sorted(set(config) - set(known)):
        raise BadRequest(
            f"loss_fn_config has {unknown[0]!r:.80}; expected {', '.join(known) or 'no key'} with "
            f"loss_fn {name!r}"
        )
    if not message.data:
        raise BadRequest("'data' is empty; expected at least one datum")
    if name == "gspo" and len(config) < len(BOUNDS):
        raise BadRequest(
            f"loss_fn_config has {', '.join(config) or 'no key'}; expected {' and '.join(BOUNDS)} "
            "with loss_fn 'gspo', for example 0.9997 and 1.0004 (arXiv 2507.18071)"
        )
    loss = _loss(
        SURROGATES.get(name, name), {known[key]: (key, value) for key, value in config.items()}
    )
    data = [_examples(datum, name, at) for at, datum in enumerate(message.data)]
    shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in message.data]
    # K targets of each token for `[T, K]`, 0 for `[T]`
    num_targets = tuple(int(shape[1]) if len(shape) == 2 else 0 for shape in shapes)
    return ProgramOperation(
        kind="forward" if message.forward_only else "forward_backward",
        digest=digest,
        examples=tuple(itertools.chain.from_iterable(data)),
        num_targets=num_targets if any(num_targets) else (),
        loss=loss,
        loss_name=name if name in SURROGATES else "",
    )


def _config(message: Any) -> dict[str, float]:
    """Returns the configuration of the call's loss. Raises BadRequest for a value that is not a
    number, which protobuf would read as 0."""
    for key, one in message.loss_fn_config_v2.items():
        if one.WhichOneof("value") != "number":
            raise BadRequest(
                f"loss_fn_config has {one.text!r:.80} for {key!r:.80}; expected a number"
                if one.WhichOneof("value")
                else f"loss_fn_config has no value for {key!r:.80}; expected a number"
            )
    config = {key: one.number for key, one in message.loss_fn_config_v2.items()}
    return config or dict(message.loss_fn_config.items())


def _examples(datum: Any, loss: str, at: int) -> list[Example]:
    """Returns the datum's examples: one for each target that its tokens have, all with the same
    input tokens."""
    where = f"datum {at}"
    chunks = [chunk for chunk in datum.model_input if chunk.HasField("encoded_text")]
    if len(chunks) < len(datum.model_input):
        raise BadRequest(f"{where} has an image or audio; expected text alone")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    if len(tokens) % 4:
        raise BadRequest(f"{where} has {len(tokens)} bytes of tokens; expected 4 for each token")
    inputs = np.frombuffer(tokens, "<i4")
    given = {name: _array(one, f"{where}, {name!r}") for name, one in datum.loss_fn_inputs.items()}
    if not len(inputs) or "target_tokens" not in given:
        raise BadRequest(
            f"{where} has {len(inputs)} tokens and {', '.join(given) or 'no'} inputs; "
            "expected tokens and 'target_tokens'"
        )
    known = {"target_tokens", *INPUTS[loss], WEIGHTS[loss], *IGNORED}
    if unknown := next((name for name in given if name not in known), None):
        raise BadRequest(
            f"{where} has the input {unknown!r:.80}; expected with {loss!r} "
            f"{', '.join(sorted(known - IGNORED))}"
        )
    given = {name: values for name, values in given.items() if name not in IGNORED}
    shape = inputs.shape
    if loss == "cross_entropy" and given["target_tokens"].ndim == 2:
        shape = (*shape, max(given["target_tokens"].shape[1], 1))
    for name, values in given.items():
        if not np.isfinite(values).all():
            raise BadRequest(f"{where}, {name!r} has a value that is not finite; expected numbers")
        if values.shape != shape:
            raise BadRequest(
                f"{where}, {name!r} has the shape {values.shape}, expected {shape}, one for each "
                "token of model_input"
            )
    if missing := next((name for name in INPUTS[loss] if name not in given), None):
        raise BadRequest(f"{where} has no {missing!r}, which {loss!r} needs")
    targets = given["target_tokens"]
    if targets.dtype.kind != "i":
        raise BadRequest(f"{where}, 'target_tokens' has dtype float32; expected int64")
    if len(bad := targets[(targets < 0) | (targets >= 2**31)]):
        raise BadRequest(f"{where}, 'target_tokens' has {bad[0]:g}; expected token ids")
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


MAX_DIMENSIONS = 2
"""Tokens, and targets of each."""


def _array(tensor: Any, where: str) -> NDArray[Any]:
    if tensor.dtype not in NUMBERS:
        raise BadRequest(
            f"{where} has dtype {tensor.dtype}; expected {messages.FLOAT32} (float32), "
            f"{messages.INT64} (int64) or {messages.INT32} (int32)"
        )
    if not tensor.dense and 0 not in tensor.shape:
        raise BadRequest(f"{where} is sparse; expected a dense tensor")
    kind, shape = NUMBERS[tensor.dtype], tuple(tensor.shape) or (-1,)
    if len(shape) > MAX_DIMENSIONS or max(shape) > len(tensor.dense):
        raise BadRequest(
            f"{where} has a shape of {len(shape)} dimensions up to {max(shape)} and "
            f"{len(tensor.dense)} bytes; expected at most {MAX_DIMENSIONS} dimensions, each within "
            "the values"
        )
    size = len(tensor.dense) // np.dtype(kind).itemsize
    if shape != (-1,) and (min(shape) < 0 or math.prod(shape) != size):
        raise BadRequest(
            f"{where} has the shape {list(shape)} and {len(tensor.dense)} bytes; expected "
            f"{math.prod(shape) * np.dtype(kind).itemsize} of {np.dtype(kind)}"
        )
    if len(tensor.dense) != size * np.dtype(kind).itemsize:
        raise BadRequest(
            f"{where} has {len(tensor.dense)} bytes; expected a multiple of "
            f"{np.dtype(kind).itemsize}, of {np.dtype(kind)}"
        )
    return np.frombuffer(tensor.dense, kind).reshape(shape)


def read_optim_step(body: Mapping[str, Any], digest: str) -> ProgramOperation:
    """Returns the operation. Raises BadRequest."""
    given = field(body, "adam_params", dict)
    if given is None:
        raise BadRequest("'adam_params' is missing; expected AdamW's parameters")
    ours = {OURS.get(name, name): value for name, value in given.items() if value is not None}
    for name in given:
        field(given, name, (int, float), f"adam_params.{name}")
    with checked(Optimization, "adam_params"):
        how = Optimization(**{"learning_rate": 1e-4, **ours})
    return ProgramOperation(kind="optim_step", digest=digest, optimization=how)


OURS = {"grad_clip_norm": "max_grad_norm"}
"""Names of Adam's parameters that differ."""


MAX_TTL_S = 10 * 365 * 86400
"""Ten years, the SDK's limit."""


def read_ttl(body: Mapping[str, Any]) -> float | None:
    """Returns how many seconds saved weights are kept; None: no limit. Raises BadRequest."""
    ttl = field(body, "ttl_seconds", (int, float))
    if ttl is not None and not 1 <= ttl <= MAX_TTL_S:
        raise BadRequest(
            f"'ttl_seconds': got {ttl:g}; expected seconds from 1 to {MAX_TTL_S}, or null"
        )
    return ttl


REFUSED = ("target_prompt_logprobs", "prompt_alt_tokens_k")
"""Keys of a request for samples that are not supported."""


def read_prompt(body: Mapping[str, Any]) -> TokenIds:
    """Returns the prompt's token ids. Raises BadRequest."""
    for key in REFUSED:
        if body.get(key):
            raise BadRequest(f"{key!r} is {body[key]!r:.40}; it is not supported, expected none")
    ids: list[int] = []
    for at, chunk in enumerate(field(field(body, "prompt", dict) or {}, "chunks", list) or []):
        where = f"prompt.chunks[{at}]"
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise BadRequest(f"{where} is {chunk!r:.80}; expected text alone: encoded_text")
        tokens = field(chunk, "tokens", list, f"{where}.tokens") or []
        bad = (one for one in tokens if not _is_token(one))
        if (one := next(bad, None)) is not None or None in tokens:
            raise BadRequest(f"{where}.tokens has {one!r:.40}; expected token ids")
        ids += tokens
    if not ids:
        raise BadRequest("the prompt has no tokens; expected at least one")
    return TokenIds(ids)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def read_prompt_logprobs(body: Mapping[str, Any]) -> int | None:
    """Returns the number of the prompt's last tokens whose log-probs are requested; 0: all; None:
    none."""
    last = field(body, "prompt_logprobs_last_n", int)
    if last is not None and last < 1:
        raise BadRequest(f"'prompt_logprobs_last_n': got {last}; expected 1 or more")
    return (last or 0) if field(body, "prompt_logprobs", bool) else None


def read_top(body: Mapping[str, Any], key: str) -> int:
    """Returns how many of the likeliest tokens are requested. Raises BadRequest."""
    num = field(body, key, int) or 0
    if not 0 <= num <= MAX_TOP:
        raise BadRequest(f"{key!r}: got {num}; expected 0 to {MAX_TOP}")
    return num


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    """Returns the sampling options. Raises BadRequest."""
    given = field(body, "sampling_params", dict) or {}
    stop = given.get("stop")
    stops: Sequence[Any] = stop if isinstance(stop, list) else [] if stop is None else [stop]
    bad = [one for one in stops if not (_is_token(one) or (isinstance(one, str) and one))]
    if bad:
        raise BadRequest(
            f"sampling_params.stop has {bad[0]!r:.40}; expected texts that are not empty, and "
            "token ids"
        )
    numbers = {
        "max_tokens": _number(given, "max_tokens", int, 256),
        "temperature": _number(given, "temperature", (int, float), 1.0),
        "top_p": _number(given, "top_p", (int, float), 1.0),
        "top_k": _number(given, "top_k", int, -1),
        "seed": _number(given, "seed", int),
    }
    if numbers["top_k"] < -1 or numbers["temperature"] > MAX_TEMPERATURE:
        raise BadRequest(
            f"sampling_params has top_k {numbers['top_k']} and temperature "
            f"{numbers['temperature']:g}; expected a top_k of -1 or more, and a temperature of at "
            f"most {MAX_TEMPERATURE:g}"
        )
    num = field(body, "num_samples", int)
    with checked(Sampling, "sampling_params"):
        return Sampling(
            n=1 if num is None else num,
            stop=tuple(one for one in stops if isinstance(one, str)),
            stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
            **numbers | {"top_k": max(numbers["top_k"], 0)},
        )


def _number(given: Mapping[str, Any], name: str, kind: Kind, default: Any = None) -> Any:
    found = field(given, name, kind, f"sampling_params.{name}")
    return default if found is None else found


ALPHA = 32.0
"""LoRA's alpha for every rank, as in Tinker."""


def job_document(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the job of a new model. Raises BadRequest for unsupported values."""
    lora = field(body, "lora_config", dict)
    optimizer = (field(body, "optimizer_config", dict) or {}).get("type", "adamw")
    if optimizer != "adamw":
        raise BadRequest(f"optimizer_config.type is {optimizer!r:.80}; expected 'adamw'")
    base = field(body, "base_model", str)
    if not base:
        raise BadRequest(f"'base_model': got {base!r}; expected a model's folder or id")
    document: dict[str, Any] = {
        "name": name_of(base.rstrip("/").rpartition("/")[2], "program"),
        "model": base,
        "steps": ENDLESS,
        "rewards": [],
        "training": {"objective": "program"},
    }
    if lora is not None:
        rank = field(lora, "rank", int, "lora_config.rank")
        if rank is None:
            raise BadRequest(
                "lora_config.rank is missing; expected a whole number, or no lora_config, which "
                "trains all weights"
            )
        document["lora"] = {"rank": rank, "alpha": ALPHA}
        document["seed"] = field(lora, "seed", int, "lora_config.seed") or 0
    return document


def loaded_document(body: Mapping[str, Any], source: Job, checkpoint: str) -> dict[str, Any]:
    """Returns the job of a new model that begins with a checkpoint of `source`. Raises BadRequest
    for unsupported values."""
    base = field(body, "base_model", str)
    if base is not None and base != source.model:
        raise BadRequest(
            f"'base_model': got {base!r:.200}, expected {source.model!r}, the checkpoint's"
        )
    document = source.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    training = {
        "start_from": checkpoint,
        "start_optimizer": field(body, "optimizer", bool) or False,
    }
    return document | {"training": document.get("training", {}) | training}


def sampler_document(body: Mapping[str, Any], source: Job | None = None) -> dict[str, Any]:
    """Returns the job of a model that only samples: the base model, or snapshots of `source`."""
    if source is None:
        return job_document({**body, "lora_config": {"rank": SAMPLER_RANK}})
    document = source.model_dump(mode="json", exclude_unset=True, exclude={"metadata"})
    return document | {"training": {"objective": "program"}}


SAMPLER_RANK = 32
"""The rank of the adapter, which stays unused, of a model that samples the base model."""

MODEL = "tinker_model"
"""The name, in a job's metadata, of the id that the SDK generates for a model."""

TRAIN = ":train:"
"""The separator in that id between the session and the model's number there."""


MAX_SESSION_CHARS = 200
"""Most characters of the id of a session of the SDK."""


def creation_key(body: Mapping[str, Any], number: str) -> str:
    """Returns the SDK's session and a number in it as one text, which identifies the model or
    session that the SDK creates. Raises BadRequest if one is missing."""
    session, place = field(body, "session_id", str), field(body, number, int)
    if not session or len(session) > MAX_SESSION_CHARS or place is None:
        raise BadRequest(
            f"'session_id' is {session!r:.80} and {number!r} {place!r}; expected both: the same "
            "two name the same model or session (session_id has at most "
            f"{MAX_SESSION_CHARS} characters)"
        )
    return f"{session}:{place}"


def program_of(metadata: Mapping[str, str]) -> str:
    """Returns the SDK's session that created the model with this metadata; "" without one."""
    return metadata.get(MODEL, "").rpartition(TRAIN)[0]


def adapter_of(job: Job) -> dict[str, Any]:
    """Returns Tinker's description of a model's adapter."""
    return {"is_lora": job.lora is not None, "lora_rank": job.lora.rank if job.lora else None}


def metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metadata of a model's job: the program's own, and the SDK's id."""
    given = field(body, "user_metadata", dict) or {}
    own = {str(name)[:64]: str(value)[:512] for name, value in [*given.items()][:15]}
    session, _, number = creation_key(body, "model_seq_id").rpartition(":")
    return own | {MODEL: f"{session}{TRAIN}{number}"}
