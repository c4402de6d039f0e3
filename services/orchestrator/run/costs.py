"""The price of an hour of a running job."""

from __future__ import annotations

from shared.errors import BadRequest
from shared.host.logs import get_logger
from shared.job import Job
from shared.plan.prices import Price, price_of_jobs
from shared.settings import Settings


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
