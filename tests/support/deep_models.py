"""Random models of any depth, whose weights keep the size of what they are given, with logits that
spread as a trained model's do."""

from __future__ import annotations

from typing import Any

WIDTH = 128
VOCAB_SIZE = 1024
SPREAD = 3.0
"""Standard deviation of the logits."""


def deep_model(num_layers: int, seed: int = 0) -> Any:
    """Returns a Qwen2 of so many layers of 128, in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.normal_()
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.uniform_(0.5, 1.5)
        logits = model(torch.arange(0, VOCAB_SIZE, 16)[None]).logits
        model.lm_head.weight.mul_(SPREAD / logits.std())
    return model.eval()
