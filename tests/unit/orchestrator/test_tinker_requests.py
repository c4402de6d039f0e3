"""Tinker's data as examples, and what a call found as Tinker's message."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from services.orchestrator.extensions.tinker import messages, requests
from shared.errors import BadRequest
from shared.wire import Logprobs, OperationOutcome, ProgramOperation, TokenIds


def call(loss: str, *data: dict[str, Any], **config: float) -> bytes:
    """A call of data that read the tokens 5, 6."""
    message = messages.new("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = "m", 1, loss
    for key, value in config.items():
        message.loss_fn_config_v2[key].number = value
    for inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
        for name, values in inputs.items():
            array = np.array(values, "<i8" if name == "target_tokens" else "<f4")
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), 2 if name == "target_tokens" else 1
            tensor.shape.extend(array.shape)
    return bytes(message.SerializeToString())


def read(body: bytes) -> ProgramOperation:
    return requests.read_forward_backward(requests.read_message(body), "digest")


def test_a_datum_with_k_targets_for_each_token_is_k_examples() -> None:
    wide = {"target_tokens": [[1, 2, 3], [4, 0, 0]], "weights": [[0.5, 0.25, 0.25], [1, 0, 0]]}
    plain = {"target_tokens": [6, 7], "weights": [1, 1]}
    operation = read(call("cross_entropy", plain, wide))
    assert operation.num_targets == (0, 3)
    assert [tuple(one.token_ids) for one in operation.examples] == [(6, 7), (1, 4), (2, 0), (3, 0)]
    assert [tuple(one.context_ids) for one in operation.examples] == [(), (6, 4), (6, 0), (6, 0)]
    weights = [tuple(one.advantages) for one in operation.examples[1:]]
    assert weights == [(0.5, 1.0), (0.25, 0.0), (0.25, 0.0)]

    found = OperationOutcome(logprobs=Logprobs([-1, -2, -3, -4, -5, -6, -7, -8]))
    message = messages.new("ForwardBackwardOutput")
    message.ParseFromString(messages.forward_backward_output(operation, found))
    first, second = message.loss_fn_outputs
    field = second.fields["logprobs"]
    assert np.frombuffer(first.fields["logprobs"].data, "<f4").tolist() == [-1, -2]
    assert (field.trailing_shape, second.num_datums) == ([3], 1)
    assert np.frombuffer(field.data, "<f4").reshape(2, 3).tolist() == [[-3, -5, -7], [-4, -6, -8]]
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 24]


def test_one_target_for_each_token_may_have_an_axis_of_its_own() -> None:
    operation = read(call("cross_entropy", {"target_tokens": [[6], [7]], "weights": [[1], [2]]}))
    assert [tuple(one.token_ids) for one in operation.examples] == [(6, 7)]
    message = messages.new("ForwardBackwardOutput")
    found = OperationOutcome(logprobs=Logprobs([-1, -2]))
    message.ParseFromString(messages.forward_backward_output(operation, found))
    assert message.loss_fn_outputs[0].fields["logprobs"].trailing_shape == [1]


RATIOS = {"target_tokens": [6, 7], "logprobs": [-1, -2], "advantages": [0, 3]}
MASKED_OUT = RATIOS | {"sequence_ratio_mask": [0, 0]}
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


@pytest.mark.parametrize(
    ("loss", "datum", "config", "message"),
    [
        ("ppo", RATIOS | {"logprobs": [-1, np.inf]}, {}, "'logprobs' has a value that is not fin"),
        ("ppo", RATIOS | {"advantages": [np.nan, 0]}, {}, "'advantages' has a value that is not"),
        ("sft", RATIOS, {}, "loss_fn is 'sft'; expected one of cross_entropy, importance_sampling"),
        ("gspo", RATIOS, {}, "loss_fn_config has no key; expected clip_low_threshold and clip_hi"),
        ("gspo", MASKED_OUT, CLIPS, "datum 0, 'sequence_ratio_mask' marks no token; expected at"),
        (
            "cross_entropy",
            {"target_tokens": [6, 7], "weights": [1]},
            {},
            "datum 0, 'weights' has the shape (1,), expected (2,)",
        ),
    ],
)
def test_a_call_that_cannot_be_trained_on_is_refused(
    loss: str, datum: dict[str, Any], config: dict[str, float], message: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(message)):
        read(call(loss, datum, **config))


def test_a_forward_pass_of_another_loss_is_refused() -> None:
    message = requests.read_message(call("ppo", RATIOS))
    message.forward_only = True
    with pytest.raises(BadRequest, match="expected 'cross_entropy'"):
        requests.read_forward_backward(message, "digest")


def no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> None:
        raise AssertionError("an object was made of data that are refused")

    monkeypatch.setattr(requests, "_examples", made)


def test_what_data_expand_to_is_bounded_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = {"target_tokens": np.zeros((2, 129)), "weights": np.zeros((2, 129))}
    most = {"target_tokens": np.zeros((2, 128)), "weights": np.zeros((2, 128))}
    assert len(read(call("cross_entropy", most)).examples) == 128
    no_objects(monkeypatch)
    for data, message in (
        ([wide], "datum 0, 'target_tokens' has 129 targets for each token; expected at most 128"),
        (
            [most] * 161,  # 161 x 128 = 20,608
            "'data' has 161 data with 20608 targets together; expected at most 20480 in one call",
        ),
    ):
        with pytest.raises(BadRequest, match=re.escape(message)):
            read(call("cross_entropy", *data))


def test_a_sequence_longer_than_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"target_tokens": [6, 7], "weights": [1, 1]}
    message = requests.read_message(call("cross_entropy", plain))
    assert len(requests.read_forward_backward(message, "digest", 2).examples) == 1
    no_objects(monkeypatch)
    with pytest.raises(BadRequest, match="datum 0 has 2 tokens, and the model holds 1; expected"):
        requests.read_forward_backward(message, "digest", 1)
    prompt = TokenIds((1, 2, 3))
    assert requests.check_prompt(prompt, 4) == prompt
    with pytest.raises(BadRequest, match="the prompt has 3 tokens, and the model holds 3 of"):
        requests.check_prompt(prompt, 3)


@pytest.mark.parametrize("shape", [[1] * 200, [0, 2**60], [2**60, 0], [1, 1, 2]])
def test_a_shape_that_no_array_can_have_is_refused(shape: list[int]) -> None:
    message = requests.read_message(call("cross_entropy", {"target_tokens": [6, 7]}))
    weights = message.data[0].loss_fn_inputs["weights"]
    weights.dtype, weights.dense = 1, b"\0" * 4 * math.prod(shape)
    weights.shape.extend(shape)
    with pytest.raises(BadRequest, match=r"datum 0, 'weights' has a shape of \d+ dimensions up to"):
        requests.read_forward_backward(message, "digest")
    message = requests.read_message(call("cross_entropy", {"target_tokens": [6, 7]}))
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    del targets.shape[:]
    targets.shape.extend(shape)
    targets.dense = b"\0" * 8 * math.prod(shape)
    with pytest.raises(BadRequest, match="'target_tokens' has"):
        requests.read_forward_backward(message, "digest")


def test_bounds_are_compared_with_the_default_of_the_other_one() -> None:
    with pytest.raises(BadRequest, match="expected numbers of 0 or more, and a clip_low_threshold"):
        read(call("ppo", RATIOS, clip_low_threshold=1.5))
    with pytest.raises(BadRequest, match="with loss_fn 'dro'; expected a beta of 0 or more"):
        read(call("dro", RATIOS, beta=-1.0))
    loss = read(call("cispo", RATIOS, clip_low_threshold=1.5)).loss
    assert loss is not None and loss.bounds == (1.5, 4.0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (b"\x12\x030.5", "loss_fn_config has '0.5' for 'beta'; expected a number"),
        (b"", "loss_fn_config has no value for 'beta'; expected a number"),
        (b"\x0d\x00\x00\x00\x3f", "loss_fn_config has no value for 'beta'; expected a number"),
    ],
    ids=["text", "nothing", "a float32 where a double belongs"],
)
def test_a_value_of_the_losss_configuration_that_is_no_number_is_refused(
    entry: bytes, message: str
) -> None:
    body = call("dro", RATIOS) + field(7, field(1, b"beta") + field(2, entry))
    with pytest.raises(BadRequest, match=re.escape(message)):
        read(body)
    number = b"\x09" + np.array(0.25, "<f8").tobytes()
    right = call("dro", RATIOS) + field(7, field(1, b"beta") + field(2, number))
    assert (loss := read(right).loss) is not None and loss.beta == 0.25


def test_stable_reinforce_is_computed_as_cispo_and_the_answer_says_so() -> None:
    named, cispo = read(call("stable_reinforce", RATIOS, kl_coeff=0)), read(call("cispo", RATIOS))
    assert (named.loss, named.examples) == (cispo.loss, cispo.examples)
    assert named.loss is not None and named.loss.bounds == (0.0, 4.0)
    message = messages.new("ForwardBackwardOutput")
    found = OperationOutcome(loss=5.0, logprobs=Logprobs([-1, -2]))
    message.ParseFromString(messages.forward_backward_output(named, found))
    told = {"loss:sum": 5.0, "stable_reinforce_computed_as_cispo:max": 1.0}
    assert dict(message.metrics) == told
    message.ParseFromString(messages.forward_backward_output(cispo, found))
    assert dict(message.metrics) == {"loss:sum": 5.0}
    for key, why in (("kl_coeff", "has the kl_coeff 0.1 with"), ("beta", "has 'beta'; expected")):
        with pytest.raises(BadRequest, match=why):
            read(call("stable_reinforce", RATIOS, **{key: 0.1}))
    with pytest.raises(BadRequest, match="has no 'logprobs', which 'stable_reinforce' needs"):
        read(call("stable_reinforce", {"target_tokens": [6, 7], "advantages": [0, 3]}))


def test_gspo_takes_the_tokens_of_its_ratio_and_its_bounds() -> None:
    datum = RATIOS | {"sequence_ratio_mask": [0, 1]}
    body = call("gspo", datum, clip_low_threshold=0.9997, clip_high_threshold=1.0004)
    operation = read(body)
    (example,) = operation.examples
    assert (tuple(example.ratio_mask), tuple(example.old_logprobs)) == ((0, 1), (-1.0, -2.0))
    loss = operation.loss
    assert loss is not None and (loss.ratio_low, loss.ratio_high) == (0.9997, 1.0004)


PLAIN = {"target_tokens": [6, 7]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: setattr(d.model_input[0].encoded_text, "tokens", b"abc"), "3 bytes of tokens"),
        (
            lambda d: d.loss_fn_inputs["weights"].shape.append(7),
            "has the shape [7] and 8 bytes; expected 28 of float32",
        ),
        (
            lambda d: setattr(d.loss_fn_inputs["weights"], "dense", b"abc"),
            "has 3 bytes; expected a multiple of 4, of float32",
        ),
        (lambda d: setattr(d.loss_fn_inputs["x"], "dense", b"abcd"), "has the input 'x'; expected"),
        (
            lambda d: setattr(
                d.loss_fn_inputs["target_tokens"], "dense", np.array([6, 2**40], "<i8").tobytes()
            ),
            "'target_tokens' has 1.09951e+12; expected token ids",
        ),
        (
            lambda d: d.loss_fn_inputs["target_tokens"].CopyFrom(d.loss_fn_inputs["weights"]),
            "'target_tokens' has dtype float32; expected int64",
        ),
    ],
)
def test_a_damaged_datum_is_named(change: Any, message: str) -> None:
    sent = requests.read_message(call("cross_entropy", PLAIN | {"weights": [1, 1]}))
    sent.data[0].loss_fn_inputs["weights"].ClearField("shape")
    sent.data[0].loss_fn_inputs["x"].dtype = 1
    if "'x'" not in message:
        del sent.data[0].loss_fn_inputs["x"]
    change(sent.data[0])
    with pytest.raises(BadRequest, match="datum 0") as raised:
        requests.read_forward_backward(sent, "digest")
    assert message in raised.value.detail


def field(number: int, content: bytes) -> bytes:
    """A field of protobuf that is a text or a message."""
    length, rest = bytearray(), len(content)
    while rest > 127:
        length.append(rest & 127 | 128)
        rest >>= 7
    return bytes([number << 3 | 2]) + bytes(length) + bytes([rest]) + content


MANY = b"\x0a\x00" * 1100
"""Empty messages, in the fields that are called 1."""


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * 1100,
        field(3, MANY),
        field(3, field(1, MANY)),
        field(3, field(1, field(1, MANY))),
        field(3, b"\x12\x00" * 1100),
        field(3, field(2, field(2, b"\x20\x00" * 1100))),
        field(3, field(2, field(2, field(4, bytes(1100))))),
        b"\x2a\x00" * 1100,
        b"\x78\x00" * 1100,
    ],
)
def test_a_call_of_too_many_fields_is_refused_before_it_is_read(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_FIELDS", 1000)
    with pytest.raises(BadRequest, match="more than 1000 fields"):
        requests.read_message(body)


def test_fields_of_a_usual_call_are_few() -> None:
    body = call("ppo", *[RATIOS] * 1024, clip_low_threshold=0.8)
    found = messages.num_fields(body, "ForwardBackwardRequest", requests.MAX_FIELDS)
    assert 20 * 1024 < found < 30 * 1024
    for wrong in (body[:-3], b"\x1a", b"\x1a\xff\xff\xff\xff\x0f", b"\xff" * 99, b"\x0b\x0c", b""):
        messages.num_fields(wrong, "ForwardBackwardRequest", requests.MAX_FIELDS)
    with pytest.raises(BadRequest, match="more than 1048576 fields"):
        requests.read_message(b"\x1a\x00" * 1_100_000)
    with pytest.raises(BadRequest, match="has 20481 data; expected at most 20480"):
        requests.check_size(requests.read_message(b"\x1a\x00" * 20_481), None)
