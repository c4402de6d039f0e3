"""The plan of a job: what it needs, where it fits, how long it takes and what it costs.

The price of an hour of the GPUs is from the settings or from a table in a file that users edit. The
file is TOML, a table for each provider: `currency`, `date` and `source` of the prices, and the
price of an hour by the name of the GPU. `prices.toml` beside this module is used unless HONE_PRICES
names another.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from shared.errors import BadRequest
from shared.explain import nearest
from shared.job import Job
from shared.job.checks import check_groups
from shared.plan import rates
from shared.plan.gpus import TABLE, Gpu, GpuGroup, parse_gpus, visible_gpus
from shared.plan.memory import GIB
from shared.plan.model import Model, UnknownModelSize
from shared.plan.placement import enough_gpus, placements, remedies
from shared.settings import Settings
from shared.weights.model_folder import limit_of
from shared.wire.records import Cost, Placement, Plan, PromptLengths

OWN = Path(__file__).with_name("prices.toml")
HEADS = ("currency", "date", "source")


@dataclass(frozen=True)
class Price:
    """The price of an hour of everything in `currency`, and its source as part of a sentence."""

    per_hour: float
    currency: str
    source: str


def price_per_hour(settings: Settings, pools: tuple[GpuGroup, ...]) -> Price | None:
    """Returns the price of an hour of `pools`: HONE_PRICE_PER_HOUR if it is set, else the sum of
    the table's prices; None if a GPU is not in the table. Raises BadRequest for a table that cannot
    be read."""
    if settings.price_per_hour is not None:
        return Price(settings.price_per_hour, settings.currency, "HONE_PRICE_PER_HOUR")
    prices, currency, source = read_prices(settings)
    if any(pool.gpu.name not in prices for pool in pools):
        return None
    total = sum(pool.count * prices[pool.gpu.name] for pool in pools)
    return Price(round(float(total), 4), currency, source)


def price_of_jobs(settings: Settings) -> Price | None:
    """Returns the price of an hour of a running job by the settings alone: HONE_PRICE_PER_HOUR, or
    the table's prices of HONE_GPUS. None if neither is set."""
    if settings.price_per_hour is None and settings.gpus is None:
        return None
    pools = parse_gpus(settings.gpus, "HONE_GPUS") if settings.gpus else ()
    return price_per_hour(settings, pools)


def read_prices(settings: Settings) -> tuple[dict[str, float], str, str]:
    """Returns HONE_PROVIDER's prices of an hour by GPU in HONE_PRICES, their currency, and their
    source as part of a sentence. Raises BadRequest with what is wrong and where."""
    path = settings.prices or OWN
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"HONE_PRICES {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"HONE_PRICES {str(path)!r} is not valid TOML: {error}") from error
    table: Any = tables.get(settings.provider)
    if not isinstance(table, dict):
        hint = nearest(settings.provider, list(tables), "the providers there")
        raise BadRequest(f"{path} has no table [{settings.provider}] (HONE_PROVIDER); {hint}")
    prices = dict(cast(dict[str, Any], table))
    where = f"{path}: [{settings.provider}]"
    currency, date, source = (prices.pop(head, None) for head in HEADS)
    if not isinstance(currency, str) or not isinstance(source, str):
        raise BadRequest(f'{where} needs currency = "..." and source = "..."; got {table!r:.200}')
    if not isinstance(date, datetime.date):
        raise BadRequest(f"{where} needs date = YYYY-MM-DD, the day of its prices; got {date!r}")
    for name, price in prices.items():
        if name not in TABLE:
            hint = nearest(name, list(TABLE), "the GPUs")
            raise BadRequest(f"{where} has a price of {name!r}, which is no GPU known here; {hint}")
        if isinstance(price, bool) or not isinstance(price, int | float) or price < 0:
            raise BadRequest(f"{where} {name} is {price!r}; expected a price per hour, 0 or more")
    return prices, currency, f"prices of {settings.provider} on {date.isoformat()} ({source})"


PROMPT_TOKENS = 512
"""Assumed tokens of a prompt where the lengths of prompts are unknown."""

UNKNOWN = PromptLengths()

LEAST_HOST_GIB = 1.0
"""Least GiB of host memory that a plan notes."""


def planned_gpus(settings: Settings) -> tuple[GpuGroup, ...]:
    """Returns the GPUs to plan for: HONE_GPUS, else this machine's GPUs. Raises BadRequest."""
    return parse_gpus(settings.gpus, "HONE_GPUS") if settings.gpus else visible_gpus()


def make_plan(
    job: Job,
    model: Model,
    settings: Settings,
    pools: tuple[GpuGroup, ...],
    lengths: PromptLengths = UNKNOWN,
    measured: rates.MeasuredRates | None = None,
) -> Plan:
    """Returns the job's plan on these GPUs, with the `lengths` of its prompts (without a number of
    prompts they were given) and the `measured` rates of a similar run, as far as they are known.
    Raises BadRequest for prices that cannot be read, for prompts and completions beyond the model's
    context, and for groups of one; UnknownModelSize for a job of 0 steps."""
    check_groups(job)
    if not job.trains:
        raise UnknownModelSize("steps is 0: the job only evaluates, and plans are of training")
    needs = _needs(job, model, settings, lengths)
    if measured is not None:
        needs = replace(needs, completion_tokens=max(1, round(measured.completion_tokens)))
    best, *others = placements(needs, pools)
    if measured is not None and best.fits:
        best = best.model_copy(update={"time": rates.time_by_run(needs, measured)})
    price = price_per_hour(settings, pools)
    return Plan(
        model=job.model,
        num_parameters=model.num_parameters,
        num_trainable=model.num_trainable(job.lora),
        learning_rate=job.learning_rate,
        dtype=needs.dtype(pools[0].gpu),
        gpus=",".join(map(str, pools)),
        fits=best.fits,
        placement=best,
        others=tuple(others),
        changes=() if best.fits else remedies(needs, pools),
        enough=() if best.fits else enough_gpus(needs, pools),
        steps=job.steps,
        prompt_tokens=needs.prompt_tokens,
        completion_tokens=needs.completion_tokens,
        cost=_cost(job, best, price),
        notes=tuple(_notes(needs, lengths, measured, best, price, pools[0].gpu)),
    )


