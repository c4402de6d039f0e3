"""Which dtype "auto" means: one rule for trainer and sampler, whose log-probs are compared."""

from __future__ import annotations

BFLOAT16_CAPABILITY = (8, 0)
"""The first CUDA compute capability (Ampere) that multiplies bfloat16. Older GPUs, such as the T4
and the V100, emulate it: slower than float32, and no more exact than bfloat16."""


def choose_dtype(
    asked: str, *, capability: tuple[int, int] | None, cpu_multiplies_bfloat16: bool
) -> str:
    """Returns the dtype of weights and products, by its name in torch. "auto" is bfloat16 where the
    hardware multiplies it, else float32.

    `capability` is the CUDA compute capability of the GPU; None on a CPU, for which
    `cpu_multiplies_bfloat16` is asked.
    """
    if asked != "auto":
        return asked
    multiplies = (
        cpu_multiplies_bfloat16 if capability is None else capability >= BFLOAT16_CAPABILITY
    )
    return "bfloat16" if multiplies else "float32"
