"""Plans, evaluations and stored rollouts, for people.

Prompts, completions and what programs print are the model's: control characters in them never reach
the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from shared.wire import (
        Estimate,
        EvaluationReport,
        GradedRollout,
        ModelScores,
        Part,
        Placement,
        Plan,
        RegradedRollout,
        RegradeReport,
        RolloutList,
        SamplerMemory,
        SetReport,
        StepTime,
        TrainerMemory,
    )

NO_PARTS = ("peak_gib", "host_gib", "least_cache_gib")
"""Fields of a plan's memory that have lines of their own."""

IN_TURN = ("activations_gib", "logits_gib", "update_gib", "buffers_gib")
"""Parts of a trainer's memory that are not all held at the same time."""

LESS_MEMORY = (
    "less memory: a smaller memory.micro_batch_tokens or max_model_len; gradient_checkpointing, "
    "zero_stage = 3 on several GPUs or offload_optimizer of [memory]; or [lora] (try with --set)"
)
"""What to change in a job that does not fit, the cheapest first."""


def plan_lines(plan: Plan) -> list[str]:
    """Returns the plan as lines of text."""
    return [line for line in _lines(plan) if line]


def estimate_line(plan: Plan) -> str:
    """Returns the plan's result in one line."""
    if not plan.fits:
        return f"estimated: it does not fit on {plan.gpus}: {'; '.join(plan.placement.why_not)}"
    place = plan.placement
    parts = [f"{place.trainer.peak_gib:.1f} GiB for the trainer on {plan.gpus}"]
    if place.time is not None:
        parts.append(f"{place.time.step_s:.1f} s a step")
        parts += [total_text(plan, place.time)] if plan.steps else []
    return f"estimated: {', '.join(parts)}"


def _lines(plan: Plan) -> Iterator[str]:
    place = plan.placement
    trained = (
        "" if plan.num_trainable == plan.num_parameters else f", {plan.num_trainable:,} trained"
    )
    yield (
        f"{plan.model}: {plan.num_parameters:,} parameters{trained}, {plan.dtype}, learning rate "
        f"{plan.learning_rate:g}"
    )
    verdict = "fits" if plan.fits else "does not fit"
    yield f"{verdict} on {plan.gpus}: {placement_text(place)}"
    yield from (f"  {why}" for why in place.why_not)
    each = "each process" if place.kind == "cpu" else "each GPU"
    needed, room = place.trainer.peak_gib, place.trainer_room_gib
    how = "with" if place.recomputes else "without"
    yield (
        f"  trainer, {each}: needs {needed:.1f} GiB and has {room:.1f}, {how} gradient "
        "checkpointing"
    )
    steady, in_turn = _parts(place.trainer, without=IN_TURN), _parts(place.trainer, only=IN_TURN)
    yield f"    always: {_sizes(steady)}"
    yield f"    at most {needed - sum(steady.values()):.1f} at once: {_sizes(in_turn)}"
    if place.trainer.host_gib:
        yield f"    and {place.trainer.host_gib:.1f} GiB of host memory for each rank, not checked"
    needed, room = place.sampler.least_gib, place.sampler_room_gib
    yield f"  sampler, {each}: needs at least {needed:.1f} GiB and has {room:.1f}"
    yield (
        f"    {_sizes(_parts(place.sampler))} (for {place.sampler.sequences} sequences at once, "
        f"{place.sampler.cache_bytes_per_token:,} bytes per token)"
    )
    if place.time is not None:
        time = place.time
        parts = f"sampling {time.sample_s:.1f}, training {time.train_s:.1f}"
        yield f"  a step takes about {time.step_s:.1f} s ({parts})"
        if plan.steps:
            yield f"  {total_text(plan, time)}"
        elif plan.cost is not None:
            yield f"  a step costs about {plan.cost.per_step:.4f} {plan.cost.currency}"
    if place.settings:
        yield f"  settings: {' '.join(f'{name}={value}' for name, value in place.settings.items())}"
    if not plan.fits:
        yield f"  {LESS_MEMORY}"
    faster = [other for other in plan.others if other.fits]
    if faster:
        yield f"  also fits: {'; '.join(_other(other) for other in faster[:3])}"
    yield from (f"  note: {note}" for note in plan.notes)


def placement_text(place: Placement) -> str:
    """Returns who gets which GPUs, in words."""
    samplers = "1 sampler" if place.num_samplers == 1 else f"{place.num_samplers} samplers"
    over = f" over {place.tensor_parallel} GPUs each" if place.tensor_parallel > 1 else ""
    ranks = "1 rank" if place.trainer_ranks == 1 else f"{place.trainer_ranks} ranks"
    match place.kind:
        case "split":
            return f"the trainer has {ranks} and {samplers}{over}, each on GPUs of its own"
        case "turns":
            return f"{ranks} and {samplers}{over} take turns on the same GPUs"
        case "shared":
            return "trainer and sampler share the GPU"
        case "cpu":
            return f"{ranks} and {samplers} in the host's memory"


