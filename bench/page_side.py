"""The orchestrator of `bench.page`: its API and page over a Redis and run folders that were made
for it. Arguments are one JSON object. It says its URL and the long run's id, and then adds as many
steps to that run as each line of its stdin says, and says when it wrote each."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.side import quiet, serving
from services.orchestrator.app import create_service
from services.orchestrator.store import keys
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.found import find_runs
from services.orchestrator.store.note import Note
from services.orchestrator.store.records import new_job_id
from services.orchestrator.store.store import Store
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    Batch,
    Logprobs,
    MetricsRow,
    Part,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    Span,
    TokenIds,
)
from tests.support.running import running_redis

STEPS, PROMPTS, GROUP = 2000, 64, 8
NUM_TOKENS = 200
OTHER_STEPS = 40
METRICS = (
    *("reward", "reward_std", "group_reward_std", "frac_reward_zero_std", "missing_rewards"),
    *("loss", "grad_norm", "learning_rate", "kl", "entropy", "ratio/mean", "kl/old_k3"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/clipped_ratio", "mismatch/logprob_diff_mean", "mismatch/logprob_diff_max"),
    *("mismatch/ratio_mean", "mismatch/ratio_max", "mismatch/k3_kl", "staleness/mean"),
    *("staleness/max", "num_tokens", "num_examples", "total/tokens", "total/hours"),
    *("time/step", "time/wait_for_batch", "time/generate", "time/reward", "time/train"),
    *("time/sync", "time/store", "time/record", "utilization/rollout", "utilization/trainer"),
)


def job_of(name: str, steps: int) -> Job:
    return Job.model_validate(
        {
            "name": name,
            "model": "owner/model",
            "steps": steps,
            "data": {"train": "/data/train.jsonl", "eval": "/data/test.jsonl"},
            "sampling": {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_tokens": 256},
            "rewards": [{"grader": "exact_match", "params": {"column": "answer"}}],
        }
    )


def row_of(step: int, draws: random.Random) -> MetricsRow:
    metrics = {name: draws.random() for name in METRICS}
    metrics |= {"total/hours": step / 100, "total/tokens": step * 1e5, "reward": step / 4000}
    if step % 20 == 0:
        metrics |= {"eval/reward": 0.5, "eval/reward_low": 0.4, "eval/reward_high": 0.6}
    return MetricsRow(step=step, metrics=metrics)


def batch_of(step: int, draws: random.Random) -> Batch:
    words = [f"word{number}" for number in range(400)]
    groups, scores = [], []
    for _ in range(PROMPTS):
        rollouts = tuple(
            Rollout(
                text=" ".join(draws.choices(words, k=NUM_TOKENS)),
                token_ids=TokenIds(range(NUM_TOKENS)),
                logprobs=Logprobs([-0.5] * NUM_TOKENS),
                finish_reason="stop",
                spans=(Span(version=step - 1, start=0),),
            )
            for _ in range(GROUP)
        )
        groups.append(RolloutGroup(prompt_token_ids=TokenIds(range(60)), rollouts=rollouts))
        values = [float(draws.random() < 0.5) for _ in range(GROUP)]
        scores.append(tuple(Score(value=v, parts={"exact_match": Part(value=v)}) for v in values))
    prompts = tuple(
        Prompt(index=at, content=" ".join(draws.choices(words, k=60)), row={"answer": "x"})
        for at in range(PROMPTS)
    )
    return Batch(
        step=step, version=step - 1, prompts=prompts, groups=tuple(groups), scores=tuple(scores)
    )


def make_run(runs: Path, name: str, steps: int, *, of: int, rollouts: bool = False) -> str:
    """Makes the run folder of a job; returns the job's id."""
    draws, job = random.Random(name), job_of(name, of)
    folder = RunFolder(runs / new_job_id(name))
    folder.create(job)
    rows = [row_of(step, draws) for step in range(steps + 1)]
    lines = (json.dumps({"step": row.step, **row.metrics}) + "\n" for row in rows)
    (folder.path / "metrics.jsonl").write_text("".join(lines))
    if rollouts:  # one batch for all steps: what a step costs does not depend on its content
        folder.write_batch(batch_of(1, draws))
        first = folder.path / "rollouts/000001.msgpack"
        for step in range(2, steps + 1):
            os.link(first, folder.path / f"rollouts/{step:06d}.msgpack")
    ended = "paused" if rollouts else "succeeded"
    folder.write_note(Note(created_at=time.time(), finished_at=time.time(), status=ended))
    return folder.path.name


async def main(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    runs = folder / "runs"
    runs.mkdir()
    for number in range(given["jobs"] - 1):
        make_run(runs, f"job-{number}", OTHER_STEPS, of=OTHER_STEPS)
    long = make_run(runs, "long", STEPS, of=10 * STEPS, rollouts=True)
    with running_redis(folder / "redis") as url:
        store = Store(url)
        await store.open()
        await store.recover(find_runs(runs), runs)
        client: Any = store._connection.client
        await client.hset(keys.job(long), mapping={"status": "running", "step": STEPS})
        settings = Settings(runs_dir=runs, log_level="error")
        async with serving([create_service(settings, store, works=False)]) as (address,):
            print(json.dumps({"url": address, "job": long}), flush=True)
            await _add_steps(client, RunFolder(runs / long), long)


async def _add_steps(client: Any, folder: RunFolder, job_id: str) -> None:
    """Reports the steps that stdin asks for, so many at a time, as a worker does."""
    draws, step = random.Random(0), STEPS
    while line := await asyncio.to_thread(sys.stdin.readline):
        count, at_once, pause_s = json.loads(line)
        written: list[float] = []
        for _ in range(0, count, at_once):
            rows = [row_of(step + 1 + at, draws) for at in range(at_once)]
            step += at_once
            folder.append_metrics(rows[-1])
            pipeline = client.pipeline()
            pipeline.hset(keys.job(job_id), "step", step)
            for row in rows:
                pipeline.xadd(keys.events(job_id), _event(row))
            written += [time.time()] * at_once
            await pipeline.execute()
            await asyncio.sleep(pause_s)
        print(json.dumps({"step": step, "written": written}), flush=True)


def _event(row: MetricsRow) -> dict[str, Any]:
    data = {"step": row.step, "steps": 10 * STEPS, "eta_s": 9.0, "metrics": row.metrics}
    return {
        "time": time.time(),
        "type": "step",
        "level": "info",
        "message": f"step {row.step}",
        "data": json.dumps(data),
    }


if __name__ == "__main__":
    quiet()
    asyncio.run(main(json.loads(sys.argv[1])))
