"""Kills parts of a stack on which three programs drive a model each, with Tinker's SDK as it is on
PyPI, and shows that each program sees what it would see alone.

    python -m tests.faults.programs [--seed 0] [--kills 40]

The programs train LoRA models of one base model, with data, losses and learning rates of their own,
and sample on the way. At random moments, from the seed, a random process gets kill -9; no one kills
the programs. Each loss, gradient norm and last log-prob, and the last checkpoint with its optimizer
state, are compared with the same program's alone and undisturbed, bit for bit; and what its first
snapshot gives at the end with what it gave at first. New programs follow until all kills are done.
The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from services.orchestrator.extensions.tinker.log import SavedFolder
from shared.weights.folders import stored_tensors, tensor_digests
from tests.compat.packages import ROOT, python_with
from tests.faults.__main__ import made_job
from tests.faults.kills import Kills, kills_from_arguments
from tests.faults.stack import Stack

SEEDS = (0, 1, 2)
STEPS = 12
ENDS_S = 900.0
NEAR_NATS = 0.05
"""How far the same snapshot's log-probs may lie apart: samplers batch, and so round, otherwise."""


async def played(stack: Stack, model: str, seed: int) -> dict[str, Any]:
    """Returns what a program printed, with the weights of its last checkpoint."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HONE_")}
    url = f"http://127.0.0.1:{stack.ports['orchestrator']}"
    program = await asyncio.create_subprocess_exec(
        str(python_with("tinker")),
        str(ROOT / "tests/compat/tinker_tenant.py"),
        *(model, str(seed), str(STEPS)),
        env=environment | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-none", "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(program.communicate(), ENDS_S)
    finally:
        if program.returncode is None:
            program.kill()
    if program.returncode:
        return {"failed": err.decode(errors="replace")[-2000:]}
    told = json.loads(out.decode().splitlines()[-1])
    run = stack.runs / told.pop("path").split("/")[2]
    saved = SavedFolder(run).find("checkpoint", "end")
    assert saved is not None
    folders = ("", "adapter", "trainer")
    stored = [stored_tensors(Path(saved.path) / folder) for folder in folders]
    return told | {"weights": [tensor_digests(tensors) for tensors in stored]}


def problems_of(told: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    if "failed" in told:
        return [told["failed"]]
    found = [name for name in ("losses", "logprobs", "weights") if told[name] != alone[name]]
    problems = [f"its {name} differ" for name in found]
    if not told["whole"]:
        problems.append("a sample has no log-prob for each token")
    apart = max(abs(a - b) for a, b in zip(told["first"], alone["first"], strict=True))
    if max(apart, told["apart"]) > NEAR_NATS:
        problems.append(f"its first snapshot gives other log-probs: {apart}, {told['apart']}")
    return problems


async def run(kills: Kills) -> int:
    """Returns how many programs ran while processes were killed."""
    model, num_programs = made_job(kills.seed).model, 0

    async def look() -> str:
        return f"program {num_programs} to {num_programs + len(SEEDS) - 1} run"

    async with Stack(lambda *_: None, HONE_ROLLOUT_ADAPTERS=str(len(SEEDS))) as stack:
        try:
            alone = [await played(stack, model, each) for each in SEEDS]
            for each, one in zip(SEEDS, alone, strict=True):
                kills.note_comparison(f"program {each} by itself", problems_of(one, one))
            while kills.are_going_on:
                playing = asyncio.gather(*(played(stack, model, each) for each in SEEDS))
                every = await kills.during(playing, stack, look)
                for each, told, undisturbed in zip(SEEDS, every, alone, strict=True):
                    kills.note_comparison(f"program {each}", problems_of(told, undisturbed))
                num_programs += len(SEEDS)
        finally:
            kills.keep_if_wrong(stack)
    return num_programs


def main() -> int:
    found = kills_from_arguments("programs", __doc__)
    num_programs = asyncio.run(run(found))
    return found.report(True, programs=num_programs)


if __name__ == "__main__":
    sys.exit(main())