def total_text(plan: Plan, time: StepTime) -> str:
    """Returns how long all steps take and what they cost, in words."""
    text = f"all steps: about {_hours(plan.steps * time.step_s / 3600)}"
    if plan.cost is None or plan.cost.total is None:
        return text
    cost = plan.cost
    price = f"{cost.per_hour:.2f} {cost.currency} per hour"
    return f"{text}, {cost.total:.2f} {cost.currency} ({price})"


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = round(hours * 60)
    return {0: "less than a minute", 1: "1 minute"}.get(minutes, f"{minutes} minutes")


def _parts(
    memory: TrainerMemory | SamplerMemory, only: Sequence[str] = (), without: Sequence[str] = ()
) -> dict[str, float]:
    return {
        name.removesuffix("_gib"): gib
        for name, gib in memory.model_dump().items()
        if name.endswith("_gib") and name not in (*NO_PARTS, *without) and name in (only or (name,))
    }


def _sizes(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= 0.05)


def _other(place: Placement) -> str:
    time = f", {place.time.step_s:.1f} s a step" if place.time else ""
    return f"{placement_text(place)}{time}"


# --- evaluations ---------------------------------------------------------------------------------

SHOWN = {
    "reward": "reward",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "truncated",
}
"""Metrics and their headings; pass@k comes after the reward."""

NOTE = (
    "± is the 95 % confidence interval over problems; * marks a difference that is outside it, and "
    "where 16 problems or fewer differ is so by an exact test as well (p < 0.05). "
    "Differences are over the same problems, which is why they can be surer than the two rows look."
)


def evaluation_report(found: EvaluationReport) -> Group:
    """Returns a table for each held-out set, and below it how the models differ."""
    parts: list[RenderableType] = []
    for held_out in found.sets:
        parts += [_title(held_out, found), _scores(held_out, held_out.models)]
        if others := held_out.models[1:]:
            first = held_out.models[0].name
            parts.append(Text(f"\nabove {first}, on the same problems"))
            parts.append(_scores(held_out, others, less=True))
        parts += [Text(line) for line in _warnings(held_out)]
    return Group(*parts, Text(f"\n{NOTE}"))


def _title(held_out: SetReport, found: EvaluationReport) -> Text:
    name = f"{held_out.name}: " if held_out.name else ""
    how = f"temperature {found.temperature:g}, seed {found.seed}"
    how += f", {found.dtype}" if found.dtype else ""
    return Text(
        f"{name}{held_out.num_problems} problems of {held_out.source}, {held_out.num_samples} "
        f"completion(s) each, {how}\n"
    )


def _scores(held_out: SetReport, models: Sequence[ModelScores], *, less: bool = False) -> Table:
    """Returns a row for each of the models; `less`: of its differences from the first model."""
    names = _metrics(held_out)
    headings = (SHOWN.get(name, name) for name in names)
    table = Table("model", "n", *headings, box=None, pad_edge=False)
    for model in models:
        found = model.differences if less else model.metrics
        cells = (estimate_text(name, found.get(name), signed=less) for name in names)
        num_problems = found["reward"].num_problems if "reward" in found else 0
        table.add_row(escape(model.name), str(num_problems), *cells)
    return table


def _metrics(held_out: SetReport) -> list[str]:
    """Returns the metrics that any of the models has, in the order of the columns."""
    found = dict.fromkeys(name for model in held_out.models for name in model.metrics)
    passes = [name for name in found if name.startswith("pass@")]
    return [name for name in dict.fromkeys(("reward", *passes, *SHOWN)) if name in found]


def estimate_text(metric: str, estimate: Estimate | None, *, signed: bool = False) -> str:
    """Returns for example `0.512 ± 0.041`, or `0.000 [0.000, 0.278]`."""
    if estimate is None:
        return "none"
    digits = 1 if metric == "completions/mean_length" else 3
    sign = "+" if signed else ""
    text = f"{estimate.mean:{sign}.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return text
    star = "*" if signed and is_clear(estimate) else ""
    below, above = estimate.mean - estimate.low, estimate.high - estimate.mean
    if not math.isclose(below, above, rel_tol=1e-6):
        return f"{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]{star}"
    return f"{text} ± {above:.{digits}f}{star}"


def is_clear(difference: Estimate) -> bool:
    """Returns whether a difference is significant at 5 %: its interval does not contain 0, and the
    exact test, where there is one, agrees."""
    low, high, p_value = difference.low, difference.high, difference.p_value
    apart = low is not None and high is not None and (low > 0 or high < 0)
    return apart and (p_value is None or p_value < 0.05)


