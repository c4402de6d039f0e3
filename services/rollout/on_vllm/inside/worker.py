"""Methods of ours in vLLM's model worker. The service calls them by name through
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

from services.rollout.on_vllm.inside import readback, transfer
from services.rollout.on_vllm.inside.executors import leave_out_whole_rows


class WorkerExtension:
    """vLLM adds this class to its worker's base classes, so `self` is vLLM's worker."""

    def load_published(self: Any, folder: str) -> None:
        """Loads the safetensors files of `folder` in place."""
        self.reload_weights(weights_path=folder)
        share_packed_output(self)

    def meet_trainer(
        self: Any, backend: str, meeting: dict[str, Any], updates: list[dict[str, Any]]
    ) -> None:
        """Begins to meet the trainer, while the engine samples: `transfer.Told`."""
        self.incoming = transfer.Incoming(self, backend, meeting, updates)

    def trainer_met(self: Any) -> str | None:
        """Returns "" once they have met, why they cannot meet, or None while that is open."""
        return self.incoming.problem()

    def receive_published(self: Any) -> str | None:
        """Loads the weights that the trainer sends, in place. Returns what went wrong, or None."""
        problem = self.incoming.load()
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
        """Returns digests of the tensors that all workers together compute with, on the first
        worker only, and where the next turn begins."""
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
    """Makes a tied output matrix use the embedding's packed copy, which nothing else reads.

    On a CPU vLLM computes with packed copies of the matrices. A reload renews the copies of the
    matrices that it gets. A tied output matrix is not among them, so the logits would come from the
    first weights for ever."""
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
    leave_out_whole_rows()
