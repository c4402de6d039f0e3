"""Tinker's protobuf messages, as far as they are read and written here: names and numbers of the
fields are of `tinker_public.proto` in the package `tinker` 0.38. Fields that are not listed are
skipped when a message is read. And the conversion of outcomes and samples to such messages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from services.orchestrator.extensions.tinker.log import path_to
from shared.wire import OperationOutcome, ProgramOperation, RolloutGroup, SampleOrder, SavedKind

PACKAGE = "tinker_public"

KINDS = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
}

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of `DType`."""

STOP, LENGTH = 0, 1
"""Values of `StopReason`."""

FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    # kinds: a scalar, a message, "*" for repeated, "map " for a map from text
    "Tensor": {"dense": (1, "bytes"), "dtype": (3, "int32"), "shape": (4, "*int64")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Other": {},
    "Chunk": {
        "encoded_text": (1, "EncodedTextChunk"),
        "image": (2, "Other"),
        "dmel": (3, "Other"),
    },
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "*int64"),
    },
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "map BatchedTensor"),
        "num_datums": (3, "int64"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "int32"),
        "length": (4, "int32"),
    },
}


ONE_OF = frozenset({"LossConfigValue"})
"""Messages whose fields are a oneof: `WhichOneof("value")` says which one is set."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="hone_tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        if name in ONE_OF:
            message.oneof_decl.add(name="value")
        for field, (number, kind) in fields.items():
            _add(message, field, number, kind)
            if name in ONE_OF:
                message.field[-1].oneof_index = 0
    return file


def _add(message: Any, name: str, number: int, kind: str) -> None:
    field = descriptor_pb2.FieldDescriptorProto
    repeated = kind.startswith(("*", "map "))
    added = message.field.add(
        name=name,
        number=number,
        label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
    )
    if kind.startswith("map "):
        entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        _add(nested, "key", 1, "string")
        _add(nested, "value", 2, kind.removeprefix("map "))
        added.type = field.TYPE_MESSAGE
        added.type_name = f".{PACKAGE}.{message.name}.{entry}"
        return
    kind = kind.removeprefix("*")
    added.type = KINDS.get(kind, field.TYPE_MESSAGE)
    if kind not in KINDS:
        added.type_name = f".{PACKAGE}.{kind}"


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def new(name: str) -> Any:
    """Returns an empty message of a type in `FIELDS`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))()


def num_fields(body: bytes, name: str, most: int) -> int:
    """Returns how many fields a message of this type and all messages in it have, each byte of a
    list of numbers counted as one. Stops counting at more than `most`, or at bytes that are not a
    message. It parses nothing into objects and lets other threads work. Protobuf does neither: it
    may make a message of every two bytes, and 1.5 KB of zstd may unpack to millions of them."""
    found, waiting = 0, [(0, len(body), name)]
    while waiting:
        at, end, kind = waiting.pop()
        inside = _MESSAGES[kind]
        while at < end:
            found += 1
            if found > most:
                return found
            tag, at = _varint(body, at, end)
            length = 0
            match tag & 7:
                case 0:
                    _, at = _varint(body, at, end)
                case 1:
                    length = 8
                case 2:
                    length, at = _varint(body, at, end)
                case 5:
                    length = 4
                case _:  # the beginning or the end of a group
                    pass
            if tag & 7 == 2 and (part := inside.get(tag >> 3)) in _MESSAGES:
                waiting.append((at, min(at + length, end), str(part)))
            elif tag & 7 == 2 and part:  # numbers, of a byte or more each
                found += length
            at += length
    return found


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns a number, and where it ends; `end` for a number that is cut off."""
    number = shift = 0
    while at < end:
        byte, at = body[at], at + 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift >= MAX_VARINT_BITS:
            break
    return 0, end


MAX_VARINT_BITS = 70


def _messages() -> dict[str, dict[int, str]]:
    """Returns the kinds of the fields of each message that are messages or lists of numbers, by
    number. Of an entry of a map, only `VALUE` may be."""
    found: dict[str, dict[int, str]] = {}
    for name, fields in FIELDS.items():
        inside = found.setdefault(name, {})
        for number, kind in fields.values():
            of_values = kind.removeprefix("map ").removeprefix("*")
            if kind.startswith("map "):
                entry = f"map {of_values}"
                found[entry] = {VALUE: of_values} if of_values in FIELDS else {}
                inside[number] = entry
            elif of_values in FIELDS or kind.startswith("*"):
                inside[number] = of_values
    return found


VALUE = 2
"""The number of the value in an entry of a map."""

_MESSAGES = _messages()


SAVED: dict[SavedKind, str] = {
    "checkpoint": "save_weights",
    "snapshot": "save_weights_for_sampler",
    "export": "save_weights_external",
}
"""The SDK's names of the operations that save weights."""

NO_LOGPROB = -99999.0
"""Tinker's log-prob of a position that has none; its token id is 0."""


def forward_backward_output(operation: ProgramOperation, outcome: OperationOutcome) -> bytes:
    """Returns the outcome of a call as Tinker's message: log-probs `[T]` of each datum, or `[T, K]`
    where its tokens have K targets each."""
    message = new("ForwardBackwardOutput")
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
        field.dtype = FLOAT32
        if count:
            field.trailing_shape.append(count)
    message.metrics["loss:sum"] = outcome.loss
    if operation.loss_name and operation.loss:
        message.metrics[f"{operation.loss_name}_computed_as_{operation.loss.name}:max"] = 1.0
    return message.SerializeToString()


def json_result(
    model_id: str, number: int, operation: ProgramOperation, outcome: OperationOutcome
) -> dict[str, Any]:
    """Returns Tinker's answer for an operation whose outcome has no tensors."""
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
    they were not requested, and for its first token."""
    message = new("SampleResponse")
    for one in group.rollouts:
        sequence = message.sequences.add(
            stop_reason=STOP if one.finish_reason == "stop" else LENGTH,
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
