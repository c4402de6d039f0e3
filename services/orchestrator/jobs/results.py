"""What follows from a job's rows of metrics: its best step, which of its batches and checkpoints
are kept, what it has cost, whether it ends before its last step or pauses at its cost limit, and at
its end the summary (`summary.json`).

The rows are on disk before, so every later attempt decides the same.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.errors import BudgetExceeded
from services.orchestrator.grpo.advantages import reaches
from services.orchestrator.grpo.groups import num_sampled
from services.orchestrator.grpo.held_out import IGNORED, metric_prefix
from services.orchestrator.grpo.metrics import COST, HOURS, REPLAYED, TOKENS, WRITTEN
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.writable import ANSWERS_WITHIN_S
from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.host.processes import BoundedProbe
from shared.http.service import hone_version
from shared.job import CheckpointSpec, Job, StopSpec
from shared.wire import Batch, Checkpoint, EvaluationReport, JobRecord, MetricsRow

NOTE_SPENT_S = 60.0
"""Seconds between two notes of the job's hours and cost in the run folder."""


@dataclass(frozen=True)
class Price:
    """The price of an hour of everything that a job has (HONE_PRICE_PER_HOUR)."""

    per_hour: float
    currency: str


class JobUsage:
    """The tokens, hours and cost of the job so far, over all attempts, as metrics of each step. An
    attempt finds `rows`, `hours` and `cost` in the run folder when it begins; repeated hours after
    a failure count. `price` is the price of an hour of this attempt, None if unknown."""

    def __init__(
        self,
        rows: Sequence[MetricsRow],
        hours: float = 0.0,
        price: Price | None = None,
        cost: float = 0.0,
    ) -> None:
        self.price = price
        self._began = time.monotonic()
        self._hours_before = max([hours, *(row.metrics.get(HOURS, 0.0) for row in rows)])
        self._cost_before = max([cost, *(row.metrics.get(COST, 0.0) for row in rows)])
        self._tokens = 0.0

    def continue_from(self, rows: Sequence[MetricsRow]) -> None:
        """Continues after the last of `rows`. Tokens of later steps are counted again."""
        self._tokens = rows[-1].metrics.get(TOKENS, 0.0) if rows else 0.0

    def after(self, batch: Batch) -> dict[str, float]:
        """Returns the totals after the batch has been trained on."""
        self._tokens += sum(map(num_sampled, batch.groups)) + batch.dropped_tokens
        own_hours = self._own_hours  # for both, at the same moment
        cost = {COST: self._cost_with(own_hours)} if self.price else {}
        return {TOKENS: self._tokens, HOURS: self._hours_before + own_hours, **cost}

    @property
    def hours(self) -> float:
        return self._hours_before + self._own_hours

    @property
    def cost(self) -> float:
        """The cost of all attempts with a known price, each at its own price."""
        return self._cost_with(self._own_hours)

    def _cost_with(self, own_hours: float) -> float:
        return self._cost_before + (own_hours * self.price.per_hour if self.price else 0.0)

    @property
    def _own_hours(self) -> float:
        return (time.monotonic() - self._began) / 3600

    def beyond(self, spec: StopSpec) -> str | None:
        """Returns a sentence if the job has reached its cost limit, else None."""
        price, cost = self.price, self.cost
        if spec.max_cost is None or price is None or cost < spec.max_cost:
            return None
        return (
            f"it has cost {cost:.2f} {price.currency} ({self.hours:.3g} hours, now at "
            f"{price.per_hour:g} each), and stop.max_cost is {spec.max_cost:g}"
        )


class Spending:
    """Counts the hours and the cost of an attempt at a job, and notes them in its run folder."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job, self._folder = job, folder
        self._spent: JobUsage | None = None
        self._noting = BoundedProbe[str | None](ANSWERS_WITHIN_S)

    async def begin(self, price: Price | None) -> JobUsage:
        """Begins to count, unless it has begun. Raises BudgetExceeded for a job that has reached
        its cost limit and has more to do."""
        job, rows = self._job, await asyncio.to_thread(self._folder.metrics)
        if self._spent is None:
            hours, cost = await asyncio.to_thread(self._folder.spent)
            self._spent = JobUsage(rows, hours, price, cost)
        has_more = job.steps > 0 and (
            not rows or (rows[-1].step < job.steps and not reason_to_stop(rows[-1], job.stop))
        )
        if has_more and (why := self._spent.beyond(job.stop)):
            raise BudgetExceeded(why)
        return self._spent

    async def keep_noted(self) -> None:
        """Notes hours and cost regularly, so that a killed attempt loses at most NOTE_SPENT_S."""
        while True:
            await asyncio.sleep(NOTE_SPENT_S)
            await self.note()

    async def note(self) -> None:
        """Notes hours and cost, also of an attempt that recorded no row."""
        if (spent := self._spent) is None:
            return

        def write() -> str | None:
            try:
                self._folder.write_spent(spent.hours, spent.cost)
            except (HoneError, OSError, ValueError) as error:
                return str(error)
            return None

        if why := await self._noting.at(write, "its disk hangs"):
            # what becomes of the job matters more
            get_logger().warning("hours not noted", folder=str(self._folder.path), reason=why)


def over_budget(metrics: Mapping[str, float], spec: StopSpec) -> str | None:
    """Returns which budget a step's metrics have reached, as a sentence, else None. Hours do not
    end the job at a replayed step, because it had already gone further."""
    tokens, hours = metrics.get(TOKENS, 0.0), metrics.get(HOURS, 0.0)
    if spec.max_tokens is not None and tokens >= spec.max_tokens:
        return f"{tokens:.0f} tokens were sampled, and stop.max_tokens is {spec.max_tokens}"
    if spec.max_hours is not None and hours >= spec.max_hours and REPLAYED not in metrics:
        return f"it has run for {hours:.3g} hours, and stop.max_hours is {spec.max_hours:g}"
    return None


def at_target(metrics: Mapping[str, float], spec: StopSpec) -> str | None:
    """Returns a sentence if the step's evaluation has reached the target, else None."""
    found = measured(metrics, spec.metric)
    if spec.target is None or found is None or not reaches(found, spec.target):
        return None
    return f"eval/{spec.metric} is {found:.4g}, and stop.target is {spec.target:g}"


