"""Numbers kept as bytes: which bytes, equal to what, refused when, and never made numbers of on the
way."""

from __future__ import annotations

import array
import copy
import json
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from shared.wire import Logprobs, Mask, TokenIds

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
