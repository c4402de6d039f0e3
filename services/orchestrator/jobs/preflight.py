"""The checks of a job before it runs, in one list: for submissions, dry runs, and the start of each
attempt. They refuse what would fail the job later, or let it learn nothing. The start of an attempt
repeats those whose result may have changed since the submission."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from services.orchestrator.data.choosing import MAX_SHOWN, preview, prompt_warnings
from services.orchestrator.data.hub import cached_model, named_model_folder
from services.orchestrator.data.order import History
from services.orchestrator.data.sources import fetch, source_requests
from services.orchestrator.data.tables import ArrowTable, notes_of
from services.orchestrator.errors import CheckFailed, CheckNeeds
from services.orchestrator.grpo.advantages import outcomes
from services.orchestrator.grpo.prompts import Prompts, load_held_out, load_prompts, with_steps
from services.orchestrator.grpo.supervised import sft_examples
from services.orchestrator.jobs.check_executor import CheckExecutor
from services.orchestrator.jobs.prompt_checks import check_rows, counted
from services.orchestrator.jobs.results import Price
from services.orchestrator.samplers.clients import Trial
from services.orchestrator.samplers.discovery import cpu_warning
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.status import Caller
from services.orchestrator.store.records import Submission
from services.orchestrator.store.run_folders import (
    accept,
    check_allowed,
    check_start,
    complete_submission,
)
from services.orchestrator.store.store import Store
from services.orchestrator.writable import RunsDirCheck
from shared.errors import BadRequest, Failed, HoneError, Unavailable
from shared.explain import sentences
from shared.job import SYNC_METHODS, Job
from shared.job.checks import check_groups
from shared.settings import Settings
from shared.weights.architectures import cannot_reload_on_cpu, untested_warning
from shared.weights.folders import stored_tensors
from shared.weights.model_folder import (
    check_config,
    check_model_folder,
    check_rope,
    cpu_limit,
    read_config,
)
from shared.wire import CreateFineTuningJob, JobRecord, PreviewedPrompt, Prompt, PromptLengths


@dataclass(frozen=True)
class Check:
    """A check by the name that errors use."""

    name: str
    needs: CheckNeeds
    run: Callable[[Preflight], Awaitable[None]]
    at_start: bool = False


@dataclass(frozen=True)
class AcceptedData:
    """What is known of a job's data at the start of an attempt: the `versions` that it must have,
    and the verdicts on the job's groups so far."""

    versions: Mapping[str, str]
    history: History


@dataclass(frozen=True)
class Inspection:
    """What a job's data is: `columns`, `num_train` and `num_held_out` as in `Prompts`, `versions`
    of its sources, the prompts of its `first` step. A dry run has the first prompts as the model
    reads them, `shown`, and the `lengths` of more; `not_counted` is why their tokens are not known.
    A dry run also has `notes`: what a person may not expect of how the data is read. `left_out` are
    the notes about columns that are not in the rows. The start of an attempt has all `prompts`."""

    columns: tuple[str, ...] = ()
    num_train: int | None = None
    num_held_out: int = 0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    first: tuple[Prompt, ...] = ()
    shown: tuple[PreviewedPrompt, ...] = ()
    not_counted: str = ""
    lengths: PromptLengths = field(default_factory=PromptLengths)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    prompts: Prompts | None = None


