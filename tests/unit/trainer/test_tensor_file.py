"""The files of published weights: what the safetensors library reads is what was written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shared.weights.folders import stored_tensors, tensor_digests

torch = pytest.importorskip("torch")


def test_the_library_reads_what_was_written_and_the_digests_are_of_the_file(tmp_path: Path):
    from safetensors.torch import load_file

    from services.trainer import transfer

    tensors = {
        "b.scalar": torch.tensor(7, dtype=torch.int64),
        "a.odd": torch.arange(3, dtype=torch.uint8),
        "w.long": torch.randn(3, 1 << 18).to(torch.bfloat16),  # more than a block
        "w.turned": torch.arange(6.0).reshape(2, 3).T,
        "empty": torch.zeros(0, 4),
        "f8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    }
    digests = transfer.write_tensors(tensors, tmp_path / "model.safetensors")
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].float(), tensor.float()), name
    stored = stored_tensors(tmp_path)
    assert digests == tensor_digests(stored)
    assert all(each.begin % tensors[name].element_size() == 0 for name, each in stored.items())


def test_what_a_gpu_has_comes_through_buffers_that_are_kept(tmp_path: Path, monkeypatch):
    """A device without memory of its own stands for the GPU: what is copied from it is checked on
    a GPU (tests/gpu)."""
    from services.trainer import transfer

    staging = transfer.Staging(64, pinned=False)
    with staging.buffer() as first, staging.buffer() as second:
        assert len(first) == len(second) == 64
        places = {first.data_ptr(), second.data_ptr()}
        assert len(places) == 2
    with staging.buffer() as again, staging.buffer() as other:
        assert {again.data_ptr(), other.data_ptr()} == places
    monkeypatch.setattr(transfer, "STAGING", staging)
    written: list[list[int]] = []

    class OnGpu(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda", 0)

    plain = torch.arange(150, dtype=torch.uint8)
    for _ in range(2):
        pieces = transfer._in_host_memory(plain.as_subclass(OnGpu))
        written.append([byte for piece in pieces for byte in piece])
    assert written == [list(range(150))] * 2
    assert staging._free.qsize() == 2, "no further buffer was made"


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch):
    from services.trainer import transfer

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        transfer.write_tensors({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
