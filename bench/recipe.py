"""The settings that all sides of a comparison of GRPO steps have in common."""

from __future__ import annotations

from dataclasses import dataclass

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
KV_CACHE_GIB = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training run, the same for every side. A step samples `group_size`
    completions of at most `max_tokens` for each of `num_prompts` rows, in the order of the file,
    and makes one optimizer step on all of them. `reward` is the function's name in `reward.py`.
    TRL's micro-batch has `rows` sequences; 0: all of a step."""

    num_prompts: int
    group_size: int = 8
    max_tokens: int = 64
    learning_rate: float = 1e-6
    seed: int = 0
    reward: str = "reward"
    rows: int = 0

    @property
    def num_samples(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.group_size
