"""What runs inside vLLM's model worker, beside vLLM's own methods; called by name through
`collective_rpc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from services.rollout.on_vllm.inside import masks, readback, transfer


class WorkerExtension:
    """vLLM adds this class to its worker's bases, hence the methods it calls without having
    them."""

    def load_published(self: Any, folder: str) -> None:
        """Loads the safetensors files of `folder` in place."""
        self.reload_weights(weights_path=folder)
        share_packed_output(self)

    def meet_trainer(self: Any, method: str, meeting: dict[str, Any]) -> None:
        """Begins to meet the trainer, while the engine samples."""
        self.incoming = transfer.Incoming(self, method, meeting)

    def trainer_met(self: Any) -> str | None:
        """Returns "" once that is so, why it will not be, or None while that is to be seen."""
        return self.incoming.problem()

    def receive_published(self: Any, updates: list[Any]) -> str | None:
        """Loads what the trainer sends in place. Returns what went wrong."""
        problem = self.incoming.load(updates)
        if problem is None:
            share_packed_output(self)
        return problem

    def gpu_uuid(self: Any) -> str | None:
        """Returns the UUID of the GPU that this worker computes on; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def adapter_digests(self: Any, number: int, folder: str) -> dict[str, str]:
        """Returns the digest of each tensor of the adapter that this worker computes with."""
        return readback.adapter_digests(self.model_runner.lora_manager, number, Path(folder))

    def loaded_digests(self: Any, begin: int) -> tuple[dict[str, str], int | None]:
        """Returns the digests of tensors that the workers compute with, together, and where the
        next turn begins; the digests on the first worker only."""
        is_split = get_tensor_model_parallel_world_size() > 1
        return readback.digests(
            self.get_model(),
            begin,
            gather if is_split else readback.alone,
            hashes=get_tensor_model_parallel_rank() == 0,
        )


def gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor_model_parallel_all_gather(tensor.contiguous(), dim)


def share_packed_output(worker: Any) -> None:
    """On a CPU vLLM computes with packed copies of the matrices. Its reload renews the copy of
    every matrix that it is given, which a tied output matrix is not: the logits would come from the
    first weights for ever. They come from the embedding's copy instead, which nothing else reads.
    """
    if not current_platform.is_cpu():
        return
    layers: list[Any] = [
        layer
        for layer in worker.get_model().modules()
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear")
    ]
    packed = {
        layer.weight.data_ptr(): layer.cpu_linear
        for layer in layers
        if not isinstance(layer, ParallelLMHead)
    }
    for layer in layers:
        layer.cpu_linear = packed.get(layer.weight.data_ptr(), layer.cpu_linear)


if not current_platform.is_cpu():
    masks.leave_out_whole_rows()
