"""`weight_sync = "ipc"`: the sampler reads a version where the trainer has it, in the memory of the
GPU that both use. Nothing is sent: a CUDA IPC handle says where a tensor lies.

The other side is vLLM's own `IPCWeightTransferEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from services.trainer.transfer.broadcast import described
from shared.errors import BadRequest
from shared.wire import SharedTensor


def gpu_of(device: torch.device) -> str | None:
    """Returns the UUID of a GPU, which names it in every process; None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def shared(tensors: Mapping[str, Tensor]) -> tuple[str, tuple[SharedTensor, ...]]:
    """Returns the GPU and where each tensor lies in it. They must not change or be freed until the
    sampler has read them. Raises BadRequest on a CPU."""
    device = next(iter(tensors.values())).device
    gpu = gpu_of(device)
    if gpu is None:
        raise BadRequest(
            'weight_sync is "ipc", by which a sampler reads the memory of the trainer\'s GPU, and '
            f'the trainer computes on {str(device)!r}; expected "shm" there'
        )
    torch.cuda.synchronize(device)
    return gpu, tuple(_shared(name, tensor) for name, tensor in tensors.items())


def _shared(name: str, tensor: Tensor) -> SharedTensor:
    _, args = reduce_tensor(tensor.detach())
    return SharedTensor(**described(name, tensor).model_dump(), **location(args))


def location(args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns where a tensor lies, of the arguments of torch's `rebuild_cuda_tensor`: those that
    another process cannot know by itself."""
    (_, _, stride, offset, _, _, _, handle, size_bytes, offset_bytes, _, *counter) = args
    counter_handle, counter_offset, event_handle, event_sync_required = counter
    return {
        "stride": tuple(stride),
        "offset": offset,
        "handle": handle.hex(),
        "storage_size_bytes": size_bytes,
        "storage_offset_bytes": offset_bytes,
        "ref_counter_handle": counter_handle.hex(),
        "ref_counter_offset": counter_offset,
        "event_handle": event_handle.hex(),
        "event_sync_required": event_sync_required,
    }