@dataclass
class Preflight:
    """The checks of `job`: of a submission, whose slow work `executor` does, also of a dry run
    (`showing`: the store of the jobs); or at the start of an attempt at an `accepted` job.

    Results are the `data`; `warnings`, which are probable mistakes that are not refused; why a
    model was `not_checked`, and why none on a CPU can serve one; what the rewards give known
    answers (`trial`); the `price` of an hour, None: unknown."""

    job: Job
    settings: Settings
    services: Services
    executor: CheckExecutor
    showing: Store | None = None
    accepted: AcceptedData | None = None
    data: Inspection = field(default_factory=Inspection)
    warnings: list[str] = field(default_factory=list[str])
    not_checked: str | None = None
    cpu_limit: str | None = None
    trial: Trial | None = None
    price: Price | None = None

    @property
    def completed(self) -> Job:
        """The job with the number of steps that its data comes to, if it names epochs."""
        return with_steps(self.job, self.data.num_train)

    async def run(self, *needs: CheckNeeds) -> None:
        """Runs the checks with these `needs`, in order. Raises HoneError for the first fault; at
        the start of an attempt CheckFailed, for decisions.py. A service that could not check a
        submission is asked again: Unavailable."""
        for check in CHECKS:
            if check.needs in needs and (check.at_start or not self.accepted):
                try:
                    await check.run(self)
                except HoneError as error:
                    if self.accepted:
                        raise CheckFailed(check.name, check.needs, error) from error
                    if check.needs == "services" and isinstance(error, Failed):
                        raise Unavailable(error.detail) from error
                    raise


async def check_job(
    job: Job,
    store: Store,
    executor: CheckExecutor,
    needs: Sequence[CheckNeeds] = ("settings", "data", "services"),
    *,
    shows: bool = False,
    present: Job | None = None,
) -> Preflight:
    """Returns the results of the checks of a submission with these `needs`, or of a dry run
    (`shows`), or of another version of the `present` job. Before anything that the job names is
    read, raises as `check_allowed`."""
    await check_allowed(store, job, executor.settings.runs_dir, present)
    own, showing = executor.settings.per_trainer[0], store if shows else None
    services = Services.of(Caller(job, own), extensions=executor.extensions)
    try:
        run = Preflight(job, executor.settings, services, executor, showing)
        await run.run(*needs)
        return run
    finally:
        await services.close()


class Submissions:
    """Where jobs are submitted to a `store`: `checks` checks them, and an accepted job is on disk,
    below the folder of `runs`."""

    def __init__(self, store: Store, checks: CheckExecutor, runs: RunsDirCheck) -> None:
        self.store, self.checks, self._runs = store, checks, runs

    async def submit(
        self,
        job: Job,
        key: str | None,
        complete: Callable[[Preflight], Job] = lambda checked: checked.completed,
    ) -> tuple[JobRecord, bool]:
        """Returns the record of a job, and whether it is new: not if its idempotency `key` was used
        for it before. `complete` returns the job that is run, with the keys that follow from what
        was `checked`. Raises as `check_job` and `accept`, and Unavailable if the folder of runs
        cannot be written."""
        if known := await complete_submission(self.store, job, key):
            return known, False
        await self._runs.check()
        checked = await check_job(job, self.store, self.checks)
        submission = Submission(
            complete(checked),
            self.checks.settings.runs_dir,
            key,
            checked.data.versions,
            asked=job,
            warnings=tuple(checked.warnings),
        )
        record = await accept(self.store, submission)
        return record, record.id == submission.id


# --- by the job and the settings alone


async def _check_request(run: Preflight) -> None:
    """Raises BadRequest for a request of OpenAI's API that this API could not show again."""
    try:
        if run.job.request:
            CreateFineTuningJob.model_validate(run.job.request)
    except ValidationError as error:
        faults = sentences(error, CreateFineTuningJob, "'job.request'")
        raise BadRequest("; ".join(fault["detail"] for fault in faults), errors=faults) from error


async def _check_price(run: Preflight) -> None:
    run.price = price_for(run.job, run.settings)


