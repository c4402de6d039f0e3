"""Reports a run's events, and the record's fields that change with them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.orchestrator.store.connection import StoreUnavailable
from services.orchestrator.store.leases import Lease, LeaseLost
from services.orchestrator.store.store import Store
from shared.host.logs import get_logger
from shared.wire import Checkpoint, MetricsRow, TrainerState

SUPERVISED = "supervised"
"""The metric, 1, of a step that learned the data's answers: it has a loss, and no reward."""

HELD_OUT = re.compile(r"eval/(?:([\w-]+)/)?(reward|loss|pass@1)")


class Journal:
    """Every method raises LeaseLost, and reports nothing, once another worker has the job."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self._store = store
        self._lease = lease

    async def log(self, message: str, **data: Any) -> None:
        await self._store.report(self._lease, "log", message, data)

    async def warn(self, message: str, **data: Any) -> None:
        await self._store.report(self._lease, "log", message, data, level="warning")

    async def error(self, message: str) -> None:
        await self._store.report(self._lease, "log", message, level="error")

    async def aside(self, message: str, warning: bool) -> None:
        """Reports a message that nothing depends on, such as that a service is unreachable or
        reachable again. A failure to report it is only logged: the heartbeat has the same failure
        and handles it."""
        try:
            await (self.warn(message) if warning else self.log(message))
        except (LeaseLost, StoreUnavailable) as error:
            get_logger().warning(
                "a message was not reported to the job's followers", reason=str(error)
            )

    async def loaded(self, state: TrainerState, furthest: int) -> None:
        """Reports that the trainer has loaded the job; `furthest` is the last step done before."""
        ranks = "1 rank" if state.num_ranks == 1 else f"{state.num_ranks} ranks"
        message = (
            f"the trainer has {state.num_parameters:,} parameters as {state.dtype}, {ranks} on "
            f"{state.device}"
        )
        if state.step < furthest:
            message += f"; resumed at step {state.step}: {_steps(state.step + 1, furthest)} again"
        elif state.step:
            message += f"; continuing after step {state.step}"
        for sentence in state.damaged:
            await self.warn(sentence)
        if state.without:
            await self.log(state.without)
        await self._store.report(self._lease, "log", message, step=state.step)

    async def recovering(self, message: str, recoveries: int) -> None:
        """Reports a recovery; `recoveries` is their total number."""
        await self._store.report(
            self._lease, "log", message, level="warning", recoveries=recoveries
        )

    async def checkpoint(self, checkpoint: Checkpoint) -> None:
        message = f"checkpoint {checkpoint.path}"
        await self._store.report(self._lease, "checkpoint", message, checkpoint.model_dump())

    async def row(
        self,
        row: MetricsRow,
        num_steps: int,
        eta_s: float | None = None,
        *,
        currency: str | None = None,
        missing_only: bool = False,
    ) -> None:
        """Adds the row's events; its cost is in `currency`. With `missing_only` adds only events
        that a crash after writing the row left out."""
        step, metrics = row.step, row.metrics
        if shown := _held_out(metrics, "reward") or _held_out(metrics, "loss"):
            right = _held_out(metrics, "pass@1")
            message = f"step {step}: held-out {shown}{f'; {right}' if right else ''}"
            data = {"step": step, "metrics": metrics}
            await self._store.report(self._lease, "eval", message, data, missing_only=missing_only)
        if step:
            reward = metrics.get("reward")
            shown = f"reward {'none' if reward is None else format(reward, '.3f')}"
            if SUPERVISED in metrics:
                shown = f"loss {metrics['loss']:.4f}"
            if row.why_unchanged:
                shown += f"; no weight changed: {row.why_unchanged}"
            await self._store.report(
                self._lease,
                "step",
                f"step {step}/{num_steps}: {shown}",
                {"step": step, "steps": num_steps, "eta_s": eta_s, "metrics": metrics},
                missing_only=missing_only,
                step=step,
                eta_s=eta_s,
                reward=reward,
                cost=metrics.get("total/cost"),
                currency=currency,
            )

    async def operation(self, row: MetricsRow) -> None:
        """Reports an optimizer step of a program."""
        loss, norm = row.metrics["loss"], row.metrics["grad_norm"]
        message = f"operation {row.step}: loss {loss:.4f}, gradient norm {norm:.4f}"
        await self._store.report(self._lease, "log", message, step=row.step)

    async def evaluated(self, model: str, held_out: str, metrics: Mapping[str, float]) -> None:
        """Reports a model's scores on the held-out set `held_out`, in a job of 0 steps. They count
        as progress, as a step does: the store counts attempts without progress."""
        reward = f"{metrics['reward']:.3f}" if "reward" in metrics else "none"
        reward += f"; pass@1 {metrics['pass@1']:.3f}" if "pass@1" in metrics else ""
        message = f"{model}: held-out reward {reward}{f' ({held_out})' if held_out else ''}"
        data = {"model": model, "set": held_out, "metrics": metrics}
        await self._store.report(self._lease, "eval", message, data, tries=0)


def _steps(first: int, last: int) -> str:
    return f"step {first} is trained" if first == last else f"steps {first} to {last} are trained"


def _held_out(metrics: Mapping[str, float], metric: str) -> str:
    """Returns the metric of each held-out set, as `reward 0.512, 0.431 (hard)`, the latter of a
    named set; "" without any."""
    matches = [(HELD_OUT.fullmatch(name), value) for name, value in metrics.items()]
    shown = [
        f"{value:.3f} ({match[1]})" if match[1] else f"{value:.3f}"
        for match, value in matches
        if match and match[2] == metric
    ]
    return f"{metric} {', '.join(shown)}" if shown else ""