def _needs(job: Job, model: Model, settings: Settings, lengths: PromptLengths) -> rates.PlanInput:
    """Returns the input of placements. Raises BadRequest if completions leave no room for a
    prompt, or for the longest one."""
    completion = job.sampling.max_tokens
    holds, what = limit_of(job.max_model_len, model.max_len) or (model.max_len, "the model")
    if job.trains_without_sampling:  # given answers have no limit of their own: half is for prompts
        completion = min(completion, max(holds // 2, 1))
        sampling = job.sampling.model_copy(update={"max_tokens": completion})
        job = job.model_copy(update={"sampling": sampling})
    if completion >= holds:
        raise BadRequest(
            f"sampling.max_tokens is {completion}, and {what} holds {holds} tokens of prompt "
            f"and completion together; expected at most {holds - 1}, and room for the prompts"
        )
    room, longest = holds - completion, lengths.longest
    if longest is not None and longest > room and job.sampling.overlong_prompts == "error":
        raise BadRequest(
            f"prompts of {longest} tokens leave no room for sampling.max_tokens {completion}: "
            f"{what} holds {holds} tokens of both together; lower sampling.max_tokens, or set "
            'sampling.overlong_prompts to "drop" or "truncate"'
        )
    prompt = min(PROMPT_TOKENS if longest is None else longest, room)
    return rates.PlanInput(
        job, model, prompt, completion, settings, longest is not None and lengths.is_all
    )


def _cost(job: Job, placement: Placement, price: Price | None) -> Cost | None:
    if price is None or placement.time is None:
        return None
    step_hours = placement.time.step_s / 3600
    hours = job.steps * step_hours if job.steps else None
    return Cost(
        currency=price.currency,
        per_hour=price.per_hour,
        per_step=round(step_hours * price.per_hour, 6),
        hours=None if hours is None else round(hours, 4),
        total=None if hours is None else round(hours * price.per_hour, 4),
        source=price.source,
    )


def _notes(
    needs: rates.PlanInput,
    lengths: PromptLengths,
    measured: rates.MeasuredRates | None,
    placement: Placement,
    price: Price | None,
    gpu: Gpu,
) -> Iterator[str]:
    """Yields what is unknown or assumed."""
    job, time = needs.job, placement.time
    if lengths.longest is None:
        why = f": {lengths.why_not}" if lengths.why_not else ""
        yield f"prompts are taken to be of {needs.prompt_tokens} tokens (--prompt-tokens){why}"
    elif lengths.num and lengths.is_all:
        yield f"the longest of all {lengths.num} prompts has {lengths.longest} tokens"
    elif lengths.num:
        yield (
            f"the longest of {lengths.num} prompts that were counted has {lengths.longest} tokens; "
            "there may be longer ones"
        )
    if measured is not None and measured.overlapped:
        yield (
            "the measured run sampled ahead (max_staleness), so its sampling times are of several "
            "batches at once"
        )
    if measured is None and time is not None:
        what = "answers" if job.trains_without_sampling else "completions"
        yield (
            f"{what} are taken to be as long as sampling.max_tokens ({job.sampling.max_tokens}"
            f"), and times are from {_source(gpu)}; `hone plan --measured RUN` takes the times of "
            "a run"
        )
    if job.shares_as is not None and needs.settings.places > 1 and placement.kind != "turns":
        # a float32 master and Adam's two moments of each trained parameter; the plan counts all
        # the adapters in the sampler already
        host_gib = 12 * needs.model.num_trainable(job.lora) / GIB
        yield (
            f"{needs.settings.places} jobs of this base model and adapter share the trainer and "
            f"its samplers (HONE_ROLLOUT_ADAPTERS); each further one takes {host_gib:.2f} GiB of "
            "the host's memory"
        )
    host = placement.trainer_ranks * placement.trainer.host_gib
    if host >= LEAST_HOST_GIB:
        yield f"the ranks need {host:.1f} GiB of the host's memory, which is not checked"
    if placement.fits and time is None:
        unknown = "the time of a step is not estimated"
        yield (
            f"{unknown}: the rates of this processor could not be measured: {gpu.no_rates_because}"
            if gpu.no_rates_because
            else f"{unknown}: there are no rates for {gpu.name}"
        )
    if time is not None and price is None and not gpu.is_cpu:
        yield "no price is known for these GPUs (HONE_PRICES, HONE_PRICE_PER_HOUR)"
    if job.steps == 0:
        yield "steps is 0, and data.epochs sets the number of steps; a dry run counts them"


def _source(gpu: Gpu) -> str:
    """Returns where the rates come from, in words, with how far they can be trusted."""
    if not gpu.is_cpu:
        return "data sheets"
    return (
        f"a short measurement of this machine's processor ({1000 * gpu.float32_tflops:.0f} GFLOP/s "
        f"in float32, {gpu.bandwidth_gb_s:.0f} GB/s), taken to be idle: they may be wrong by a "
        "factor of 2, and other work on the machine adds to them"
    )