def check_colocation(job: Job, settings: Settings) -> None:
    """Raises BadRequest for a job that would sample while the trainer has the GPU, frees the
    sampler's memory itself, or keeps memory that the trainer cannot move off the GPU. A job of 0
    steps loads no trainer."""
    if not (settings.colocate and job.trains):
        return
    if job.max_staleness:
        raise BadRequest(
            "HONE_COLOCATE is set, so sampler and trainer take turns on one GPU: got max_staleness "
            f"{job.max_staleness}, expected 0"
        )
    if SYNC_METHODS[job.weight_sync].ends_requests:
        raise BadRequest(
            f"HONE_COLOCATE is set, so the sampler sleeps at each step anyway: got weight_sync "
            f'"{job.weight_sync}", expected "auto" or a method that loads in place'
        )
    if job.memory.zero_stage == 3 and not job.memory.offload_optimizer:
        raise BadRequest(
            "HONE_COLOCATE is set, so the trainer leaves the GPU to the sampler, which DeepSpeed's "
            "ZeRO-3 cannot: got memory.zero_stage 3, expected 2, or memory.offload_optimizer = true"
        )
    if any(len(each.rollout_urls) > 1 for each in settings.per_trainer):
        raise BadRequest(
            "HONE_COLOCATE is set, so the sampler is the one on the trainer's GPU: got "
            f"HONE_ROLLOUT_URL {settings.rollout_url!r}, expected one URL for each trainer"
        )


def price_for(job: Job, settings: Settings) -> Price | None:
    """Returns the price of an hour; None if the settings do not say it. Raises BadRequest for a job
    with `stop.max_cost`, which needs it."""
    if settings.price_per_hour is not None:
        return Price(settings.price_per_hour, settings.currency)
    if job.stop.max_cost is not None:
        raise BadRequest(
            f"stop.max_cost is {job.stop.max_cost:g}, and what an hour costs is not known; set "
            "HONE_PRICE_PER_HOUR at the orchestrator"
        )
    return None


# --- by its models and data


async def _check_model(run: Preflight) -> None:
    """Raises BadRequest for a model that cannot be trained, or is not there. A model of the Hub is
    fetched first."""
    jobs = _of_each_model(run.job)
    for each in jobs:
        # makes no request
        await asyncio.to_thread(named_model_folder, each.model, run.settings)
    for each in jobs:
        why_not = await run.executor.fetched_model(each)
        look = check_model, each, run.settings, why_not
        warnings, cpu_limit = await run.executor.in_thread(each, *look)
        run.warnings += warnings
        run.cpu_limit = run.cpu_limit or cpu_limit
        run.not_checked = why_not if each is jobs[0] else run.not_checked


async def _check_start(run: Preflight) -> None:
    if run.showing:  # a submission is checked when it is stored (`accept`)
        await check_start(run.showing, run.job, run.settings.runs_dir)


async def _look_for_mistakes(run: Preflight) -> None:
    warning = await asyncio.to_thread(run.executor.extensions.warn_of, run.job)
    run.warnings += [*probable_mistakes(run.job), *([warning] if warning else [])]


async def _check_data(run: Preflight) -> None:
    job, accepted = _of_each_model(run.job)[0], run.accepted
    if accepted:
        await fetch(source_requests(job, run.settings, accepted.versions).values())
        run.data = await run.executor.in_thread(job, _reload, job, run.settings, accepted)
    else:
        look = inspect, job, run.settings, run.not_checked, run.showing is not None
        run.data = await run.executor.run(job, *look)
        run.warnings += run.data.notes


def _of_each_model(job: Job) -> list[Job]:
    """Returns the job with each model that it uses: its own, or the models of a job of 0 steps."""
    return [job] if job.trains else [job.with_model(each) for each in job.evaluated_models]


def check_model(job: Job, settings: Settings, why_not: str | None) -> tuple[list[str], str | None]:
    """Returns warnings about the job's model, and why no sampler on a CPU can serve it; `why_not`
    is why a model of the Hub could not be fetched. Raises BadRequest for a model that cannot be
    trained."""
    if folder := named_model_folder(job.model, settings):
        check_model_folder(folder, job.max_model_len)
    elif (folder := cached_model(job.model, job.model_revision)) and (
        folder / "config.json"
    ).is_file():
        check_config(folder, job.max_model_len)
    else:  # it is not on this machine
        said = _unread_model(job, why_not)
        return [f"{said}; what is wrong with it shows only when the job begins"], None
    config = read_config(folder)
    if job.trains:
        check_rope(job.model, config, job.max_model_len)
    found = [untested_warning(job.model, config), unknown_targets(job, folder)]
    limit = cpu_limit(config) or cannot_reload_on_cpu(config, job.weight_sync)
    return [warning for warning in found if warning], limit


