"""The orchestrator's loop with many samplers, which are simulated: the real HTTP contract, made-up
tokens.

    python -m bench.scale [--quick]

The loop is the real one (pipeline, pool, batches on disk, train steps), in a process of its own.
The samplers are in other processes, as are the trainer, which learns nothing in no time, and the
grader. Completions come in groups of 16, with log-normal lengths of up to 8,192 tokens.

- Cost: one step of 10,000 completions, all under way at once, by samplers that are as fast as
  their HTTP: CPU seconds of the loop's process per million tokens, and its peak memory beyond what
  it has before the step, over the bytes of the step's batch on disk. With 1, 4 and 32 samplers.
- Idle share: 32 samplers, 10,000 completions under way, several steps, `max_staleness` 1. A place
  is idle while it samples nothing, from the first group to the last. Beside it the idle share of an
  oracle, which knows every length ahead, gives each place any completion, keeps the same staleness
  and trains and syncs in no time; the difference is a share of all places and time, in two parts.
  One is for not knowing lengths: the same schedule in the order of asking, in which lengths are as
  good as drawn at random, has it too. Any other order would on average, for no length depends on
  its prompt, and what is sampled is neither interrupted nor begun for steps that staleness forbids.
  The other part is the loop's, and has the goal: by whole groups, HTTP, and a machine that is busy,
  and by the time in which it stores, trains and syncs between its steps, which is told too.
  With 313 places at each sampler all that is under way is sampled, and the first part is none. With
  64 most of it waits, and the oracle gains by beginning with the longest.

`--quick` has a tenth of the completions and at most 4 samplers.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

from bench.report import Figure, finish
from bench.scale_side import Load, Schedule, argument
from bench.side import start, told

COST = Load(
    num_samplers=32, num_prompts=625, num_steps=1, max_staleness=0, slots=10_000, tokens_per_s=4000
)
IDLE = Load(
    num_samplers=32, num_prompts=313, num_steps=4, max_staleness=1, slots=64, tokens_per_s=200
)
ALL_SAMPLED = replace(IDLE, slots=313)
QUICK_COST = replace(COST, num_samplers=4, num_prompts=63)
QUICK_IDLE = replace(IDLE, num_samplers=4, num_prompts=32, tokens_per_s=800)
QUICK_ALL_SAMPLED = replace(QUICK_IDLE, slots=256)
LIMIT_S = 1200.0
SIDE = "bench.scale_side"

MOST_ABOVE = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of it: about a minute")
    quick = parser.parse_args().quick
    cost = QUICK_COST if quick else COST
    idle = (QUICK_ALL_SAMPLED, QUICK_IDLE) if quick else (ALL_SAMPLED, IDLE)
    counts = (1, 4) if quick else (1, 4, 32)
    runs = {count: run(replace(cost, num_samplers=count)) for count in counts}
    idle_runs = {load.slots: run(load) for load in idle}
    figures = [
        *cost_figures(runs),
        *[figure for load in idle for figure in idle_figures(load, idle_runs[load.slots])],
    ]
    loads = {"cost": asdict(cost), "idle": [asdict(load) for load in idle]}
    told = [
        {name: value for name, value in each.items() if name != "lengths"}
        for each in (*runs.values(), *idle_runs.values())
    ]
    return finish("scale", figures, quick=quick, loads=loads, runs=told)


def cost_figures(runs: dict[int, dict[str, Any]]) -> list[Figure]:
    """Returns what the most samplers cost, and how it grew to that from one."""
    rates = {count: told["cpu_s"] / told["num_tokens"] * 1e6 for count, told in runs.items()}
    memory = {count: told["peak_bytes"] / told["batch_bytes"] for count, told in runs.items()}
    most, fewer = max(runs), sorted(runs)[:-1]
    return [
        Figure(f"CPU time per million tokens, {most} samplers", rates[most], "s", 1.0, "max"),
        Figure(f"peak memory, {most} samplers, to the batch", memory[most], "x", 3.0, "max"),
        *[Figure(f"CPU time per million tokens, {n} samplers", rates[n], "s") for n in fewer],
        *[Figure(f"peak memory, {n} samplers, to the batch", memory[n], "x") for n in fewer],
        *[Figure(f"seconds, {n} samplers", told["seconds"], "s") for n, told in runs.items()],
        Figure(f"tokens of a step, {most} samplers", runs[most]["num_tokens"]),
    ]


def idle_figures(load: Load, told: dict[str, Any]) -> list[Figure]:
    """Returns the idle share of the samplers' places. Also how far, and why, it is above the idle
    share of an oracle that schedules the same lengths."""
    seconds = told["last_at"] - told["first_at"]
    work_s = told["sampled_tokens"] / load.tokens_per_s
    share = 1 - work_s / (load.num_samplers * load.slots * seconds)
    between_s = tuple(
        sum(step[lap] for lap in ("store", "train", "sync")) for step in told["steps_s"]
    )
    lengths_K = told["lengths"]
    oracle = Schedule(sort=True).idle_share(load, lengths_K)
    in_order = Schedule(sort=False).idle_share(load, lengths_K)
    with_time_between = Schedule(sort=False, between_s=between_s).idle_share(load, lengths_K)
    label = f"{load.slots} places at each"
    return [
        Figure(f"{label}: idle share of the samplers", share),
        Figure(f"{label}: idle share of the oracle", oracle),
        Figure(f"{label}: difference", share - oracle),
        Figure(f"{label}: of it for not knowing lengths", in_order - oracle),
        Figure(f"{label}: of it by the loop", share - in_order, "", MOST_ABOVE, "max"),
        Figure(f"{label}: of that between the steps", with_time_between - in_order),
        Figure(f"{label}: seconds", seconds, "s"),
    ]


def run(load: Load) -> dict[str, Any]:
    """Returns what the loop's process and the samplers told."""
    shares = [
        [*range(first, load.num_samplers, load.num_processes)]
        for first in range(min(load.num_processes, load.num_samplers))
    ]
    children = [start(SIDE, argument("samplers", load, numbers=numbers)) for numbers in shares]
    children.append(start(SIDE, argument("others", load)))
    try:
        found: list[Any] = [told(child) for child in children]
        trainer_url, reward_url = found.pop()
        urls = {
            "rollout_url": ",".join(url for some in found for url in some),
            "trainer_url": trainer_url,
            "reward_url": reward_url,
        }
        loop = start(SIDE, argument("loop", load, urls=urls))
        children.append(loop)
        output, _ = loop.communicate(timeout=LIMIT_S)
        if loop.returncode:
            raise RuntimeError(f"the loop ended with {loop.returncode}")
        of_loop = json.loads(output.splitlines()[-1])
        ends = [json.loads(child.communicate()[0]) for child in children[: len(shares)]]
    finally:
        for child in children:
            child.kill()
            child.wait()
    completions = sum(end["num_completions"] for end in ends)
    expected = load.num_steps * load.num_prompts * load.group_size
    if completions != expected:
        raise RuntimeError(f"{completions} completions were sampled, expected {expected}")
    return of_loop | {
        "num_samplers": load.num_samplers,
        "first_at": min(end["first_at"] for end in ends),
        "last_at": max(end["last_at"] for end in ends),
        "sampled_tokens": sum(end["num_tokens"] for end in ends),
    }


if __name__ == "__main__":
    sys.exit(main())
