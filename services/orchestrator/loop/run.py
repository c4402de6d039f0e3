"""One attempt at one job: everything around the pipeline. Prepare, go on from where the trainer is,
evaluate, report, keep.

A job is resumed by what is there already: the trainer says which step it is at, the run folder has
the scored batches and the rows of finished steps, and prompts are a function of the step. A step
that was trained but not recorded is asked for again and answered from the trainer's memory. So an
orchestrator that died costs nothing but time. A trainer that came back from a checkpoint is no
other case: the steps since are replayed from the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from pathlib import Path
from typing import Any

from services.orchestrator.loop.evaluation import evaluate
from services.orchestrator.loop.peers import Peers
from services.orchestrator.loop.pipeline import Pipeline, Step, sync_weights
from services.orchestrator.loop.prompts import Prompts, load_prompts
from services.orchestrator.loop.recovery import MAX_RECOVERIES, can_recover
from services.orchestrator.queue.store import Lease, Store, StoreUnavailable
from services.orchestrator.record.folder import RunFolder
from services.orchestrator.record.progress import Progress
from services.orchestrator.record.retention import first_needed
from services.orchestrator.record.telemetry import step_metrics
from services.orchestrator.record.tracking import Tracker
from shared.config import Settings
from shared.errors import Conflict, Failed, HoneError, Unavailable
from shared.service import hone_version
from shared.wire import Checkpoint, JobRecord, MetricsRow, TrainerState

LOGPROB_WARNING = 0.05
"""Nats. Sampler and trainer that differ by more, on average and at staleness 0, are not the same
policy."""


class Run:
    def __init__(self, record: JobRecord, lease: Lease, store: Store, settings: Settings) -> None:
        self._id = record.id
        self._job = record.job
        self._lease = lease
        self._store = store
        self._settings = settings
        self._folder = RunFolder(Path(record.run_dir))
        self._peers = Peers(record.job, settings, record.id, lease.attempt)
        self._tracker = Tracker(record.job, record.id, self._folder.path)
        self._created_at = record.created_at
        self._recoveries = record.recoveries
        self._began = 0.0
        self._warned: set[str] = set()

    async def run(self) -> dict[str, Any]:
        """Returns the job's summary once it has trained its last step. Raises HoneError with a
        sentence for a person."""
        succeeded = False
        try:
            await asyncio.to_thread(self._folder.create, self._job)
            prompts = await asyncio.to_thread(load_prompts, self._job)
            await self._peers.validate_rewards(prompts.columns)
            await self._tracker.start()
            summary = await self._train_with(prompts)
            await asyncio.to_thread(self._folder.write_summary, summary)
            succeeded = True
            return summary
        finally:
            try:
                await self._tracker.finish(succeeded)
            finally:
                await self._peers.close()

    async def _train_with(self, prompts: Prompts) -> dict[str, Any]:
        """Trains. Services that were away or lost their state are put in place again, a few times;
        then the job ends with what to do about it."""
        state = None
        while True:
            try:
                state = await self._prepare()
                return await self._train(prompts, state)
            except HoneError as error:
                if (
                    state
                    and self._recoveries < MAX_RECOVERIES
                    and await can_recover(error, state, self._peers)
                ):
                    await self._report_recovery(error)
                elif isinstance(error, StoreUnavailable) or not isinstance(
                    error, Conflict | Unavailable
                ):
                    raise
                else:
                    raise Failed(
                        f"{error.detail}; if a service was restarted, submit the job again (`hone "
                        "doctor` shows how they are)"
                    ) from error

    async def _prepare(self) -> TrainerState:
        """Loads the job into trainer and sampler, and makes both serve the trainer's last step,
        whatever they did before."""
        self._peers.new_epoch()
        await self._log("loading the model into the trainer and the sampler")
        try:
            state, _ = await asyncio.gather(self._peers.put_job(), self._peers.put_model())
        except Conflict as error:
            raise Failed(error.detail) from error  # refused, and not out of order
        for sentence in state.damaged:
            await self._store.report(self._lease, "log", sentence, level="warning")
        await sync_weights(self._peers, self._job, state.step)
        message = f"{state.num_parameters:,} parameters, {state.dtype}, {state.num_ranks} trainer rank(s) on {state.device}"
        message += f"; going on after step {state.step}" if state.step else ""
        await self._store.report(self._lease, "log", message, step=state.step)
        return state

    async def _report_recovery(self, error: HoneError) -> None:
        self._recoveries += 1
        message = f"{error.detail}; going on from what the trainer has (recovery {self._recoveries} of {MAX_RECOVERIES})"
        await self._store.report(
            self._lease, "log", message, level="warning", recoveries=self._recoveries
        )

    async def _train(self, prompts: Prompts, state: TrainerState) -> dict[str, Any]:
        pipeline = Pipeline(
            self._id,
            self._job,
            prompts,
            self._peers,
            self._folder,
            self._settings.max_missing_rewards,
        )
        done = await asyncio.to_thread(self._folder.start_at, state.step)
        if done is None:
            await self._record(0, await self._evaluate(prompts, 0))
        else:
            await self._report_row(self._folder.metrics(after_step=done - 1)[0], missing_only=True)
        checkpoint = None
        self._began = self._began or time.monotonic()
        progress = Progress(done or 0, self._job.steps)
        async with contextlib.aclosing(pipeline.steps(done or 0)) as steps:
            since = time.monotonic()
            async for step in steps:
                checkpoint = await self._after_step(
                    step, prompts, time.monotonic() - since, progress
                )
                since = time.monotonic()
        train_s = time.monotonic() - self._began
        checkpoint = checkpoint or await self._peers.checkpoint(self._job.steps)
        return self._summary(train_s, checkpoint, await self._peers.versions())

    async def _after_step(
        self, step: Step, prompts: Prompts, step_s: float, progress: Progress
    ) -> Checkpoint | None:
        number, job = step.batch.step, self._job
        eta_s = progress.eta_s(number, replayed=step.replayed)
        metrics = step_metrics(step, job, step_s)
        await self._warn(step, metrics)
        last = number == job.steps
        checkpoint = None
        if last or (job.checkpoints.every and number % job.checkpoints.every == 0):
            checkpoint = await self._peers.checkpoint(number)
            await self._store.report(
                self._lease, "checkpoint", f"checkpoint {checkpoint.path}", checkpoint.model_dump()
            )
            await asyncio.to_thread(self._folder.prune_batches, first_needed(job, number))
        if last or number % job.evaluation.every == 0:
            metrics |= await self._evaluate(prompts, number)
        await self._record(number, metrics, eta_s)
        return checkpoint

    async def _record(
        self, step: int, metrics: dict[str, float], eta_s: float | None = None
    ) -> None:
        """Writes the step's row, then says so: the store knows of nothing that is not on disk."""
        row = MetricsRow(step=step, metrics=metrics)
        await asyncio.to_thread(self._folder.append_metrics, row)
        await self._tracker.log(step, metrics)
        await self._report_row(row, eta_s)

    async def _report_row(
        self, row: MetricsRow, eta_s: float | None = None, *, missing_only: bool = False
    ) -> None:
        """Adds the row's events. With `missing_only`, those that a crash after writing it left
        out."""
        step, metrics = row.step, row.metrics
        if "eval/reward" in metrics:
            message = f"step {step}: held-out reward {metrics['eval/reward']:.3f}"
            await self._store.report(
                self._lease,
                "eval",
                message,
                {"step": step, "metrics": metrics},
                missing_only=missing_only,
            )
        if step:
            reward = metrics.get("reward")
            shown = "none" if reward is None else format(reward, ".3f")
            await self._store.report(
                self._lease,
                "step",
                f"step {step}/{self._job.steps}: reward {shown}",
                {"step": step, "steps": self._job.steps, "eta_s": eta_s, "metrics": metrics},
                missing_only=missing_only,
                step=step,
                eta_s=eta_s,
                reward=reward,
            )

    async def _evaluate(self, prompts: Prompts, version: int) -> dict[str, float]:
        held_out = prompts.held_out()
        start = time.monotonic()
        metrics = await evaluate(self._job, self._id, held_out, self._peers, version)
        return metrics | {"time/eval": time.monotonic() - start} if metrics else {}

    async def _warn(self, step: Step, metrics: dict[str, float]) -> None:
        """Warns of an update that was refused, and once of a sampler that is not the trainer's
        policy."""
        if step.result.skipped:
            message = f"step {step.batch.step}: loss or gradient were not finite, so the step changed no weight"
            await self._store.report(
                self._lease, "log", message, {"step": step.batch.step}, level="warning"
            )
        difference = metrics.get("mismatch/logprob_diff_mean", 0.0)
        if step.staleness == 0 and difference > LOGPROB_WARNING and "mismatch" not in self._warned:
            self._warned.add("mismatch")
            message = (
                f"step {step.batch.step}: the sampler's and the trainer's log-probs differ by "
                f"{difference:.3f} nats on average "
                f"(expected under {LOGPROB_WARNING}): the sampler may not serve the trainer's "
                "weights, or in another precision"
            )
            await self._store.report(
                self._lease, "log", message, {"mismatch": difference}, level="warning"
            )

    async def _log(self, message: str) -> None:
        await self._store.report(self._lease, "log", message)

    def _summary(
        self, train_s: float, checkpoint: Checkpoint, versions: dict[str, Any]
    ) -> dict[str, Any]:
        rows = self._folder.metrics()
        evals = [
            (row.step, row.metrics["eval/reward"]) for row in rows if "eval/reward" in row.metrics
        ]
        times = [
            {name: value for name, value in row.metrics.items() if name.startswith("time/")}
            for row in rows
            if row.step
        ]
        stages = sorted({name for row in times for name in row} - {"time/eval"})
        return {
            "job": self._id,
            "eval_before": evals[0][1] if evals and evals[0][0] == 0 else None,
            "eval_after": evals[-1][1] if evals else None,
            "evals": evals,
            "steps": self._job.steps,
            "seed": self._job.seed,
            "skipped_steps": sum(int(row.metrics.get("skipped_steps", 0)) for row in rows),
            "reward_last": rows[-1].metrics.get("reward"),
            "train_s": round(train_s, 3),
            "wall_s": round(time.time() - self._created_at, 3),
            "seconds_per_step": {
                name.removeprefix("time/"): sum(row.get(name, 0.0) for row in times) / len(times)
                for name in stages
            },
            "checkpoint": checkpoint.path,
            "versions": {"hone": hone_version(), "python": platform.python_version(), **versions},
        }
