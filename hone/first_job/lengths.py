"""The token lengths of a first job's prompts and answers, and the bounds that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEP = 64
"""Bounds are multiples of this."""

MOST, USUAL = 4096, 512
"""Tokens of a completion: the most that is proposed, and the default if no answer was measured."""

LEAST_SHARE = 4
"""A completion gets at least a fourth of a small model's window; longer prompts are dropped."""


@dataclass(frozen=True)
class Lengths:
    """Bounds that fit: `num_overlong` of the `num_prompts` prompts are longer than they allow.
    `window` is the model's context, `answer` the longest right answer (0: none measured)."""

    window: int
    longest: int
    answer: int
    max_tokens: int
    max_model_len: int
    num_prompts: int
    num_overlong: int


def fitted(prompts: Sequence[int], answers: Sequence[int], window: int) -> Lengths:
    """Returns bounds for prompts and right answers of these lengths: a completion may be twice as
    long as the longest answer."""
    longest, answer = max(prompts), max(answers, default=0)
    wanted = min(_rounded_up(2 * answer), MOST) if answer else USUAL
    room = window - longest
    if room < min(wanted, window // LEAST_SHARE):
        room = max(window // LEAST_SHARE, 1)
    max_tokens = min(wanted, room)
    fitting = [length for length in prompts if length + max_tokens <= window]
    return Lengths(
        window=window,
        longest=longest,
        answer=answer,
        max_tokens=max_tokens,
        max_model_len=min(_rounded_up(max(fitting, default=0) + max_tokens), window),
        num_prompts=len(prompts),
        num_overlong=len(prompts) - len(fitting),
    )


def _rounded_up(length: int) -> int:
    return math.ceil(length / STEP) * STEP