def reason_to_stop(row: MetricsRow, spec: StopSpec) -> str | None:
    """Returns why no step follows this one, as a sentence; None if one may."""
    why = over_budget(row.metrics, spec) or at_target(row.metrics, spec)
    return f"stopped after step {row.step}: {why}" if why else None


def best_step(job: Job, rows: Iterable[MetricsRow]) -> int | None:
    """Returns the earliest checkpointed step with the best score, rounding apart. None: no step has
    both checkpoint and evaluation, or the job keeps no best checkpoint."""
    metric = _best_metric(job)
    found = {
        row.step: value
        for row in rows
        if WRITTEN in row.metrics and (value := measured(row.metrics, metric)) is not None
    }
    best = max(found.values(), default=0.0)
    return next((step for step, value in found.items() if reaches(value, best)), None)


def _best_metric(job: Job) -> str | None:
    """Returns the metric of `keep_best`. If the job has only named held-out sets, "reward" is the
    first set's."""
    metric, sets = job.checkpoints.keep_best, job.evaluation.sets
    if metric == CheckpointSpec().keep_best and job.data.eval is None and sets:
        return f"{next(iter(sets))}/{metric}"
    return metric


def measured(metrics: Mapping[str, float], metric: str | None) -> float | None:
    """Returns the metric ("reward", "<set>/reward") of a step's evaluation; None if there is none,
    or its set is ignored."""
    name = (metric or "").partition("/")[0]
    of_set = f"{metric_prefix(name)}errored_rollouts" in metrics
    ignored = metric_prefix(name if of_set else "") + IGNORED
    return None if ignored in metrics else metrics.get(f"eval/{metric}")


def oldest_needed_batch(job: Job, checkpoint_step: int) -> int:
    """Returns the oldest step whose batch is kept once `checkpoint_step` has a checkpoint.

    Batches kept: the newest `rollouts.keep_last`, and all that a trainer replays if it resumes from
    the oldest of the newest `checkpoints.keep_last` checkpoints, the others being damaged.
    """
    if not job.rollouts.keep_last:
        return 1
    spec = job.checkpoints
    regular = range(spec.every, checkpoint_step, spec.every) if spec.every else ()
    oldest = [0, *regular, checkpoint_step][-spec.keep_last :][0]
    return max(min(checkpoint_step - job.rollouts.keep_last, oldest) + 1, 1)


def summarize(
    record: JobRecord,
    rows: Sequence[MetricsRow],
    checkpoint: Checkpoint,
    train_s: float,
    versions: dict[str, Any],
    stopped: str | None = None,
) -> dict[str, Any]:
    """Returns the summary of a job with `rows` of metrics; the first row may be of step 0.
    `train_s` are the seconds of the last attempt, `versions` the services' versions. `stopped` says
    why the job ended before its last step, if it did."""
    evals = [(row.step, row.metrics["eval/reward"]) for row in rows if "eval/reward" in row.metrics]
    return {
        "job": record.id,
        "eval_before": evals[0][1] if evals and evals[0][0] == 0 else None,
        "eval_after": evals[-1][1] if evals else None,
        "evals": evals,
        "steps": rows[-1].step if stopped else record.steps,
        "stopped": stopped,
        "seed": record.job.seed,
        "trained_tokens": int(sum(row.metrics.get("num_tokens", 0.0) for row in rows)),
        "skipped_steps": sum(int(row.metrics.get("skipped_steps", 0)) for row in rows),
        "reward_last": rows[-1].metrics.get("reward"),
        "train_s": round(train_s, 3),
        "wall_s": round(time.time() - record.created_at, 3),
        "seconds_per_step": _seconds_per_step([row.metrics for row in rows if row.step]),
        "checkpoint": checkpoint.path,
        "best_step": best_step(record.job, rows),
        "versions": _versions(versions),
    }


def summarize_evaluation(
    record: JobRecord, report: EvaluationReport, versions: dict[str, Any]
) -> dict[str, Any]:
    """Returns the summary of a job of 0 steps."""
    return {
        "job": record.id,
        "steps": 0,
        "seed": record.job.seed,
        "wall_s": round(time.time() - record.created_at, 3),
        "evaluation": report.model_dump(mode="json"),
        "versions": _versions(versions),
    }


def _versions(services: dict[str, Any]) -> dict[str, Any]:
    return {"hone": hone_version(), "python": platform.python_version(), **services}


def _seconds_per_step(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean seconds of each stage. Evaluations do not count as a stage, nor do replayed
    steps among others: they sample nothing, and the trainer may know their result."""
    steps = [metrics for metrics in steps if REPLAYED not in metrics] or steps
    stages = sorted({name for metrics in steps for name in metrics if name.startswith("time/")})
    return {
        stage.removeprefix("time/"): statistics.fmean(metrics.get(stage, 0.0) for metrics in steps)
        for stage in stages
        if stage != "time/eval"
    }
