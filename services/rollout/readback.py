"""What the engine computes with, read back from vLLM's modules under the names of the checkpoint.
Imported in vLLM's process.

vLLM keeps several matrices of a checkpoint in one, and on a CPU packs them for its kernels and
drops the originals. So there a matrix is read by multiplying: what a layer makes of the rows of an
identity matrix are its columns, exactly, for every product but one is 0. (Only the sign of a
zero is lost.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from shared.digest import digest_of_bytes

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def digests(model: nn.Module) -> dict[str, str]:
    """Returns the digest of each tensor, by its name in the checkpoint: those of
    `shared/digest.py`."""
    return {
        name: _digest(tensor)
        for name, tensor in tensors(model, getattr(model, "packed_modules_mapping", {}))
    }


@torch.no_grad()
def tensors(model: nn.Module, packed: Mapping[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors. `packed` names the matrices that vLLM keeps in one."""
    for path, module in model.named_modules():
        layer: Any = module
        name = path.replace(".base_layer", "")
        if isinstance(module, LinearBase):
            parent, _, last = name.rpartition(".")
            parts = packed.get(last, [last])
            sizes = layer.output_sizes if len(parts) > 1 else [layer.output_size]
            for kind, whole in (("weight", _matrix(layer)), ("bias", layer.bias)):
                if whole is None:
                    continue
                for part, tensor in zip(parts, whole.split(sizes), strict=True):
                    yield f"{parent}.{part}.{kind}", tensor
        elif isinstance(module, VocabParallelEmbedding):
            whole = _matrix(layer) if isinstance(module, ParallelLMHead) else layer.weight
            yield f"{name}.weight", whole[: layer.org_vocab_size]
        else:
            for last, tensor in module.named_parameters(recurse=False):
                yield f"{name}.{last}", tensor


def _matrix(layer: Any) -> Tensor:
    """Returns the matrix `[out, in]` that the layer multiplies by."""
    if not hasattr(layer, "cpu_linear"):
        return layer.weight
    num_inputs = getattr(layer, "input_size", None) or layer.embedding_dim
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return layer.cpu_linear(torch.eye(num_inputs, dtype=dtype), layer.weight, None).T


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data
    return digest_of_bytes(DTYPES[tensor.dtype], tuple(tensor.shape), data)
