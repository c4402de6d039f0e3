"""What runs inside vLLM's model worker, beside vLLM's own methods; called by name through
`collective_rpc`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from services.rollout import readback, transfer


class WorkerExtension:
    """vLLM adds this class to its worker's bases, hence the methods it calls without having
    them."""

    def load_published(self: Any, folder: str) -> None:
        """Loads the safetensors files of `folder` in place."""
        self.reload_weights(weights_path=folder)
        pack_tied_output(self)

    def receive_published(
        self: Any, method: str, meeting: dict[str, Any], updates: list[Any]
    ) -> tuple[bool, str | None]:
        """Loads what the trainer sends in place. Returns whether the model is another one than
        before, and what went wrong."""
        outcome = transfer.receive(self, method, meeting, updates)
        if outcome.problem is None:
            pack_tied_output(self)
        return outcome.began, outcome.problem

    def gpu_uuid(self: Any) -> str | None:
        """Returns the UUID of the GPU that this worker computes on; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def loaded_digests(self: Any) -> dict[str, str]:
        """Returns the digest of each tensor that this worker computes with."""
        return readback.digests(self.get_model())


def pack_tied_output(worker: Any) -> None:
    """On a CPU vLLM computes the logits with a packed copy of the output matrix. Its reload renews
    the copy of every matrix that it is given, which a tied one is not: the logits would come from
    the first weights for ever."""
    tied = worker.model_config.hf_config.get_text_config().tie_word_embeddings
    if not (current_platform.is_cpu() and tied):
        return
    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
