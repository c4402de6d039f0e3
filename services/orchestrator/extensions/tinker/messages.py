"""Tinker's protobuf messages, as far as they are read and written here: names and numbers of the
fields are of `tinker_public.proto` in the package `tinker` 0.38. Fields that are not listed are
skipped when a message is read."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
    # kinds: a scalar, a message, "*" for repeated, "map " to a kind by text
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


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="hone_tinker.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add(message, field, number, kind)
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
