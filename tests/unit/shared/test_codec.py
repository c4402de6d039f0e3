"""Both encodings give back what went in, and token ids are small in msgpack."""

from __future__ import annotations

import json
import time
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadRequest
from shared.http import codec
from shared.wire import Example, ExecuteRequest, Execution, NoBody, Prompt, ScoreRequest

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
