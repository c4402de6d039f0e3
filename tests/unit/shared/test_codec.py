"""Both encodings give back what went in, and token ids are small in msgpack. Numbers kept as bytes:
which bytes, equal to what, refused when, and never made numbers of on the way."""

from __future__ import annotations

import array
import copy
import json
import pickle
import struct
import time
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from shared.errors import BadRequest
from shared.http import codec
from shared.wire import (
    Example,
    ExecuteRequest,
    Execution,
    Logprobs,
    Mask,
    NoBody,
    Prompt,
    ScoreRequest,
    TokenIds,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)
logprobs = st.lists(st.floats(-100, 0, width=32), max_size=40).map(tuple)


@given(prompt=token_ids, tokens=token_ids, old=logprobs, advantage=st.floats(-10, 10))
def test_an_example_survives_both_encodings(
    prompt: tuple[int, ...], tokens: tuple[int, ...], old: tuple[float, ...], advantage: float
) -> None:
    example = Example(
        prompt_token_ids=prompt, token_ids=tokens, old_logprobs=old, advantage=advantage
    )
    for media_type in (codec.JSON, codec.MSGPACK):
        assert codec.decode(Example, codec.encode(example, media_type), media_type) == example


@pytest.mark.parametrize("media_type", [codec.JSON, codec.MSGPACK])
def test_bytes_that_are_no_body_are_a_bad_request(media_type: str) -> None:
    with pytest.raises(BadRequest):
        codec.decode(Example, b"\xff\xfe{", media_type)


def test_why_bytes_are_no_msgpack_is_never_empty() -> None:
    with pytest.raises(BadRequest, match=r"a body of 1 bytes is not valid .*: FormatError$"):
        codec.decode(NoBody, b"\xc1", codec.MSGPACK)


def test_a_body_without_keys_lists_none() -> None:
    with pytest.raises(BadRequest, match=r"^unknown key 'x'; there are no valid keys$"):
        codec.decode(NoBody, b'{"x": 1}')


@pytest.mark.parametrize(
    ("depth", "media_type"), [(300, codec.JSON), (5000, codec.JSON), (5000, codec.MSGPACK)]
)
def test_what_is_nested_too_deep_is_a_sentence(depth: int, media_type: str) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    with pytest.raises(BadRequest, match="Prompt cannot be sent, perhaps because it is nested too"):
        codec.encode(Prompt.model_construct(index=0, content="", row={"a": value}), media_type)


def test_half_of_a_surrogate_pair_is_a_sentence() -> None:
    with pytest.raises(BadRequest, match=r"Prompt holds '\\ud800', half of a surrogate pair"):
        codec.encode(Prompt(index=0, content="a\ud800", row={}), codec.MSGPACK)


def test_a_number_beyond_64_bits_is_a_sentence() -> None:
    with pytest.raises(BadRequest, match="Execution holds a whole number beyond 64 bits"):
        codec.encode(Execution(verdict="ok", value=10**30), codec.MSGPACK)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": b"bytes"}, "'inputs.a': got b'bytes'; expected plain data"),
        ({"a": [1, {"b": msgpack.Timestamp(1)}]}, "'inputs.a': got .* expected plain data"),
        ({"a": msgpack.ExtType(5, b"x")}, "'inputs.a': got .* expected plain data"),
        ({"a": {1: 2}}, "'inputs.a': got {1: 2}; expected plain data"),
        ({7: 2}, "'inputs.7"),
    ],
)
def test_what_json_could_not_hold_is_no_plain_data(inputs: Any, message: str) -> None:
    packed: Any = msgpack.packb({"code": "x = 1", "inputs": inputs})
    with pytest.raises(BadRequest, match=message):
        codec.decode(ExecuteRequest, packed, codec.MSGPACK)


def test_plain_data_of_any_depth_that_json_may_have_is_taken() -> None:
    inputs: dict[str, Any] = {"a": [None, True, 1, -(2**63), 2**64 - 1, 1.5, "é", {"b": {"c": []}}]}
    packed: Any = msgpack.packb({"inputs": inputs})
    assert codec.decode(ExecuteRequest, packed, codec.MSGPACK).inputs == inputs
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    packed = msgpack.packb({"inputs": {"a": deep}})
    assert codec.decode(ExecuteRequest, packed, codec.MSGPACK).inputs == {"a": deep}


@pytest.mark.parametrize("key", [b"\x91\x01", b"\x81\x01\x02"], ids=["a list", "a table"])
def test_a_list_or_a_table_as_a_key_is_a_sentence(key: bytes) -> None:
    with pytest.raises(BadRequest, match="a key of a table is a list or a table"):
        codec.decode(ExecuteRequest, b"\x81" + key + b"\x01", codec.MSGPACK)


