"""Whether a sampler holds the trainer's weights, by what both give a fixed sequence.

The digest that a sampler answers is of the files it read. What its engine then computes with is
another thing: a load that did nothing, that left a tensor out or put it into another's place. So
trainer and sampler each give log-probs of the same sequence, which have to agree as far as the
rounding of their dtypes allows.
"""

from __future__ import annotations

from statistics import pstdev

from shared.wire import Canary, ServingWeights

TOLERANCES = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
"""Nats by which the log-probs may differ on average over the sequence. Two right implementations
differ by about 1e-6 in float32; in bfloat16 by 0.01 to 0.02 in a few layers, and by 0.06 to 0.13 in
24 layers of 896 where the log-probs have a standard deviation of 3."""

ROUNDING = 0.1
"""Share of the log-probs' standard deviation that rounding to 16 bits may make them differ by."""


def difference(canary: Canary, serving: ServingWeights) -> float:
    """Returns the mean absolute difference of the log-probs, in nats; infinity if they are not of
    the same tokens."""
    ours, theirs = list(canary.logprobs), list(serving.canary_logprobs)
    if len(ours) != len(theirs):
        return float("inf")
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(gaps) / len(gaps)
    return mean if mean == mean else float("inf")  # NaN: the sampler's are not finite


def tolerance(canary: Canary, serving: ServingWeights) -> float:
    """Returns the looser tolerance of the two dtypes."""
    loosest = max(TOLERANCES.values())
    return max(TOLERANCES.get(dtype, loosest) for dtype in (canary.dtype, serving.dtype))


def fault(canary: Canary, serving: ServingWeights) -> str | None:
    """Returns why the sampler cannot hold the trainer's weights, or None."""
    found, allowed = difference(canary, serving), tolerance(canary, serving)
    if found <= allowed:
        return None
    return (
        f"the log-probs of the canary differ by {found:.4g} nats on average, expected at most "
        f"{allowed:g} in {canary.dtype}"
    )


def may_be_rounding(canary: Canary, serving: ServingWeights) -> bool:
    """Returns whether the rounding of 16 bits, which grows with the layers and with the spread of
    the logits, may alone have made the difference. It says nothing of which weights these are: a
    query matrix of another layer changes as little."""
    if tolerance(canary, serving) == TOLERANCES["float32"]:
        return False
    return difference(canary, serving) <= ROUNDING * pstdev(canary.logprobs)
