"""Chats with a checkpoint in a terminal, by plain transformers: `python -m deploy.chat FOLDER`.

It needs no service. The model sees the earlier questions and answers, the newest that fit in its
context; with `--single-turn` it sees only the question, as in a job of single answers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT = "> "

Messages = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.chat", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint, as Hugging Face has it")
    parser.add_argument("--system", help="the system message (default: the chat template's own)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    parser.add_argument("--single-turn", action="store_true", help="no memory of earlier questions")
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").is_file():
        parser.error(
            f"{str(arguments.folder)!r} has no config.json; expected a checkpoint's folder"
        )
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.folder)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    context = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)

    def num_tokens(messages: Messages) -> int:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return len(ids)

    def answer(messages: Messages) -> str:
        """Prints the answer token by token, and returns it."""
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(
            **prompt, max_new_tokens=arguments.max_tokens, do_sample=False, streamer=streamer
        )
        new_ids = ids[0, prompt["input_ids"].shape[1] :]
        return str(tokenizer.decode(new_ids, skip_special_tokens=True))

    print("ask a question; an empty line ends")
    system: Messages = []
    if arguments.system:
        system = [{"role": "system", "content": arguments.system}]
    history: Messages = []
    while question := _read_question():
        history = [] if arguments.single_turn else history
        history.append({"role": "user", "content": question})
        history = fitting(system, history, num_tokens, context - arguments.max_tokens)
        history.append({"role": "assistant", "content": answer([*system, *history])})


def fitting(
    system: Messages,
    history: Sequence[dict[str, str]],
    num_tokens: Callable[[Messages], int],
    limit: int,
) -> Messages:
    """Returns the end of a conversation that has, after the system message, at most `limit` tokens:
    without the oldest questions and their answers where needed, but always with the last
    question."""
    kept = list(history)
    while len(kept) > 1 and num_tokens([*system, *kept]) > limit:
        kept = kept[2:]
    return kept


def _read_question() -> str:
    try:
        return input(PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
        return ""


if __name__ == "__main__":
    main()
