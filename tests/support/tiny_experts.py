"""Tiny mixtures of experts: random weights, logits of the magnitude that trained models have."""

from __future__ import annotations

from pathlib import Path

KINDS = ("qwen3_moe", "mixtral")
LARGEST_LOGIT = 30.0


def make_tiny_experts(kind: str, folder: Path) -> Path:
    """Writes a model of two layers, of 8 experts in each (Mixtral: 4) with two for a token, into
    `folder` and returns it."""
    import torch
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4)
    else:
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=8, moe_intermediate_size=64, norm_topk_prob=True
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
            logits = model(torch.arange(64)[None]).logits
            model.lm_head.weight.mul_(LARGEST_LOGIT / logits.abs().max())
    model.save_pretrained(folder)
    return folder
