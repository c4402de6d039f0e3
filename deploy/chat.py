"""Chats with a checkpoint in a terminal, by plain transformers: `python -m deploy.chat FOLDER`.

Needs no service. Each line is a new conversation: the model sees no earlier lines.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PROMPT = "> "


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.chat", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint, as Hugging Face has it")
    parser.add_argument("--system", help="the system message (default: the chat template's own)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").is_file():
        parser.error(
            f"{str(arguments.folder)!r} has no config.json; expected a checkpoint's folder"
        )
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    print("ask a question; an empty line ends")
    while question := _read_question():
        prompt = tokenizer.apply_chat_template(
            [*system, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        model.generate(
            **prompt, max_new_tokens=arguments.max_tokens, do_sample=False, streamer=streamer
        )


def _read_question() -> str:
    try:
        return input(PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
        return ""


if __name__ == "__main__":
    main()
