"""A rank of the trainer for `bench.plan`, in a process of its own.

    python -m bench.plan_side FOLDER '{"memory": {"zero_stage": 0}}'

prints one JSON object: its peak above what it held before the model was loaded, and what the plan
says.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bench.trainer_side import resident_bytes, settle
from shared.job import Job
from shared.job.file import parse_job
from shared.plan.memory import Ranks, trainer_memory
from shared.plan.model import find_model
from shared.wire import Example
from shared.wire.packed import Logprobs, TokenIds

MIB = 1 << 20
SHARED = "shared"
"""Beside a case's sections: the tokens of the prompt that all its sequences have in common."""

TOKENS, ROWS, PROMPT = 2048, 4, 64
"""Of a micro-batch: its tokens, and its sequences of equal length, with their prompts."""

VOCABULARY = 32_000
NUM_MICRO_BATCHES = 2


def write_model(folder: Path) -> None:
    """Writes a random model of 39 million parameters into `folder`."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_job(folder: Path, case: dict[str, Any]) -> Job:
    """Returns the job whose sections `case` has, of float32 unless it says another dtype."""
    return parse_job(
        {
            "name": "bench",
            "model": str(folder),
            "steps": 2,
            "data": {"train": "none"},
            "rewards": [{"grader": "none"}],
            "sampling": {"max_tokens": TOKENS // ROWS},
            **case,
            "memory": {"micro_batch_tokens": TOKENS, **case.get("memory", {})},
            "training": {"dtype": "float32", **case.get("training", {})},
        }
    )


def make_examples(length: int, shared: int = 0) -> tuple[Example, ...]:
    """Returns as many sequences of one length as a step has, with completions of so many tokens.
    Each has a prompt of its own, or all have the same one of `shared` tokens."""

    def ids(count: int, start: int) -> TokenIds:
        return TokenIds([2 + (7919 * at) % (VOCABULARY - 2) for at in range(start, start + count)])

    return tuple(
        Example(
            prompt_token_ids=ids(shared, 0) if shared else ids(PROMPT, 97 * number),
            token_ids=ids(length, 1009 * (number + 1)),
            old_logprobs=Logprobs([-10.0] * length),
            advantage=1.0 if number % 2 else -1.0,
        )
        for number in range(ROWS * NUM_MICRO_BATCHES)
    )


def measure(job: Job, store: Path, shared: int) -> dict[str, Any]:
    """Returns the memory of a rank that is alone, with prompts of `shared` tokens or unlike
    ones."""
    import torch
    import torch.distributed as dist

    from services.trainer.zero import host_memory
    from services.trainer.zero.deepspeed_engine import quiet_libraries, start_engine

    dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    quiet_libraries()
    host_memory.room_bytes = lambda: 0  # as where memory is short
    length = (TOKENS - shared) // ROWS - (0 if shared else PROMPT)
    short, whole = make_examples(8), make_examples(length, shared)
    settle()
    before = resident_bytes("VmRSS")
    engine = start_engine(job, torch.device("cpu"))
    settle()
    loaded = resident_bytes("VmRSS") - before
    engine.update(short, 1e-6)
    engine.update(whole, 1e-6)
    peak = resident_bytes("VmHWM") - before
    settle()
    settled = resident_bytes("VmRSS") - before
    itemsize = 2 if job.training.dtype == "bfloat16" else 4
    planned = trainer_memory(find_model(job.model), job, Ranks(1, itemsize, "cpu"))
    sizes = {name.removesuffix("_gib"): 1024 * gib for name, gib in planned.model_dump().items()}
    return {
        "measured_mib": peak / MIB,
        "loaded_mib": loaded / MIB,
        "settled_mib": settled / MIB,
        "base_mib": before / MIB,
        "planned_mib": sizes["peak"],
        "parts": sizes,
    }


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    case: dict[str, Any] = json.loads(sys.argv[2])
    shared = case.pop(SHARED, 0)
    job = make_job(Path(sys.argv[1]), case)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        found = measure(job, Path(folder) / "store", shared)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
