"""The model of `bench.curves` before and after training, in plain torch and transformers:
supervised warm-up steps, and answers by greedy decoding.

    python -m bench.curve_model warmup MODEL ROWS '{"steps": 10, ...}' OUT
    python -m bench.curve_model answer MODEL ROWS MAX_TOKENS

ROWS is a JSONL file, of chat messages in `prompt` and a text in `answer`. The last line of stdout
is a JSON object.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 32
"""Rows that are answered at a time."""

IGNORED = -100


@dataclass(frozen=True)
class Warmup:
    """Supervised steps before both sides' training, each on `batch` rows."""

    steps: int
    batch: int
    learning_rate: float


def warm_up(folder: Path, rows: list[dict[str, Any]], warmup: Warmup, out: Path) -> dict[str, Any]:
    """Saves the model after AdamW steps on the mean negative log-likelihood of the answers' tokens,
    which include the end of the message. Returns the loss of each step."""
    import torch
    from torch.nn.functional import cross_entropy

    tokenizer, model = _load(folder)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=warmup.learning_rate, weight_decay=0.0, fused=True
    )
    losses: list[float] = []
    for first in range(0, warmup.steps * warmup.batch, warmup.batch):
        chosen = rows[first : first + warmup.batch]
        examples = [
            (tokenizer(_prompt(tokenizer, row)).input_ids, _answer(tokenizer, row))
            for row in chosen
        ]
        length = max(len(prompt) + len(answer) for prompt, answer in examples)
        ids_BT = torch.full((len(examples), length), tokenizer.pad_token_id)
        labels_BT = torch.full_like(ids_BT, IGNORED)
        mask_BT = torch.zeros_like(ids_BT)
        for index, (prompt, answer) in enumerate(examples):
            end = len(prompt) + len(answer)
            ids_BT[index, :end] = torch.tensor([*prompt, *answer])
            labels_BT[index, len(prompt) : end] = torch.tensor(answer)
            mask_BT[index, :end] = 1
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT).logits
        loss = cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {"losses": losses}


def answer(folder: Path, rows: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """Returns the `completions` of the rows, each the likeliest token after token."""
    import torch

    tokenizer, model = _load(folder)
    model.eval()
    completions: list[str] = []
    for first in range(0, len(rows), BATCH):
        prompts = [_prompt(tokenizer, row) for row in rows[first : first + BATCH]]
        given = tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            found = model.generate(**given, max_new_tokens=max_tokens, do_sample=False)
        new = found[:, given.input_ids.shape[1] :]
        completions += tokenizer.batch_decode(new, skip_special_tokens=True)
    return {"completions": completions}


def _load(folder: Path) -> tuple[Any, Any]:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def _prompt(tokenizer: Any, row: dict[str, Any]) -> str:
    return tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)


def _answer(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    return tokenizer(row["answer"] + tokenizer.eos_token).input_ids


def main() -> None:
    what, folder, rows = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        if what == "warmup":
            warmup = Warmup(**json.loads(sys.argv[4]))
            result = warm_up(folder, found, warmup, Path(sys.argv[5]))
        else:
            result = answer(folder, found, int(sys.argv[4]))
    print(json.dumps(result), file=out)


if __name__ == "__main__":
    main()
