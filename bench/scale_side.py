"""One process of `bench.scale`: simulated samplers, the trainer and grader beside them, or the
orchestrator's own loop. Arguments are one JSON object; what it measured is its last line."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from bench.side import quiet, serving
from shared.http.service import Service
from shared.settings import Settings
from shared.wire import (
    FolderWeights,
    GenerateRequest,
    Logprobs,
    ModelRequest,
    Part,
    PublishRequest,
    Rollout,
    RolloutGroup,
    Score,
    ScoreRequest,
    ScoreResult,
    ServingWeights,
    Span,
    StepResult,
    TokenIds,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    WeightsRef,
)

CHARACTERS_PER_TOKEN = 4
MEDIAN_TOKENS, SPREAD = 900, 1.0
"""Lengths are log-normal: a mean of about 1,400 tokens, and 1 % at the limit of 8,192."""


@dataclass(frozen=True)
class Load:
    """What is simulated. A sampler samples `slots` completions at once, each at `tokens_per_s`."""

    num_samplers: int
    num_prompts: int
    num_steps: int
    max_staleness: int
    slots: int
    tokens_per_s: float
    group_size: int = 16
    max_tokens: int = 8192
    num_processes: int = 4


def length(seed: int, load: Load) -> int:
    """Returns the length in tokens of the completion with this seed, of any sampler."""
    drawn = MEDIAN_TOKENS * random.Random(seed).lognormvariate(0.0, SPREAD)
    return max(1, min(int(drawn), load.max_tokens))


# --- the samplers --------------------------------------------------------------------------------


class SimulatedSampler:
    """The real contract, and tokens that took the time of their number."""

    def __init__(self, load: Load, number: int, settings: Settings) -> None:
        self._load = load
        self._name = f"replica-{number}"
        self._room = asyncio.Semaphore(load.slots)
        self._ids = os.urandom(load.max_tokens * 4)
        self._logprobs = Logprobs([-0.5] * load.max_tokens).data
        self._text = "abcd" * load.max_tokens
        self._serving = ServingWeights()
        self._busy = 0
        self.lengths: list[tuple[int, int]] = []
        self.first_at, self.last_at = float("inf"), 0.0
        self.service = Service("rollout", settings, busy=lambda: self._busy)
        self.service.operation("PUT", "/model", self._put_model, key=lambda _: "")
        self.service.operation("POST", "/reload_weights", self._reload, key=lambda _: "")
        self.service.operation("POST", "/generate", self._generate)
        self.service.query("/weights", self._weights)

    async def _put_model(self, body: ModelRequest) -> ServingWeights:
        self._serving = ServingWeights(model=body.model, max_num_seqs=self._load.slots)
        return self._serving

    async def _reload(self, request: WeightsRef) -> ServingWeights:
        ref = request.root
        update = {"version": ref.version, "digest": ref.digest, "job_id": ref.job_id}
        self._serving = self._serving.model_copy(update=update)
        return self._serving

    async def _weights(self) -> ServingWeights:
        return self._serving

    async def _generate(self, body: GenerateRequest) -> RolloutGroup:
        assert body.sampling.seed is not None, "the job is repeatable"
        version = self._serving.version
        assert version is not None, "weights come first"
        seeds = range(body.sampling.seed, body.sampling.seed + body.sampling.n)
        lengths = [length(seed, self._load) for seed in seeds]
        self._busy += len(lengths)
        self.first_at = min(self.first_at, time.monotonic())
        await asyncio.gather(*map(self._sample, lengths))
        self.last_at = time.monotonic()
        return RolloutGroup(
            prompt_token_ids=TokenIds((1, 2, 3)),
            rollouts=tuple(self._rollout(tokens, version) for tokens in lengths),
            replica=self._name,
        )

    async def _sample(self, tokens: int) -> None:
        async with self._room:
            await asyncio.sleep(tokens / self._load.tokens_per_s)
        self._busy -= 1

    def _rollout(self, tokens: int, version: int) -> Rollout:
        self.lengths.append((version, tokens))
        return Rollout(
            text=self._text[: tokens * CHARACTERS_PER_TOKEN],
            token_ids=TokenIds(self._ids[: tokens * 4]),
            logprobs=Logprobs(self._logprobs[: tokens * 4]),
            finish_reason="length" if tokens == self._load.max_tokens else "stop",
            spans=(Span(version=version, start=0),),
        )


async def samplers(load: Load, numbers: list[int], settings: Settings) -> None:
    """Serves these samplers; prints their URLs, and at the end of stdin what they sampled."""
    simulated = [SimulatedSampler(load, number, settings) for number in numbers]
    async with serving([each.service for each in simulated]) as urls:
        print(json.dumps(urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    told = {
        "first_at": min(each.first_at for each in simulated),
        "last_at": max(each.last_at for each in simulated),
        "num_tokens": sum(tokens for each in simulated for _, tokens in each.lengths),
        "num_completions": sum(len(each.lengths) for each in simulated),
    }
    print(json.dumps(told), flush=True)


# --- trainer and grader --------------------------------------------------------------------------


class Others:
    """A trainer that learns nothing in no time, and a grader with random rewards."""

    def __init__(self, settings: Settings) -> None:
        self._step = 0
        self._random = random.Random(0)
        trainer, reward = Service("trainer", settings), Service("reward", settings)
        trainer.operation("PUT", "/job", self._put_job)
        trainer.operation("POST", "/train_step", self._train)
        trainer.operation("POST", "/publish_weights", self._publish)
        reward.operation("POST", "/score", self._score)
        self.services = [trainer, reward]

    async def _put_job(self, body: TrainerJob) -> TrainerState:
        return TrainerState(
            job_id=body.job_id, step=0, num_ranks=1, dtype="", device="", num_parameters=1
        )

    async def _train(self, body: TrainStepRequest) -> StepResult:
        self._step = body.step
        return StepResult(
            step=body.step,
            loss=0.0,
            grad_norm=1.0,
            learning_rate=0.0,
            num_examples=len(body.examples),
            num_tokens=sum(len(example.token_ids) for example in body.examples),
            train_s=0.0,
        )

    async def _publish(self, body: PublishRequest) -> WeightsRef:
        weights = FolderWeights(
            job_id=body.job_id,
            attempt=body.attempt,
            epoch=body.epoch,
            version=body.version,
            method="shm",
            path="/none",
            digest=str(body.version),
            size_bytes=1,
        )
        return WeightsRef(weights)

    async def _score(self, body: ScoreRequest) -> ScoreResult:
        values = [float(self._random.random() < 0.5) for _ in body.items]
        return ScoreResult(scores=tuple(Score(value=v, parts={"r": Part(value=v)}) for v in values))


async def others(settings: Settings) -> None:
    async with serving(Others(settings).services) as urls:
        print(json.dumps(urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    print("{}", flush=True)


# --- the orchestrator's loop ---------------------------------------------------------------------


class Silent:
    """A journal that no one reads."""

    async def log(self, message: str, **_: Any) -> None: ...

    async def warn(self, message: str, **_: Any) -> None:
        print(message, file=sys.stderr)


async def loop(load: Load, urls: dict[str, str], settings: Settings, folder: Path) -> None:
    """Runs the real pipeline over the simulated services; prints what it took."""
    from services.orchestrator.grpo.batches import Batches
    from services.orchestrator.grpo.pipeline import Pipeline
    from services.orchestrator.grpo.prompts import load_prompts
    from services.orchestrator.samplers.services import Services
    from services.orchestrator.samplers.syncing import sync_weights
    from services.orchestrator.store.folder import RunFolder
    from services.orchestrator.store.journal import Journal

    job = _job(load, folder)
    run = RunFolder(folder / "run")
    run.create(job)
    prompts = load_prompts(job, settings)
    services = Services(job, settings.model_copy(update=urls), "scale", 1)
    journal = cast(Journal, Silent())
    services.new_epoch()
    await asyncio.gather(services.put_job(), services.put_model())
    await sync_weights(services, run, job, 0, journal)
    before_bytes, cpu_before, began_at = _peak_bytes(), time.process_time(), time.monotonic()
    groups = batch_bytes = 0
    steps_s: list[dict[str, float]] = []
    lengths_K: list[list[int]] = []
    pipeline = Pipeline(
        job, Batches("scale", job, prompts, services, run, 0.5), services, run, journal
    )
    async with contextlib.aclosing(pipeline.steps(0)) as steps:
        async for step in steps:
            rollouts = [rollout for group in step.batch.groups for rollout in group.rollouts]
            lengths_K.append([len(rollout.token_ids) for rollout in rollouts])
            steps_s.append({name: round(value, 3) for name, value in step.seconds.items()})
            groups += len({id(group) for group in step.batch.groups})
            files = [*(run.path / "rollouts").iterdir()]
            batch_bytes = max(batch_bytes, *(file.stat().st_size for file in files))
            del step, rollouts
    told = {
        "seconds": time.monotonic() - began_at,
        "cpu_s": time.process_time() - cpu_before,
        "peak_bytes": _peak_bytes() - before_bytes,
        "batch_bytes": batch_bytes,
        "num_tokens": sum(map(sum, lengths_K)),
        "num_groups": groups,
        "steps_s": steps_s,
        "lengths": lengths_K,
    }
    await services.close()
    print(json.dumps(told), flush=True)


def _job(load: Load, folder: Path) -> Any:
    from shared.job import Job

    data = folder / "train.jsonl"
    rows = load.num_prompts * load.num_steps
    data.write_text("".join(json.dumps({"prompt": f"{row}?"}) + "\n" for row in range(rows)))
    return Job.model_validate(
        {
            "name": "scale",
            "model": "simulated",
            "steps": load.num_steps,
            "max_staleness": load.max_staleness,
            "data": {"train": str(data)},
            "sampling": {
                "prompts_per_step": load.num_prompts,
                "group_size": load.group_size,
                "max_tokens": load.max_tokens,
                "repeatable": True,
            },
            "rewards": [{"grader": "length"}],
        }
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# --- what other schedules would do ---------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """How places are given to completions: to the longest of a step first (`sort`: an ideal, since
    lengths are not known in advance), or in the order of asking. `between_s` are the seconds
    after each step's batch in which it is stored, trained on and synced."""

    sort: bool
    between_s: tuple[float, ...] = ()

    def idle_share(self, load: Load, lengths_K: list[list[int]]) -> float:
        """Returns the idle share of all places, for lengths `[step][completion]`.

        Every place takes any completion, of the earliest step first. Completions of step k begin
        once step k - 1 - max_staleness serves, as the loop may.
        """
        free = [0.0] * (load.num_samplers * load.slots)
        serves: list[float] = []
        sampled = 0.0
        for step, lengths in enumerate(lengths_K):
            gate = serves[step - 1 - load.max_staleness] if step > load.max_staleness else 0.0
            for tokens in sorted(lengths, reverse=True) if self.sort else lengths:
                end = max(heapq.heappop(free), gate) + tokens / load.tokens_per_s
                heapq.heappush(free, end)
                sampled = max(sampled, end)
            between_s = self.between_s[step] if self.between_s else 0.0
            serves.append(max([sampled, *serves[-1:]]) + between_s)
        work_s = sum(map(sum, lengths_K)) / load.tokens_per_s
        return 1 - work_s / (len(free) * sampled)


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    load = Load(**given["load"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(
            runs_dir=folder,
            log_level="error",
            hedge_s=3600.0,
            replica_patience_s=60.0,  # these samplers never die: a busy machine keeps them waiting
        )
        quiet()
        if given["part"] == "samplers":
            asyncio.run(samplers(load, given["numbers"], settings))
        elif given["part"] == "others":
            asyncio.run(others(settings))
        else:
            asyncio.run(loop(load, given["urls"], settings, folder))


def argument(part: str, load: Load, **more: Any) -> str:
    return json.dumps({"part": part, "load": asdict(load), **more})


if __name__ == "__main__":
    main()
