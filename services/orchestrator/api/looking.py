"""What is checked of a job's data and model before it is accepted, and warnings of allowed values
that are probably mistakes. All of it may take long: `checking.py` runs it in threads and
processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.orchestrator.api.lengths import counted
from services.orchestrator.api.rows import check_rows
from services.orchestrator.data.allowed import named_model_folder
from services.orchestrator.data.fitting import MAX_SHOWN, preview
from services.orchestrator.data.hub import cached_model
from services.orchestrator.grpo.prompts import load_held_out, load_prompts
from services.orchestrator.grpo.supervised import lessons
from services.orchestrator.store.checkpoint_files import check_start
from shared.errors import Failed, Unavailable
from shared.http.gate import caller, own_jobs_of
from shared.job import Job
from shared.settings import Settings
from shared.weights.architectures import cannot_reload_on_cpu, not_tried
from shared.weights.model_folder import (
    check_config,
    check_model_folder,
    check_rope,
    cpu_limit,
    read_config,
)
from shared.wire import ApiKey, PreviewedPrompt, Prompt, PromptLengths

T = TypeVar("T")

ELSEWHERE = (
    "name a file, or a mirror of the Hub by HF_ENDPOINT; with HF_HUB_OFFLINE=1 the orchestrator "
    "takes what is in its Hugging Face cache"
)


@dataclass(frozen=True)
class Looked:
    """The findings about a job: `columns`, `num_train` and `num_held_out` as in `Prompts`,
    `versions` of its sources, the prompts of its `first` step. `warnings` are probable mistakes
    that are not refused. `cpu_limit` is why no sampler on a CPU can serve the model. `shown` are
    the first prompts as the model reads them, if asked for, and `lengths` those of more;
    `not_counted` is why their tokens are not known."""

    columns: tuple[str, ...]
    num_train: int | None
    num_held_out: int
    versions: dict[str, str]
    first: tuple[Prompt, ...]
    warnings: tuple[str, ...]
    cpu_limit: str | None = None
    shown: tuple[PreviewedPrompt, ...] = ()
    not_counted: str = ""
    lengths: PromptLengths = field(default_factory=PromptLengths)


def of_each_model(job: Job) -> list[Job]:
    """Returns the job with each model that it uses: its own, or the models of a job of 0 steps."""
    return [job] if job.trains else [job.with_model(each) for each in job.evaluated_models]


def look(job: Job, settings: Settings, why_not: Sequence[str | None], showing: bool) -> Looked:
    """Returns the findings about the job. `why_not` is why each model of the Hub could not be
    fetched. Raises BadRequest for faults that would fail the job later, and Failed if the Hub
    cannot be reached. Prompts are measured with the tokenizer of the first model."""
    if own_jobs_of() is None:  # else the submission looks first whose checkpoint it is
        check_start(job, settings.runs_dir)
    jobs = of_each_model(job)
    models = [_look_at_model(each, settings, why) for each, why in zip(jobs, why_not, strict=True)]
    limits = [limit for _, limit in models if limit]
    warnings = [*(untried for untried, _ in models if untried), *findings(job)]
    job = jobs[0]
    try:
        prompts = load_prompts(job, settings)
        first = check_rows(job, prompts)
    except Unavailable as error:  # the Hub: asking it again at once would not help
        raise Failed(f"{error.detail}; {ELSEWHERE}") from error
    shown, not_counted = _shown(job, first, prompts.name) if showing else ((), "")
    plans = showing and job.trains and not job.is_pushed
    return Looked(
        prompts.columns,
        prompts.num_train,
        prompts.num_held_out,
        prompts.versions,
        first,
        tuple(warnings),
        limits[0] if limits else None,
        shown,
        _not_looked_at(job, why_not[0]) if why_not[0] and showing else not_counted,
        counted(job, prompts) if plans else PromptLengths(),
    )


def _look_at_model(job: Job, settings: Settings, why_not: str | None) -> tuple[str | None, ...]:
    """Returns a warning about the job's model, and why no sampler on a CPU can serve it. Raises
    BadRequest for a model that cannot be trained."""
    if folder := named_model_folder(job.model, settings):
        check_model_folder(folder, job.max_model_len)
    elif (folder := cached_model(job.model, job.model_revision)) and (
        folder / "config.json"
    ).is_file():
        check_config(folder, job.max_model_len)
    else:  # it is not on this machine
        said = _not_looked_at(job, why_not)
        return f"{said}; what is wrong with it shows only when the job begins", None
    config = read_config(folder)
    if job.trains:
        check_rope(job.model, config, job.max_model_len)
    on_cpu = cpu_limit(config) or cannot_reload_on_cpu(config, job.weight_sync)
    return not_tried(job.model, config), on_cpu


def on_behalf_of(who: ApiKey | None, work: Callable[..., T], *args: Any) -> T:
    """Returns the result of `work`, run with the rights of the API key `who`."""
    caller.set(who)
    return work(*args)


def look_at_held_out(job: Job, settings: Settings) -> None:
    """Raises as `load_held_out`, but Failed if the Hub cannot be reached."""
    try:
        load_held_out(job, settings)
    except Unavailable as error:
        raise Failed(f"{error.detail}; {ELSEWHERE}") from error


def _not_looked_at(job: Job, why_not: str | None) -> str:
    why = why_not or "the Hugging Face cache here does not have its config.json"
    return f"the model {job.model!r} was not looked at: {why}"


def findings(job: Job) -> Sequence[str]:
    """Returns a sentence for each finding. It may take seconds: call it off the event loop."""
    of_training = (_learns_nothing(job), _is_paid_nothing(job)) if job.trains else ()
    return [said for said in of_training if said]


def _learns_nothing(job: Job) -> str | None:
    if job.learning_rate:
        return None
    return (
        "training.learning_rate is 0: the job samples, grades and changes no weight; expected a "
        "rate above 0, such as 1e-6"
    )


def _is_paid_nothing(job: Job) -> str | None:
    if job.steps_never_sample:
        return None
    if job.teacher or any(reward.weight for reward in job.rewards):
        return None
    whose = "the only reward" if len(job.rewards) == 1 else "every reward"
    return (
        f"the weight of {whose} is 0: every completion earns the same, so nothing is learned; "
        "expected a weight other than 0"
    )


def _shown(
    job: Job, first: tuple[Prompt, ...], where: str
) -> tuple[tuple[PreviewedPrompt, ...], str]:
    """Returns what `preview` does, of a supervised job with the answers."""
    if not job.has_answers:
        return preview(job, first)
    found = lessons(first[:MAX_SHOWN], job, where)[:MAX_SHOWN]
    shown, not_counted = preview(job, [lesson.prompt for lesson in found])
    answered = (
        one.model_copy(update={"answers": lesson.answers})
        for one, lesson in zip(shown, found, strict=True)
    )
    return tuple(answered), not_counted
