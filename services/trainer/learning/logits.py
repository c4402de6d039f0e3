"""Rules by which a model changes its output head's products z before the softmax. It scales them
(Cohere, Granite), or caps them (Gemma 2, 3n and 4: arXiv 2408.00118, section 2),

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
"""Configuration keys with the factor or divisor of logits, or of the head's hidden states."""

MULTIPLIES = "hyperclovax"
"""The `model_type` that multiplies by this value where others divide."""


@dataclass(frozen=True)
class LogitRule:
    """How a head's output becomes logits; at most one of the two is set."""

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
    """Returns the rule in a model's configuration. `check_head` compares it with the model
    itself."""
    text = config.get_text_config()
    multiplies = getattr(text, "model_type", None) == MULTIPLIES
    scale = 1.0
    for key in MULTIPLIERS:
        scale *= getattr(text, key, None) or 1.0
    for key in DIVISORS:
        divisor = getattr(text, key, None) or 1.0
        scale *= divisor if multiplies else 1 / divisor
    return LogitRule(scale, getattr(text, CAP, None))
