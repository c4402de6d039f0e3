"""Both encodings give back what went in, and token ids are small in msgpack."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import codec
from shared.errors import BadRequest
from shared.wire import Example, Execution

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


def test_a_token_costs_eight_bytes_in_msgpack() -> None:
    def size(count: int) -> int:
        example = Example(
            prompt_token_ids=(),
            token_ids=(151_000,) * count,
            old_logprobs=(-0.123456789,) * count,
            advantage=1.0,
        )
        return len(codec.encode(example, codec.MSGPACK))

    assert size(2000) - size(1000) == 8 * 1000


def test_token_ids_are_little_endian_int32_and_logprobs_float32() -> None:
    example = Example(prompt_token_ids=(1,), token_ids=(258,), old_logprobs=(-0.5,), advantage=0.0)
    data = codec.encode(example, codec.MSGPACK)
    assert struct.pack("<i", 258) in data and struct.pack("<f", -0.5) in data


@pytest.mark.parametrize("media_type", [codec.JSON, codec.MSGPACK])
def test_bytes_that_are_no_body_are_a_bad_request(media_type: str) -> None:
    with pytest.raises(BadRequest):
        codec.decode(Example, b"\xff\xfe{", media_type)


def test_an_unknown_field_is_refused_by_name() -> None:
    body = b'{"prompt_token_ids": [], "token_ids": [], "old_logprobs": [], "advantagee": 1}'
    with pytest.raises(BadRequest, match="unknown key 'advantagee'; did you mean 'advantage"):
        codec.decode(Example, body)


def test_a_number_beyond_64_bits_is_a_sentence() -> None:
    with pytest.raises(BadRequest, match="Execution holds a whole number beyond 64 bits"):
        codec.encode(Execution(verdict="ok", value=10**30), codec.MSGPACK)
