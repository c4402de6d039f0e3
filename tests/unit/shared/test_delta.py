"""Packed differences: exactly the bits that changed, harmless when applied again."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shared.errors import Failed
from shared.weights import delta

UNSIGNED = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


@st.composite
def versions(draw: st.DrawFn) -> tuple[delta.Array, delta.Array]:
    """Two versions of a tensor, of which few elements differ."""
    old = draw(arrays.arrays(draw(UNSIGNED), st.integers(0, 300)))
    new = old.copy()
    for position in draw(st.lists(st.integers(0, max(len(old) - 1, 0)), max_size=20)):
        if len(old):
            new[position] ^= draw(st.integers(1, 255))
    return old, new


@given(versions())
def test_a_delta_makes_the_old_version_the_new_one_once_and_twice(
    pair: tuple[delta.Array, delta.Array],
) -> None:
    old, new = pair
    frame, count = delta.pack(old, new)
    into = old.copy()
    assert (delta.apply(frame, into), count) == (count, int((old != new).sum()))
    assert np.array_equal(into, new)
    delta.apply(frame, into)
    assert np.array_equal(into, new)


def test_bits_are_compared_and_not_values() -> None:
    zero, other = np.float32([0.0, np.nan]), np.float32([-0.0, np.nan])
    old, new = (delta.elements(values.tobytes(), "F32") for values in (zero, other))
    assert delta.pack(old, new)[1] == 1  # -0 is 0 and no number is NaN, but their bits say more


def test_few_changes_take_few_bytes() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 1_000_000, dtype=np.uint16)
    new = old.copy()
    new[random.choice(len(old), 10_000, replace=False)] ^= 1
    frame, count = delta.pack(old, new)
    assert count == 10_000
    assert len(frame) < 10_000 * 4  # a byte or so for each gap, two for each random value


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda frame: frame[:-1], "cannot be unpacked"),
        (lambda frame: b"no frame", "cannot be unpacked"),
        (lambda _: zstandard.compress(bytes(10_000)), "a delta of 10000 bytes, expected 8 to 56"),
        (lambda _: zstandard.compress(bytes(20)), "a delta of 0 elements has 20 bytes"),
    ],
)
def test_a_damaged_frame_changes_nothing(damage, message: str) -> None:
    old = np.arange(8, dtype=np.uint16)
    frame, _ = delta.pack(old, old + 1)
    into = old.copy()
    with pytest.raises(Failed, match=message):
        delta.apply(damage(frame), into)
    assert np.array_equal(into, old)


def test_a_frame_of_a_longer_tensor_is_refused() -> None:
    old = np.zeros(100, np.uint16)
    new = old.copy()
    new[99] = 1
    with pytest.raises(Failed, match="changes element 99 of 50"):
        delta.apply(delta.pack(old, new)[0], np.zeros(50, np.uint16))


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(Failed, match="dtype 'F4'"):
        delta.elements(b"", "F4")