def test_of_many_faults_the_first_are_told_in_little_time() -> None:
    rewards = [{"grader": "length"}]
    unknown = {f"k{number}": 1 for number in range(100_000)}
    bodies: list[tuple[dict[str, Any], str]] = [
        (unknown | {"items": []}, "100000 faults, too many to list"),
        (
            {f"k{n}": 1 for n in range(50)} | {"items": []},
            "unknown key 'k19'.*; and 30 more faults",
        ),
        ({"items": [{}] * 100_000}, "^'items.0.prompt' is missing.*'items.0.completion' [^;]*$"),
        (
            {"items": [{"prompt": "", "completion": ""}] * 4097},
            "expected at most 4096 in the list, not 4097",
        ),
        ({"items": "x" * 10_000_000}, r"'items': got 'x+\.\.\.x*; expected a list|\.\.\."),
        ({"items": [], "k" * 1_000_000: 1}, "unknown key 'k{80}'"),
    ]
    start = time.process_time()
    for body, message in bodies:
        with pytest.raises(BadRequest, match=message) as raised:
            codec.decode(ScoreRequest, json.dumps(body | {"rewards": rewards}).encode())
        assert len(raised.value.detail) < 10_000 and len(raised.value.errors) <= 21
    assert time.process_time() - start < 3


INT32 = st.integers(-(2**31), 2**31 - 1)


class Body(BaseModel):
    ids: TokenIds = TokenIds()
    logprobs: Logprobs = Logprobs()
    mask: Mask = Mask()


def test_bytes_are_little_endian_and_of_the_stated_width() -> None:
    assert TokenIds([1, -2]).data == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert Logprobs([-0.5]).data == struct.pack("<f", -0.5)
    assert Mask([1, 0]).data == b"\x01\0"


@given(st.lists(INT32))
def test_what_goes_in_comes_out(numbers: list[int]) -> None:
    packed = TokenIds(numbers)
    assert list(packed) == numbers
    assert packed == numbers == list(TokenIds(packed.data))
    assert packed.data == struct.pack(f"<{len(numbers)}i", *numbers)


@given(st.lists(INT32, min_size=1), st.slices(8))
def test_it_is_indexed_and_sliced_as_a_tuple_is(numbers: list[int], part: slice) -> None:
    packed = TokenIds(numbers)
    assert packed[part] == tuple(numbers)[part]
    assert (packed[0], packed[-1], len(packed)) == (numbers[0], numbers[-1], len(numbers))


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (TokenIds, [2**31]),
        (TokenIds, [1.5]),
        (TokenIds, ["1"]),
        (TokenIds, [None]),
        (Mask, [256]),
        (Mask, [-1]),
        (Logprobs, ["x"]),
    ],
)
def test_what_does_not_fit_is_refused(kind: type[Any], numbers: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"expected numbers that fit into (int32|uint8|float32)"):
        kind(numbers)


def test_bytes_that_are_no_whole_number_of_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes are not a whole number of entries of 4 bytes"):
        TokenIds(b"12345")


def test_it_equals_sequences_of_the_same_numbers_and_nothing_else() -> None:
    assert TokenIds([1, 2]) == [1, 2] == TokenIds([1, 2])
    assert TokenIds([1, 2]) == (1, 2)
    assert TokenIds([1, 2]) != [2, 1]
    assert TokenIds([1]) != ["1"]
    assert TokenIds([1]) != Mask([1])
    assert Logprobs([0.1]) == [0.1]  # both are rounded to float32
    assert len({TokenIds([1, 2]), TokenIds((1, 2))}) == 1


def test_it_survives_copies_and_processes() -> None:
    packed = Logprobs([-1.0, -2.0])
    assert pickle.loads(pickle.dumps(packed)) == packed == copy.deepcopy(packed)


def test_a_body_carries_lists_as_json_and_bytes_when_packed() -> None:
    body = Body(ids=TokenIds([1, 2]), logprobs=Logprobs([-0.5]), mask=Mask([1]))
    assert json.loads(body.model_dump_json()) == {"ids": [1, 2], "logprobs": [-0.5], "mask": [1]}
    packed = body.model_dump(context={"packed": True})
    assert packed["ids"] == b"\x01\0\0\0\x02\0\0\0"
    assert Body.model_validate(packed) == body == Body.model_validate_json(body.model_dump_json())


def test_bytes_pass_through_a_body_without_a_copy() -> None:
    data = array.array("i", range(1000)).tobytes()
    body = Body.model_validate({"ids": data})
    assert body.ids.data is data
    assert body.model_dump(context={"packed": True})["ids"] is data


@pytest.mark.parametrize("numbers", [[float("nan")], [float("-inf")], [1e39], "12", 5, {"a": 1}])
def test_a_body_refuses_what_is_no_list_of_finite_numbers(numbers: Any) -> None:
    with pytest.raises(ValidationError, match=r"expected (finite numbers only|a list of numbers)"):
        Body.model_validate({"logprobs": numbers})


def test_bytes_may_hold_what_is_not_finite_for_the_trainer_to_judge() -> None:
    nan = struct.pack("<f", float("nan"))
    assert Body.model_validate({"logprobs": nan}).logprobs.data == nan


def test_openapi_says_that_it_is_a_list() -> None:
    assert Body.model_json_schema()["properties"]["ids"]["items"] == {"type": "integer"}