def unknown_targets(job: Job, folder: Path) -> str:
    """Returns which of lora.target_modules no weight of the model in `folder` belongs to; "" if
    all are there, or if the weights are not here."""
    if not (job.trains and job.lora) or isinstance(job.lora.target_modules, str):
        return ""
    stored = {name.removesuffix(".weight") for name in stored_tensors(folder)}
    unknown = [
        target
        for target in job.lora.target_modules
        if not any(name == target or name.endswith(f".{target}") for name in stored)
    ]
    if not stored or not unknown:
        return ""
    layers = sorted({name.rpartition(".")[2] for name in stored if name.endswith("_proj")})
    has = f"; it has {', '.join(layers)}" if layers else ""
    return (
        f"lora.target_modules names {', '.join(map(repr, unknown))}, and the model has no such "
        f"layer{has}"
    )


def _unread_model(job: Job, why_not: str | None) -> str:
    why = why_not or "the Hugging Face cache here does not have its config.json"
    return f"the model {job.model!r} was not looked at: {why}"


def inspect(job: Job, settings: Settings, not_checked: str | None, showing: bool) -> Inspection:
    """Returns the findings about the data of a submission. Its prompts are measured with the
    tokenizer of the job's model. Raises BadRequest for faults that would fail the job later."""
    prompts = load_prompts(job, settings)
    left_out = [
        note for each in prompts.tables if isinstance(each, ArrowTable) for note in each.notes()
    ]
    try:
        first = check_rows(job, prompts)
    except BadRequest as error:
        raise _with_notes(error, left_out) from error
    found = Inspection(
        prompts.columns,
        prompts.num_train,
        prompts.num_held_out,
        prompts.versions,
        first,
        left_out=tuple(left_out),
    )
    if not showing:
        return found
    shown, not_counted = _shown_prompts(job, first, prompts.name)
    return replace(
        found,
        shown=shown,
        not_counted=_unread_model(job, not_checked) if not_checked else not_counted,
        lengths=counted(job, prompts) if job.trains and not job.is_pushed else PromptLengths(),
        notes=(
            *prompt_warnings(job, first),
            *(note for table in prompts.tables for note in notes_of(table)),
        ),
    )


def _with_notes(error: BadRequest, left_out: Sequence[str]) -> BadRequest:
    """Returns the error, which may be because of a column that is left out, with these."""
    if not left_out:
        return error
    return BadRequest("; ".join([error.detail, *left_out]), code=error.code)


def _reload(job: Job, settings: Settings, accepted: AcceptedData) -> Inspection:
    prompts = load_prompts(job, settings, accepted.versions, accepted.history)
    return Inspection(prompts.columns, first=prompts.first(), prompts=prompts)


def check_held_out(job: Job, settings: Settings) -> None:
    load_held_out(job, settings)


def probable_mistakes(job: Job) -> list[str]:
    """Returns a sentence for each allowed value with which the job learns nothing."""
    found = list[str]()
    if job.trains and not job.learning_rate:
        found.append(
            "training.learning_rate is 0: the job samples, grades and changes no weight; expected "
            "a rate above 0, such as 1e-6"
        )
    is_paid = job.teacher or any(reward.weight for reward in job.rewards)
    if job.trains and not job.trains_without_sampling and not is_paid:
        whose = "the only reward" if len(job.rewards) == 1 else "every reward"
        found.append(
            f"the weight of {whose} is 0: every completion earns the same, so nothing is learned; "
            "expected a weight other than 0"
        )
    return [*found, *extreme_values(job)] if job.trains else found


