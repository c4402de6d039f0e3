"""The canonical digest: by hand, independent of files, and clear about files that are not whole.
And packed differences: exactly the bits that changed, harmless when applied again."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import save_file

from shared.errors import Failed
from shared.weights import delta
from shared.weights.folders import digest, digest_of, digest_of_file, stored_tensors, tensor_digests
from tests.support.safetensors_files import safetensors


def xxh3(data: bytes) -> str:
    return f"xxh3-{xxhash.xxh3_128_hexdigest(data)}"


def test_a_digest_is_of_names_dtypes_shapes_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(b=b"xyz", a=b""))
    (tmp_path / "other.safetensors").write_bytes(safetensors())  # no tensor at all is right too
    tensors = tensor_digests(stored_tensors(tmp_path))
    assert tensors == {"a": xxh3(b"U8\0[0]\0"), "b": xxh3(b"U8\0[3]\0xyz")}
    assert digest(tensors) == xxh3(f"a\0{tensors['a']}\nb\0{tensors['b']}\n".encode())


def test_it_is_the_same_however_tensors_are_spread_over_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    a, b = np.arange(5000, dtype=np.float32), np.ones((3, 2), np.int64)
    save_file({"a": a, "b": b}, one / "model.safetensors", metadata={"format": "pt"})
    save_file({"b": b}, two / "1.safetensors")
    save_file({"a": a}, two / "2.safetensors")
    (two / "config.json").write_bytes(b"not counted")
    assert digest_of(one) == digest_of(two)
    tensor = stored_tensors(one)["a"]
    assert (tensor.dtype, tensor.shape, tensor.size_bytes) == ("F32", (5000,), 20_000)


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "byte"])
def test_it_is_another_one_if_anything_of_a_tensor_is(tmp_path: Path, change: str) -> None:
    before = {"a": np.zeros((2, 2), np.float32)}
    after = {
        "name": {"b": np.zeros((2, 2), np.float32)},
        "dtype": {"a": np.zeros((2, 2), np.int32)},
        "shape": {"a": np.zeros((4, 1), np.float32)},
        "byte": {"a": np.array([[0, 0], [0, -0.0]], np.float32)},
    }[change]
    digests = []
    for name, tensors in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        digests.append(digest_of(tmp_path / name))
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        safetensors(a=b"cut off")[:-1],
        struct.pack("<Q", 4) + b"[1,]",
        struct.pack("<Q", 3) + b"[1]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 8) + b'{"a":{}}',
        struct.pack("<Q", 44) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets"',
        struct.pack("<Q", 54) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}',
        bytes(range(256)) * 9,
    ],
)
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(Failed, match=r"x\.safetensors' is not a whole safetensors file"):
        stored_tensors(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").write_bytes(safetensors(a=b"x"))
    (tmp_path / "2.safetensors").write_bytes(safetensors(a=b"y"))
    with pytest.raises(Failed, match=r"tensor 'a' is in '1.safetensors' and '2.safetensors'"):
        stored_tensors(tmp_path)


def test_a_file_cut_short_after_its_header_was_read_is_an_error_not_another_digest(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors(a=bytes(3 << 20)))
    stored = stored_tensors(tmp_path)
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size - 5)
    with pytest.raises(Failed, match="it ends 5 bytes too early"):
        tensor_digests(stored)


def test_what_is_longer_than_a_block_has_the_digest_of_all_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * (9 << 10)  # 2.25 MiB
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors(a=b"before", b=data, c=b"after"))
    found = tensor_digests(stored_tensors(tmp_path))["b"]
    assert found == xxh3(f"U8\0[{len(data)}]\0".encode() + data)
    assert digest_of_file(file) == xxh3(file.read_bytes())


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