def _warnings(held_out: SetReport) -> list[str]:
    """Returns sentences about completions that count nowhere."""
    return [
        f"{model.name}: {share:.1%} of the completions {what}"
        for model in held_out.models
        for share, what in (
            (model.errored_rollouts, "could not be sampled"),
            (model.missing_rewards, "got no reward"),
        )
        if share
    ]


# --- rollouts ------------------------------------------------------------------------------------

EXPECTED = ("ok", "wrong")
"""Verdicts that need no explaining."""


def rollout_table(listed: RolloutList, *, held_out: bool = False) -> Table:
    """Returns the rollouts as TRL prints them: prompt, completion, rewards, advantage; and the
    reasons. A grader's value has a column of its own unless it is the reward. Without any
    advantage, as of held-out completions, there is no column of it."""
    names = sorted({name for rollout in listed.rollouts for name in rollout.parts})
    if len(names) == 1 and all(
        part.value == rollout.reward
        for rollout in listed.rollouts
        for part in rollout.parts.values()
    ):
        names = []
    advantages = [
        "\n".join(map(_number, each.turn_advantages)) or _number(each.advantage)
        for each in listed.rollouts
    ]
    has_advantages = any(advantages)
    table = Table(
        "prompt",
        "completion",
        *map(shown, names),
        "reward",
        *(["advantage"] if has_advantages else []),
        "why",
        title=f"held-out problems after step {listed.step}" if held_out else f"step {listed.step}",
    )
    for rollout, advantage in zip(listed.rollouts, advantages, strict=True):
        table.add_row(
            shown(prompt_text(rollout)),
            shown(rollout.completion),
            *(_part(rollout.parts.get(name)) for name in names),
            _number(rollout.reward),
            *([advantage] if has_advantages else []),
            shown("\n".join([*reasons(rollout.parts), *map("forked: {}".format, rollout.forked)])),
        )
    return table


def regrade_table(report: RegradeReport) -> Group:
    """Returns the differences of a regrade, step by step, and the rollouts whose reward differs
    most."""
    steps = Table(
        "step",
        "rollouts",
        "reward",
        "would be",
        "missing",
        "would be",
        "rewards change",
        "advantages flip",
    )
    for step in report.steps:
        steps.add_row(
            str(step.step),
            str(step.num_rollouts),
            _number(step.old_reward),
            _number(step.new_reward),
            str(step.old_missing),
            str(step.new_missing),
            str(step.num_changed),
            str(len(step.flipped)),
        )
    changed, total = (
        sum(step.num_changed for step in report.steps),
        sum(step.num_rollouts for step in report.steps),
    )
    flipped = sum(len(step.flipped) for step in report.steps)
    sentence = f"{changed} of {total} rewards would change, and {flipped} advantages their sign."
    return Group(steps, sentence, *([_examples(report.examples)] if report.examples else []))


def _examples(examples: tuple[RegradedRollout, ...]) -> Table:
    table = Table(
        "step",
        "prompt",
        "completion",
        "reward",
        "would be",
        "advantage",
        "would be",
        "why",
        title="most different",
    )
    for example in examples:
        table.add_row(
            str(example.step),
            shown(prompt_text(example.new)),
            shown(example.new.completion),
            _number(example.old.reward),
            _number(example.new.reward),
            _number(example.old.advantage),
            _number(example.new.advantage),
            shown("\n".join(reasons(example.new.parts))),
        )
    return table


def reasons(parts: Mapping[str, Part]) -> list[str]:
    """Returns a line for each grader that had more to say than a number: verdict (unless it is
    "ok"), detail, errors, what was printed, and time. A line begins with the grader's name if there
    are several graders."""
    lines: list[str] = []
    for name, part in parts.items():
        facts = [
            part.detail,
            *part.errors,
            f"printed {part.stdout.strip()!r}" if part.stdout.strip() else "",
        ]
        if any(facts) or part.verdict not in EXPECTED:
            took = "cached" if part.cached else f"{part.seconds:.2f} s"
            verdict = "" if part.verdict == "ok" else part.verdict
            told = "; ".join(fact for fact in (verdict, *facts, took) if fact)
            lines.append(f"{name}: {told}" if len(parts) > 1 else told)
    return lines


def prompt_text(rollout: GradedRollout) -> str:
    if isinstance(rollout.prompt, str):
        return rollout.prompt.strip()
    return str(rollout.prompt[-1].get("content", ""))


def shown(text: str) -> str:
    """Returns the text with control characters as escapes such as `\\x1b`, and without meaning as
    markup."""
    return escape(
        "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)
    )


def _part(part: Part | None) -> str:
    return "" if part is None else part.verdict if part.value is None else _number(part.value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
