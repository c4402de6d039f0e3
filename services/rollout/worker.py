"""What runs inside vLLM's model worker, beside vLLM's own methods; called by name through
`collective_rpc`."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from services.rollout import readback


class WorkerExtension:
    """vLLM adds this class to its worker's bases, hence the methods it calls without having
    them."""

    def load_published(self: Any, folder: str) -> None:
        """Loads the safetensors files of `folder` in place.

        On a CPU vLLM computes the logits with a packed copy of the output matrix. Its reload renews
        the copy of every matrix that it finds in a file, which a tied one is not: the logits would
        come from the first weights for ever.
        """
        self.reload_weights(weights_path=folder)
        if (
            current_platform.is_cpu()
            and self.model_config.hf_config.get_text_config().tie_word_embeddings
        ):
            for module in self.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def loaded_digests(self: Any) -> dict[str, str]:
        """Returns the digest of each tensor that this worker computes with."""
        return readback.digests(self.get_model())
