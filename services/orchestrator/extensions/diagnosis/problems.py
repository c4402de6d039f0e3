"""The problems that are trained on and evaluated: used up, gone through too often, too few to
tell."""

from __future__ import annotations

from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import Facts, HeldOut, percent
from services.orchestrator.grpo.held_out import metric_prefix
from services.orchestrator.grpo.metrics import PASSES
from shared.wire import EvaluationReport, Evidence, Finding

MANY_PASSES = 10.0
"""Passes over the data from which on the same problems are hardly news. Language models gain from
about four (arXiv 2305.16264); with new completions each time some more are useful."""

USED_UP = 0.9
"""Share of the problems that are skipped, from which on steps take skipped ones again."""

TOO_WIDE = 0.05
"""Share of the full mark that half a confidence interval has to be, to be called wide: a narrower
one that shows no change says that there is none."""

LATE = 0.5
"""Part of the steps after which a change should show."""


def data_repeated(facts: Facts) -> Iterator[Finding]:
    """The job has gone through its data many times."""
    series = facts.of(PASSES)
    if not series or series.values[-1] < MANY_PASSES:
        return
    num = round(series.steps[-1] * facts.job.sampling.prompts_per_step / series.values[-1])
    yield Finding(
        code="data_repeated",
        level="notice",
        title=f"the job has gone through its {num} problems {series.values[-1]:.1f} times",
        since_step=series.since(lambda value: value >= MANY_PASSES),
        evidence=(series.evidence(),),
        cause="data.train has few problems for so many steps",
        remedy="add problems to data.train, take fewer steps, or let difficulty.skip_right skip "
        "what is learned; held-out problems (data.eval) show whether it still helps",
        keys=("data.train", "steps", "difficulty.skip_right", "data.eval"),
    )


def data_exhausted(facts: Facts) -> Iterator[Finding]:
    """Nearly all problems are skipped as they teach nothing."""
    skipped, passes = facts.of("skipped_problems"), facts.of(PASSES)
    if not skipped or not passes:
        return
    num = round(passes.steps[-1] * facts.job.sampling.prompts_per_step / passes.values[-1])
    if skipped.values[-1] < USED_UP * num:
        return
    yield Finding(
        code="data_exhausted",
        level="warning",
        title=f"{skipped.values[-1]:.0f} of {num} problems are skipped because they teach nothing",
        since_step=skipped.since(lambda value: value >= USED_UP * num),
        evidence=(skipped.evidence(),),
        cause="the problems are all right or all wrong by now, so skipped ones are taken again",
        remedy="add problems to data.train, or let skipped ones come back sooner "
        "(difficulty.skip_steps)",
        keys=("data.train", "difficulty.skip_steps"),
    )


def evaluation_too_small(facts: Facts) -> Iterator[Finding]:
    """Held-out problems are too few to tell what training changed."""
    steps = facts.job.steps
    for held_out in facts.held_out():
        at = held_out.rewards.steps[-1]
        if len(held_out.rewards) > 1 and steps and at >= LATE * steps:
            yield from _too_small(facts, held_out)
    summary = facts.record.summary if facts.record else None
    if summary and summary.get("evaluation"):
        yield from _cannot_compare(EvaluationReport.model_validate(summary["evaluation"]))


def _too_small(facts: Facts, held_out: HeldOut) -> Iterator[Finding]:
    rewards, half = held_out.rewards, held_out.half_widths[-1]
    changed = rewards.values[-1] - rewards.values[0]
    margin = held_out.margin(0, -1, facts.full_mark)
    if half < TOO_WIDE * facts.full_mark or abs(changed) >= margin:
        return
    name = f"held-out set {held_out.name!r}" if held_out.name else "held-out problems"
    yield Finding(
        code="evaluation_too_small",
        level="notice",
        title=f"the {name} are too few to tell: the reward went from {rewards.values[0]:.3f} to "
        f"{rewards.values[-1]:.3f}, and chance alone makes {margin:.3f} of difference",
        since_step=rewards.steps[-1],
        evidence=(
            rewards.evidence(),
            Evidence(
                metric=f"{rewards.metric}_high",
                steps=rewards.steps[-1:],
                values=(round(rewards.values[-1] + half, 6),),
                text="upper end of the 95 % confidence interval",
            ),
        ),
        cause="the interval's width goes with one over the square root of the number of problems",
        remedy="take four times as many problems for half the width (data.eval, "
        "evaluation.num_prompts), or several completions of each (evaluation.samples, with "
        "evaluation.temperature above 0)",
        keys=("data.eval", "evaluation.num_prompts", "evaluation.samples"),
    )


def _cannot_compare(report: EvaluationReport) -> Iterator[Finding]:
    for of_set in report.sets:
        for model in of_set.models:
            found = model.differences.get("reward")
            if found is None or found.low is None or found.high is None:
                continue
            half = (found.high - found.low) / 2
            if half >= TOO_WIDE and found.low < 0 < found.high:
                yield Finding(
                    code="evaluation_too_small",
                    level="notice",
                    title=f"{of_set.num_problems} problems are too few to tell {model.name!r} from "
                    f"{of_set.models[0].name!r}: {found.mean:+.3f}, between {found.low:+.3f} and "
                    f"{found.high:+.3f} with 95 % confidence",
                    evidence=(Evidence(metric="eval/reward", text=of_set.source),),
                    cause="the models differ by less than these problems can show",
                    remedy="take more problems (data.eval, evaluation.num_prompts) or several "
                    "completions of each (evaluation.samples)",
                    keys=("data.eval", "evaluation.num_prompts", "evaluation.samples"),
                )


def evaluation_ignored(facts: Facts) -> Iterator[Finding]:
    """The last evaluation counts nowhere, since too many completions have no reward."""
    for name in ("", *facts.job.evaluation.sets):
        prefix = metric_prefix(name)
        ignored, all_of = facts.of(f"{prefix}ignored"), facts.of(f"{prefix}errored_rollouts")
        if not ignored or ignored.steps[-1] != all_of.steps[-1]:
            continue
        yield Finding(
            code="evaluation_ignored",
            level="warning",
            title=f"the evaluation of step {ignored.steps[-1]} counts nowhere: "
            f"{percent(ignored.values[-1])} of its completions have no reward",
            since_step=ignored.steps[0],
            evidence=(ignored.evidence(),),
            cause="graders failed, or completions went wrong, on more than "
            "HONE_MAX_MISSING_REWARDS of them; neither stop.target nor checkpoints.keep_best "
            "takes it into account",
            remedy="see the reward service's log, and try the graders on a row of data.eval by "
            "`hone grade`",
            keys=("HONE_MAX_MISSING_REWARDS", "data.eval"),
        )
