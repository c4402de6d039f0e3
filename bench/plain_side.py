"""A step of plain transformers for `bench.trainer --real`, in a process of its own: forward and
backward passes of the model with its own loss, and torch's AdamW.

    python -m bench.plain_side FOLDER float32|bfloat16 512 '{"groups": 24, ...}'

prints one JSON object: the seconds of a step in micro-batches of that many tokens, and the tokens
that went through the model.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import transformers

from bench.plan_side import step_of
from bench.trainer_side import Task, make_examples


def measure(folder: str, dtype: str, row_tokens: int, step: Task) -> dict[str, Any]:
    """Returns the measurements of the second whole step. All sequences of a step have the same
    length, so nothing is padded."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    examples = make_examples(replace(step, vocab_size=model.config.vocab_size))
    rows = [[*example.prompt_token_ids, *example.token_ids] for example in examples]
    size = max(1, row_tokens // len(rows[0]))
    seconds = 0.0
    for part in (rows[: 2 * size], rows):
        started = time.perf_counter()
        for first in range(0, len(part), size):
            ids = torch.tensor(part[first : first + size])
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss * len(ids) / len(part)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
    return {"train_s": seconds, "num_tokens": sum(map(len, rows))}


def main() -> None:
    folder, dtype, row_tokens, step = sys.argv[1:]
    print(json.dumps(measure(folder, dtype, int(row_tokens), step_of(**json.loads(step)))))


if __name__ == "__main__":
    main()
