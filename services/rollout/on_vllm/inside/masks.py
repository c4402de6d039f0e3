"""Which tokens each token was drawn from, as vLLM's model runners tell it.

A token that was drawn from the whole vocabulary has an empty mask: a full one of 152,000 tokens
takes 600 kB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors


class Masks:
    """On a CPU: stands in for the `forward` of vLLM's top-k and top-p sampler, and remembers what
    it left."""

    def __init__(self, sampler: Any) -> None:
        self._forward = sampler.forward
        self.kept_BV: Tensor | None = None

    def __call__(
        self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sampled tokens, and the log-probs of all: -inf for what could not be sampled,
        whether it was cut off here or before (min-p)."""
        tokens_B, logprobs_BV = self._forward(logits, generators, k, p)
        self.kept_BV = logprobs_BV > -torch.inf
        return tokens_B, logprobs_BV

    def lists(self) -> SamplingMaskLists | None:
        """Returns the tokens that each row of the step could have been, none for a row that could
        be any; None for a step that drew none."""
        if self.kept_BV is None:
            return None
        kept_BV = self.kept_BV & ~self.kept_BV.all(1, keepdim=True)
        ids = kept_BV.nonzero()[:, 1].numpy().astype(np.int32)
        return SamplingMaskLists(ids, np.concatenate([[0], kept_BV.sum(1).cumsum(0).numpy()]))


def leave_out_whole_rows() -> None:
    """On a GPU: lets vLLM's own masks name no token for a row that could be any."""
    lists = SamplingMaskTensors.tolists

    def of_cut_rows(masks: SamplingMaskTensors, *args: Any) -> SamplingMaskLists:
        counts_B = masks.counts.masked_fill(masks.counts == masks.vocab_size, 0)
        return lists(masks._replace(counts=counts_B), *args)

    vllm_masks: Any = SamplingMaskTensors
    vllm_masks.tolists = of_cut_rows
