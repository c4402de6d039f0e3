"""Which tokens each token was drawn from, under top-p, top-k or min-p: vLLM's sampling masks.

vLLM's newer model runner, which a GPU has, gives them if `return_sampling_mask` is set. On a CPU
vLLM has the older one; there `inside/executors.py` adds them. Either way a token that was drawn
from the whole vocabulary has an empty one (`inside/masks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import Failed
from shared.wire import Sampling
from shared.wire.packed import TokenIds


@dataclass(frozen=True)
class Masking:
    """Whether an engine is `asked` for masks, by `EngineSpec`."""

    asked: bool

    def gives(self, sampling: Sampling) -> bool:
        """Returns whether there is to be a mask for each token that is sampled so."""
        return self.asked and sampling.truncates


def packed(kept_T: Sequence[Sequence[int]], num_tokens: int) -> tuple[TokenIds, TokenIds]:
    """Returns `kept_ids` and `kept_counts` of a rollout (shared/wire/rollouts.py). Raises
    Failed unless there is one mask per token."""
    if len(kept_T) != num_tokens:
        raise Failed(
            f"vLLM gave {len(kept_T)} sampling masks for {num_tokens} tokens, expected one each"
        )
    ids = TokenIds([token for kept in kept_T for token in kept])
    return ids, TokenIds([len(kept) for kept in kept_T])
