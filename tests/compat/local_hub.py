"""A model and data sets in the place of the Hub's: a Hugging Face cache with the tiny model under a
name that the cookbook knows, and folders that `datasets.load_dataset` finds by the Hub's names,
relative to where a program runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from deploy.tool_model import END_ID, MAX_LENGTH, PAD_ID, make_tokenizer

MODEL = "Qwen/Qwen3-8B-Base"
COMMIT = "0" * 40

QUESTIONS = [f"What is {a} plus {b}?" for a in range(10) for b in range(10)]
RIGHT = 7
"""The answer to every question of the reinforcement learning."""


def write_cache(folder: Path, seed: int) -> Path:
    """Writes the tiny model as the Hub's `MODEL`, and returns the folder for HF_HOME."""
    repo = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    write_model(repo / "snapshots" / COMMIT, seed)
    return folder


def write_model(folder: Path, seed: int) -> None:
    """Writes a Qwen2 of random weights that has one token for each character."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.1,
        dtype="float32",
        bos_token_id=None,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_data_sets(folder: Path) -> None:
    """Writes the data sets of the recipes, by the names of the Hub."""
    draws = random.Random(0)
    boxed = [f"\\boxed{{{draws.randrange(10)}}}" for _ in range(512)]
    asked = [draws.choice(QUESTIONS) + SUFFIX for _ in boxed]
    chats = [
        {"messages": [_message("user", question), _message("assistant", answer)]}
        for question, answer in zip(asked, boxed, strict=True)
    ]
    taught = [
        _taught(question, answer, SUFFIXES[at // 2 % 2], begins=at % 2 == 1)
        for at, (question, answer) in enumerate(zip(asked, boxed, strict=True))
    ]
    _write(folder / "HuggingFaceH4/no_robots", train=taught)
    sums = [{"question": one, "answer": f"#### {RIGHT}"} for one in QUESTIONS * 3]
    _write(folder / "openai/gsm8k", config="main", train=sums, test=sums[:4])
    _write(folder / "allenai/tulu-3-sft-mixture", train=chats)
    pairs = [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: yes",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: no",
        }
        for question in QUESTIONS
    ]
    _write(folder / "Anthropic/hh-rlhf", train=pairs, test=pairs[:4])


SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SUFFIXES = (SUFFIX, " Write your answer in \\boxed{} format.")
"""The end of every question of the cookbook's rl_loop, and of its math_rl."""


def _taught(question: str, answer: str, suffix: str, *, begins: bool) -> dict[str, Any]:
    """Returns a chat of a question that ends so; `begins`: after the example of both recipes."""
    asked = _message("user", question.removesuffix(SUFFIX) + suffix)
    first = [_message("user", "How many r's are in strawberry?" + suffix), SPELLED]
    return {"messages": [*(first if begins else []), asked, _message("assistant", answer)]}


SPELLED = {
    "role": "assistant",
    "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b "
    "7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
}
"""The answer with which rl_loop begins every chat."""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(folder: Path, config: str = "default", **splits: Iterable[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    files = ""
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files += f"      - split: {split}\n        path: {split}.jsonl\n"
    card = f"---\nconfigs:\n  - config_name: {config}\n    data_files:\n{files}---\n"
    (folder / "README.md").write_text(card)
