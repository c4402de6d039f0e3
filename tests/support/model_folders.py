"""Model folders that are whole and take no torch to make: a Qwen2 of a few thousand parameters, and
a tokenizer with a token per word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 16, 2, 4, 2, 32, 24
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of the model."""
    head = HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, size in (("q", HIDDEN), ("k", KV_HEADS * head), ("v", KV_HEADS * head)):
            found[f"{at}.self_attn.{name}_proj.weight"] = (size, HIDDEN)
            found[f"{at}.self_attn.{name}_proj.bias"] = (size,)
        found[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        found[f"{at}.mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        found[f"{at}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        found[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        found[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        found[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    return found


def make_model_folder(folder: Path, window: int = 512, *, chat: bool = True) -> Path:
    """Writes a model that holds `window` tokens, with a chat template or without; returns the
    folder."""
    folder.mkdir(parents=True)
    config = CONFIG | {"max_position_embeddings": window}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: numpy.zeros(shape, numpy.float32) for name, shape in shapes().items()}
    save_file(tensors, folder / "model.safetensors")
    words = {"<unk>": 0, "<s>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    if chat:
        (folder / "chat_template.jinja").write_text(CHAT)
    return folder
