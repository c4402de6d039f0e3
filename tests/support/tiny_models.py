"""Tiny real models for tests: Qwen2 architecture, random weights, a word-per-token tokenizer. Made
in about a second."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 64


def make_tiny_model(
    folder: Path, *, seed: int = 0, tie_word_embeddings: bool = True, num_heads: int = 4
) -> Path:
    """Writes `save_tiny_qwen2`'s model and a tokenizer into `folder` and returns it."""
    save_tiny_qwen2(folder, seed=seed, tie_word_embeddings=tie_word_embeddings, num_heads=num_heads)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {
        f"w{index}": index for index in range(3, VOCAB_SIZE)
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def save_tiny_qwen2(
    folder: Path, *, seed: int, tie_word_embeddings: bool, num_heads: int = 4
) -> None:
    """Writes a model of about 0.1 M parameters (hidden 64, 2 layers, vocabulary 64; padding is
    token 0 and the end of a text token 1)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=256,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def make_byte_model(folder: Path, *, window: int = 2048) -> Path:
    """Writes a chat model of random weights that reads and writes any text, a token per byte, and
    returns `folder`. Heads have 32 dimensions: vLLM's CPU attention has no kernel for fewer."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = ["<pad>", "<eos>", *bytes_to_unicode().values()]
    symbols += [f"<unused{n}>" for n in range(-len(symbols) % 8)]
    config = Qwen2Config(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=window,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    Qwen2Tokenizer(
        vocab={symbol: id for id, symbol in enumerate(symbols)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=window,
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    ).save_pretrained(folder)
    return folder
