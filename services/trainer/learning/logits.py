"""What a model does to its output head's products z before their softmax: it scales them (Cohere,
Granite), or caps them (Gemma 2, 3n and 4: arXiv 2408.00118, section 2),

    logits = scale * z        logits = cap * tanh(z / cap)

A scale is a temperature of 1 / scale. vLLM does the same before it divides by the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

CAP = "final_logit_softcapping"

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Keys of configurations that say by what logits, or the hidden states that the head is given, are
multiplied or divided."""

MULTIPLIES = "hyperclovax"
"""The `model_type` that multiplies by what others divide by."""


@dataclass(frozen=True)
class LogitRule:
    """What becomes of a head's output; at most one of the two is set."""

    scale: float = 1.0
    cap: float | None = None

    def logits(self, output: Tensor) -> Tensor:
        """Returns the logits, in float32."""
        logits = output.float()
        if self.cap is not None:
            logits = self.cap * (logits / self.cap).tanh()
        return logits * self.scale


AS_THEY_ARE = LogitRule()


def rule_of(config: Any) -> LogitRule:
    """Returns the rule that a model's configuration says. `check_head` compares it with what the
    model does."""
    text = config.get_text_config()
    multiplies = getattr(text, "model_type", None) == MULTIPLIES
    scale = 1.0
    for key in MULTIPLIERS:
        scale *= getattr(text, key, None) or 1.0
    for key in DIVISORS:
        divisor = getattr(text, key, None) or 1.0
        scale *= divisor if multiplies else 1 / divisor
    return LogitRule(scale, getattr(text, CAP, None))
