"""The canonical digest: by hand, independent of files, and clear about files that are not whole."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from shared.errors import Failed
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