MAX_RATE, MAX_BETA, MANY_STEPS = 0.01, 1.0, 1_000_000
"""Greater values are probably typing errors: GRPO takes learning rates of 1e-7 to 1e-4 and a beta
of 0 to 0.1, and a million steps take months."""


def extreme_values(job: Job) -> list[str]:
    """Returns a sentence for each allowed value with which training probably comes to nothing."""
    found = list[str]()
    rate, beta, target = job.learning_rate, job.training.beta, job.stop.target
    if rate > MAX_RATE:
        found.append(
            f"training.learning_rate is {rate:g}: such updates ruin a model; expected at most "
            f"{MAX_RATE:g}, usually 1e-6 to 1e-4"
        )
    if beta > MAX_BETA:
        found.append(
            f"training.beta is {beta:g}: the KL term outweighs the rewards, so the policy stays "
            "where it began; expected 0 to 0.1 as a rule"
        )
    most = 1.0
    if job.stop.metric.endswith("reward"):  # each grader gives 1, and shaping is not counted
        most = sum(max(reward.weight, 0.0) for reward in outcomes(job))
    if target is not None and most and target > most:
        found.append(
            f"stop.target is {target:g}, and {job.stop.metric} is at most {most:g}, if no grader "
            "gives more than 1: the job would not stop early"
        )
    groups = job.sampling.prompts_per_step
    if job.training.minibatches > groups and not job.trains_without_sampling:
        found.append(
            f"training.minibatches is {job.training.minibatches} for {groups} groups "
            "(sampling.prompts_per_step): a minibatch has less than a group, or nothing"
        )
    if job.steps > MANY_STEPS and not job.is_program:
        days = job.steps / 86400
        found.append(f"steps is {job.steps}: at a second each these are {days:.0f} days")
    if job.steps and job.data.epochs is not None:
        found.append(
            f"steps is {job.steps} and data.epochs {job.data.epochs:g}: the job ends after "
            "the fewer steps of both; expected one of them"
        )
    return found


def _shown_prompts(
    job: Job, first: tuple[Prompt, ...], where: str
) -> tuple[tuple[PreviewedPrompt, ...], str]:
    """Returns what `preview` does, of a supervised job with the answers."""
    if not job.has_answers:
        return preview(job, first)
    found = sft_examples(first[:MAX_SHOWN], job, where)[:MAX_SHOWN]
    shown, not_counted = preview(job, [example.prompt for example in found])
    answered = (
        one.model_copy(update={"answers": example.answers})
        for one, example in zip(shown, found, strict=True)
    )
    return tuple(answered), not_counted


# --- by its services


async def _check_rewards(run: Preflight) -> None:
    try:
        await run.services.validate(run.data.columns, run.data.first)
    except BadRequest as error:
        raise _with_notes(error, run.data.left_out) from error


async def _check_processor(run: Preflight) -> None:
    if run.cpu_limit:
        run.warnings += await cpu_warning(run.job, run.cpu_limit, run.services.caller.settings)


async def _try_rewards(run: Preflight) -> None:
    if run.showing:
        run.trial = await run.services.reward.try_rewards(run.data.first)


CHECKS = (
    Check("groups", "settings", lambda run: asyncio.to_thread(check_groups, run.job)),
    Check("request", "settings", _check_request),
    Check(
        "colocation",
        "settings",
        lambda run: asyncio.to_thread(check_colocation, run.job, run.settings),
        at_start=True,
    ),
    Check("price", "settings", _check_price, at_start=True),
    Check("model", "data", _check_model),
    Check("start checkpoint", "data", _check_start),
    Check("mistakes", "data", _look_for_mistakes),
    Check("data", "data", _check_data, at_start=True),
    Check("rewards", "services", _check_rewards, at_start=True),
    Check("processor", "services", _check_processor),
    Check("trial", "services", _try_rewards),
)
"""All checks, the quick ones first."""
