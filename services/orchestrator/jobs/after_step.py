"""The end of a step, once its weights serve: warnings, checkpoint, evaluation, row of metrics."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.orchestrator.errors import BudgetExceeded
from services.orchestrator.grpo.groups import MAX_MISSING
from services.orchestrator.grpo.held_out import (
    held_out_sft_examples,
    ignored_metrics,
    losses,
    prefixed_metrics,
    sample_held_out,
)
from services.orchestrator.grpo.metrics import WRITTEN, StepClock, passes, step_metrics
from services.orchestrator.grpo.pipeline import Step
from services.orchestrator.grpo.prompts import Prompts
from services.orchestrator.grpo.supervised import SFTExample, sampling_prompts
from services.orchestrator.jobs.results import (
    JobUsage,
    best_step,
    oldest_needed_batch,
    over_budget,
    reason_to_stop,
)
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.syncing import sync_weights
from services.orchestrator.seams import Tracker
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.leases import Journal
from services.orchestrator.store.registrations import Use
from services.orchestrator.store.run_folders import checkpoint_step
from services.orchestrator.tasks import write_despite_cancel
from shared.host import tracing
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import Batch, Checkpoint, MetricsRow, Part

DIAGNOSED_FIRST, DIAGNOSED_EVERY = 1, 5
"""The steps after which a run is diagnosed: what is wrong from the first step on is said soon, and
later not each time, since all rows and two batches are read. A model that learns to cheat a grader
needs a few steps for it, so ten would be late."""

MAX_DETAIL_CHARS = 200
"""Most characters of the reason why a reward failed."""

UsedBelow = Callable[[Path], Awaitable[Sequence[Use]]]


@dataclass(frozen=True)
class StepEnd:
    """The end of a step: its checkpoint, if any, and `why` the job stops early after it; None: it
    does not, or this was the last step. `over_cost_limit` says that the job has reached its cost
    limit."""

    checkpoint: Checkpoint | None = None
    why: str | None = None
    over_cost_limit: str | None = None


@dataclass
class AfterStep:
    """Ends the steps of one job. Recurring warnings are given only once. `used_below` returns the
    models below a folder that unfinished jobs begin with or evaluate."""

    job: Job
    prompts: Prompts
    services: Services
    folder: RunFolder
    journal: Journal
    tracker: Tracker | None
    spent: JobUsage
    used_below: UsedBelow
    _said: set[str] = field(default_factory=set[str], init=False)
    _clock: StepClock = field(init=False)
    _record_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._clock = StepClock(self.services.status.busy_s)

    async def start(self) -> None:
        """Evaluates the weights that training begins with, as step 0."""
        trace = tracing.begin("step", job=self.services.caller.job_id, step=0)
        with trace.within():
            await self._record(0, await self._evaluate(0), None)
        trace.end()

    def begin(self) -> None:
        """Begins the first step now. Each later step begins when the step before has ended."""
        self._clock.begin()
        self._record_s = 0.0

    async def __call__(self, step: Step, eta_s: float | None) -> StepEnd:
        """Returns the step's checkpoint, if any, and why the job stops after it, if it does. The
        last step always has a checkpoint and an evaluation. Raises BudgetExceeded, once the step is
        on disk, if the job has reached its cost limit and has more to do."""
        with step.trace.within():
            ended = await self._finish(step, eta_s)
        step.trace.end()
        number = step.batch.step
        if ended.over_cost_limit and not ended.why and number < self.job.steps:
            raise BudgetExceeded(f"after step {number}: {ended.over_cost_limit}")
        return ended

    async def _finish(self, step: Step, eta_s: float | None) -> StepEnd:
        number, spec = step.batch.step, self.job.stop
        metrics = step_metrics(step, self.job, self.prompts.num_skipped(number))
        metrics |= self.spent.after(step.batch) | passes(number, self.job, self.prompts.num_train)
        await self._warn(step, metrics)
        last = number == self.job.steps or over_budget(metrics, spec) is not None
        budget_exceeded = None if step.replayed else self.spent.beyond(spec)
        checkpoint = None
        if last or budget_exceeded or _due(number, self.job.checkpoints.every):
            checkpoint = await self._checkpoint(number, metrics)
        if last or _due(number, self.job.evaluation.every):
            metrics |= await self._evaluate(number, serves=step.serves)
        why = self.why_ended(MetricsRow(step=number, metrics=metrics))
        if why and checkpoint is None:
            checkpoint = await self._checkpoint(number, metrics)
        metrics |= {"time/record": self._record_s, **self._clock.end()}
        await self._record(number, metrics, eta_s)
        if last or number == DIAGNOSED_FIRST or _due(number, DIAGNOSED_EVERY):
            await self._diagnose(number)
        return StepEnd(checkpoint, why, budget_exceeded)

    def why_ended(self, row: MetricsRow) -> str | None:
        """Returns why the job stops early after the row's step; None if it does not."""
        return reason_to_stop(row, self.job.stop) if row.step < self.job.steps else None

    async def end_at(self, number: int) -> Checkpoint:
        """Returns the checkpoint of a step of an earlier attempt that turns out to be the last.
        Evaluates it too, unless that was done."""
        rows = {row.step: row for row in await asyncio.to_thread(self.folder.metrics)}
        before = rows[number].metrics if number in rows else {}
        found: dict[str, float] = {}
        checkpoint = await self._checkpoint(number, found)
        if not any(name.startswith("eval/") for name in before):
            found |= await self._evaluate(number)
        row = MetricsRow(step=number, metrics=found | before)
        await write_despite_cancel(self.folder.replace_metrics, row)
        await self.repeat_events(row)
        return checkpoint

    async def repeat_events(self, row: MetricsRow) -> None:
        """Reports events of a row on disk that a crash left out."""
        await self.journal.row(row, self.job.steps, currency=self._currency, missing_only=True)

    @property
    def _currency(self) -> str | None:
        return self.spent.price.currency if self.spent.price else None

    async def _checkpoint(self, number: int, metrics: dict[str, float]) -> Checkpoint:
        """Writes the step's checkpoint, and adds its seconds to the metrics."""
        start = time.monotonic()
        checkpoint = await self.checkpoint(number)
        metrics[WRITTEN] = time.monotonic() - start
        return checkpoint

    async def checkpoint(self, number: int, patience_s: float | None = None) -> Checkpoint:
        """Writes the checkpoint of the trainer's last step, and removes batches that no checkpoint
        needs. `patience_s` is of `TrainerClient.checkpoint`."""
        await write_despite_cancel(
            self.folder.check_there
        )  # else the trainer would make the folder
        best = best_step(self.job, await asyncio.to_thread(self.folder.metrics))
        kept = await self._used_by_others() | ({best} if best is not None else set())
        checkpoint = await self.services.trainer.checkpoint(number, tuple(sorted(kept)), patience_s)
        await self.journal.checkpoint(checkpoint)
        await write_despite_cancel(self.folder.prune_batches, oldest_needed_batch(self.job, number))
        return checkpoint

    async def _used_by_others(self) -> set[int]:
        """Returns the steps whose checkpoints other jobs use as models, and logs which jobs."""
        steps: set[int] = set()
        for use in await self.used_below(self.folder.checkpoints):
            if (step := checkpoint_step(use.path, self.folder.checkpoints)) is not None:
                steps.add(step)
                message = (
                    f"the checkpoint of step {step} stays until job {use.job_id!r} has ended, "
                    f"which is {use.status} and uses it as a model"
                )
                if self._is_new(f"used {step} {use.job_id}"):
                    await self.journal.log(message)
        return steps

    async def _evaluate(self, version: int, *, serves: bool = True) -> dict[str, float]:
        """Returns the evaluation of the version, once it serves."""
        if not self.job.evaluates:
            return {}
        start = time.monotonic()
        if not serves:  # a budget ended the job between two syncs
            await sync_weights(self.services, self.folder, version, self.journal)
        metrics: dict[str, float] = {}
        if self.job.trains_without_sampling:
            with tracing.span("eval", version=version):
                metrics |= await self._held_out_losses(version)
        if not self.job.rewards:
            return metrics | {"time/eval": time.monotonic() - start}
        held_out = await asyncio.to_thread(self.prompts.held_out)
        with tracing.span("eval", version=version):
            for name, prompts in held_out.items():
                problems = sampling_prompts(prompts, self.job)
                answers_P = await sample_held_out(self.job, name, problems, self.services, version)
                metrics |= prefixed_metrics(name, answers_P)
                stored = [rollout for answers in answers_P for rollout in answers.stored]
                await write_despite_cancel(self.folder.write_held_out, name, version, stored)
        too_many = ignored_metrics(metrics, held_out)
        for name, share in too_many.items():
            await self.journal.warn(
                f"step {version}: {share:.0%} of the completions of an evaluation have no reward, "
                f"more than {MAX_MISSING:.0%}, so neither stop.target nor checkpoints.keep_best "
                f"takes it into account ({name})",
                step=version,
            )
        return metrics | too_many | {"time/eval": time.monotonic() - start}

    async def _held_out_losses(self, step: int) -> dict[str, float]:
        def read() -> dict[str, list[SFTExample]]:
            return {each.name: held_out_sft_examples(self.job, each) for each in self.prompts.sets}

        return await losses(self.job, await asyncio.to_thread(read), self.services, step)

    async def _record(self, number: int, metrics: dict[str, float], eta_s: float | None) -> None:
        """Writes the step's row to disk, and then reports it: the store never knows of rows that
        are not on disk."""
        start = time.monotonic()
        row = MetricsRow(step=number, metrics=metrics)
        await write_despite_cancel(self.folder.append_metrics, row)
        await write_despite_cancel(self.folder.write_spent, self.spent.hours, self.spent.cost)
        if self.tracker:
            self.tracker.log(number, metrics)
        await self.journal.row(row, self.job.steps, eta_s, currency=self._currency)
        if self.tracker and self.tracker.trouble:
            await self._warn_once("tracker", self.tracker.trouble)
        self._record_s = time.monotonic() - start

    async def _warn(self, step: Step, metrics: dict[str, float]) -> None:
        number = step.batch.step
        if step.result.skipped:
            await self.journal.warn(
                f"step {number}: loss or gradient were not finite, so the step changed no weight",
                step=number,
            )
        if step.num_resampled:
            await self.journal.warn(
                f"step {number}: {step.num_resampled} extra sampling(s), of groups by weights of "
                "another version than requested",
                step=number,
            )
        for failing in failing_rewards(step.batch):
            await self.journal.warn(f"step {number}: {failing}", step=number)

    async def _diagnose(self, number: int) -> None:
        """Reports what is wrong with the run, each kind once: the same findings as the API's."""
        try:
            found = await asyncio.to_thread(
                self.services.extensions.diagnose, self.folder, self.job
            )
        except Exception as error:  # a fault of the diagnosis must not stop what it looks at
            get_logger().error("the run was not diagnosed", step=number, reason=repr(error))
            return
        for finding in found:
            if finding.level != "notice":
                await self._warn_once(
                    finding.code,
                    f"step {number}: {finding.title}; probably {finding.cause}; {finding.remedy}",
                    finding=finding.model_dump(mode="json"),
                )

    async def _warn_once(self, name: str, message: str, **data: Any) -> None:
        if self._is_new(name):
            await self.journal.warn(message, **data)

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._said
        self._said.add(name)
        return is_new


def failing_rewards(batch: Batch) -> list[str]:
    """Returns a sentence for each reward that failed on some completions of a row but not on
    others, and for each that is missing."""
    scores = [score for scores_G in (*batch.scores, *batch.dropped) for score in scores_G]
    found: dict[tuple[str, bool], list[Part]] = defaultdict(list)
    for label, part in (one for score in scores for one in score.parts.items()):
        if part.errors:
            found[label, part.value is None].append(part)
    return [
        f"reward {label!r} {'is missing for' if is_missing else 'fails on'} {len(parts)} of "
        f"{len(scores)} completions{'' if is_missing else ', which get the least of their row'} "
        f"({parts[0].detail[:MAX_DETAIL_CHARS]})"
        for (label, is_missing), parts in found.items()
    ]


def _due(number: int, every: int | None) -> bool:
    return bool(every) and number % every == 0
