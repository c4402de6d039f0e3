"""Decides whether a job ends before its last step, at its target or budget, or pauses at its cost
limit. What a job has cost follows from the price of an hour.

The decision follows from the rows of metrics, which are on disk before. So every later attempt
decides the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from services.orchestrator.grpo.advantages import reaches
from services.orchestrator.grpo.groups import num_sampled
from services.orchestrator.grpo.metrics import COST, HOURS, REPLAYED, TOKENS
from services.orchestrator.jobs.summary import measured
from shared.errors import BadRequest
from shared.host.logs import get_logger
from shared.job import Job, StopSpec
from shared.plan.gpus import Price, price_of_jobs
from shared.settings import Settings
from shared.wire import Batch, MetricsRow


def price_for(job: Job, settings: Settings) -> Price | None:
    """Returns the price of an hour; None if the settings do not say it. A job with `stop.max_cost`
    needs it: for such a job only, raises BadRequest if there is no price or the table of prices
    cannot be read."""
    try:
        price = price_of_jobs(settings)
    except BadRequest as error:
        if job.stop.max_cost is not None:
            raise
        get_logger().warning("cost of jobs not known", reason=error.detail)
        return None
    if price is None and job.stop.max_cost is not None:
        raise BadRequest(
            f"stop.max_cost is {job.stop.max_cost:g}, and what an hour costs is not known; set "
            "HONE_PRICE_PER_HOUR at the orchestrator, or HONE_GPUS to GPUs that have a price in "
            "HONE_PRICES"
        )
    return price


class Spent:
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

    def go_on_from(self, rows: Sequence[MetricsRow]) -> None:
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
            f"{price.per_hour:g}: {price.source}), and stop.max_cost is {spec.max_cost:g}"
        )


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
