"""A rank of the trainer for `bench.plan`, in a process of its own.

    python -m bench.plan_side FOLDER '{"memory": {"zero_stage": 0}}'

prints one JSON object: its peak memory above the memory before the model was loaded, the seconds of
its last step, and the plan.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.side import random_model, resident_bytes
from bench.trainer_side import Task, make_examples, settle
from shared.job import Job
from shared.job.file import parse_job
from shared.plan.memory import Ranks, trainer_memory
from shared.plan.model import find_model

MIB = 1 << 20
STEP, AS_SET, REPEATS = "step", "as_set", "repeats"
"""Keys of a case beside its sections: the sizes of its step, whether the trainer decides if freed
memory is returned to the system (false: it is always returned), and the number of steps before the
measured one."""

TOKENS = 2048
"""Tokens of a micro-batch of the generated model. A step has two micro-batches."""

VOCABULARY = 32_000


def step_of(
    groups: int = 8, group_size: int = 1, prompt: int = 64, completion: int = TOKENS // 4 - 64
) -> Task:
    """Returns a step of groups that share a prompt, with these tokens in each prompt and each
    completion."""
    return Task(
        vocab_size=VOCABULARY,
        num_prompts=groups,
        group_size=group_size,
        prompt=(prompt, prompt),
        completion=completion,
        max_tokens=completion,
        spread=0,
    )


def num_tokens(step: Task) -> int:
    """Returns the tokens of the step, with each prompt once. The last token of a completion is only
    a target."""
    return step.num_prompts * (step.prompt[0] + step.group_size * step.completion)


def write_model(folder: Path) -> None:
    """Writes a random model of 39 million parameters into `folder`."""
    model = random_model(
        512,
        vocab_size=VOCABULARY,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model.save_pretrained(folder)


def make_job(folder: Path, case: dict[str, Any], step: Task) -> Job:
    """Returns the job with the sections of `case`, in float32 unless these set another dtype."""
    return parse_job(
        {
            "name": "bench",
            "model": str(folder),
            "steps": 2,
            "data": {"train": "none"},
            "rewards": [{"grader": "none"}],
            "sampling": {
                "prompts_per_step": step.num_prompts,
                "group_size": max(step.group_size, 2),
                "max_tokens": step.max_tokens,
            },
            **case,
            "training": {"dtype": "float32", **case.get("training", {})},
        }
    )


def measure(job: Job, store: Path, step: Task, *, as_set: bool, repeats: int = 0) -> dict[str, Any]:
    """Returns the memory of a single rank, and the seconds of its last step, after `repeats`
    others. The first step, of one group with short completions, makes Adam's moments."""
    import torch
    import torch.distributed as dist

    from services.trainer.zero import update
    from services.trainer.zero.deepspeed_engine import quiet_libraries, start_engine

    dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    quiet_libraries()
    if not as_set:
        update.host_memory_bytes = lambda: 0  # as where memory is scarce
    model = find_model(job.model)
    step = replace(step, vocab_size=model.vocabulary)
    first = tuple(make_examples(replace(step, num_prompts=1, completion=8)))
    whole = tuple(make_examples(step))
    settle()
    before = resident_bytes("VmRSS")
    engine = start_engine(job, torch.device("cpu"))
    settle()
    loaded = resident_bytes("VmRSS") - before
    engine.update(first, 1e-6)
    for _ in range(repeats):
        engine.update(whole, 1e-6)
    started, cpu_started = time.perf_counter(), time.process_time()
    engine.update(whole, 1e-6)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    peak = resident_bytes("VmHWM") - before
    settle()
    settled = resident_bytes("VmRSS") - before
    itemsize = 2 if job.training.dtype == "bfloat16" else 4
    longest = step.prompt[0] + step.completion
    planned = trainer_memory(model, job, Ranks(1, itemsize, "cpu"), longest, num_tokens(step))
    sizes = {name.removesuffix("_gib"): 1024 * gib for name, gib in planned.model_dump().items()}
    return {
        "measured_mib": peak / MIB,
        "loaded_mib": loaded / MIB,
        "settled_mib": settled / MIB,
        "base_mib": before / MIB,
        "planned_mib": sizes["peak"],
        "parts": sizes,
        "train_s": seconds,
        "cpu_s": cpu_s,
        "num_tokens": num_tokens(step),
    }


def main() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    case: dict[str, Any] = json.loads(sys.argv[2])
    if STEP not in case:
        case["memory"] = {"micro_batch_tokens": TOKENS, **case.get("memory", {})}
    step, as_set = step_of(**case.pop(STEP, {})), case.pop(AS_SET, False)
    repeats = case.pop(REPEATS, 0)
    job = make_job(Path(sys.argv[1]), case, step)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        found = measure(job, Path(folder) / "store", step, as_set=as_set, repeats=repeats)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
