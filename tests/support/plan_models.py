"""Published models' configurations, as their config.json has them, and jobs to plan with them."""

from __future__ import annotations

from typing import Any

from shared.job import Job
from shared.job.file import parse_job
from shared.plan.model import Model, of_config

QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN_15B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
PUBLISHED = {
    "Qwen2.5-0.5B": (QWEN_05B, 494_032_768),
    "Qwen2.5-1.5B": (QWEN_15B, 1_543_714_304),
    "Qwen2.5-7B": (QWEN_7B, 7_615_616_512),
    "Llama-3.1-8B": (LLAMA_8B, 8_030_261_248),
}
"""Each with its number of parameters as the Hub shows it."""


def model(name: str) -> Model:
    return of_config(PUBLISHED[name][0], name)


def job(**sections: Any) -> Job:
    """Returns a job of 100 steps of 32 prompts x 8 completions of up to 512 tokens."""
    least = {
        "name": "t",
        "model": "owner/model",
        "steps": 100,
        "data": {"train": "x"},
        "rewards": [{"grader": "length"}],
    }
    return parse_job(least | sections)
