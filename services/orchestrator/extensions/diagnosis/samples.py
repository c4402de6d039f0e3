"""Whether what a run samples can teach: completions that were cut off, went wrong or got no reward;
rewards that differ within groups and do not pull against each other; problems that are used up or
too few to tell."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    HeldOut,
    RunSnapshot,
    Series,
    finding,
    percent,
    steps_of,
)
from services.orchestrator.extensions.diagnosis.reward_hacking import reward_hacks
from services.orchestrator.extensions.diagnosis.training import reward_fell
from services.orchestrator.grpo.held_out import metric_prefix
from services.orchestrator.grpo.metrics import PASSES
from shared.job import RewardSpec
from shared.wire import Batch, EvaluationReport, Evidence, Finding, Score
from shared.wire.jobs import FindingCode, FindingLevel

FLAT = 0.9
"""Share of groups without signal from which on a step teaches next to nothing: of ten prompts that
were paid for, one is used."""

NEAR = 0.1
"""Share of the full mark within which a mean reward counts as none, or as full."""

SAME_ANSWERS = 0.9
"""Share of groups with only one text from which on sampling is what makes them equal."""

CONTRADICTS = -0.6
"""Correlation within groups from which on two rewards pull against each other: r squared is 0.36,
so more than a third of what one gives the other one takes."""

FEWEST_PAIRS = 32
"""Completions for a correlation: by chance it is below -0.6 one time in 5,000."""

SIGNAL = "frac_reward_zero_std"

TRUNCATED, MOSTLY_TRUNCATED = 0.2, 0.5
"""Shares of completions cut off by sampling.max_tokens, for a warning and a problem: one in five is
a part of the gradient that says nothing but "shorter", and from one in two on it is most of it."""

OVERLONG = 0.1
"""Share of prompts that were too long: below it they are outliers of the data."""

MISSING, MANY_MISSING = 0.01, 0.1
"""Shares of completions without a reward, for a warning and a problem. A text in a hundred that a
grader cannot read is usual."""

WENT_WRONG = 0.05
"""Share of completions that ended in an error or too late."""

NUM_REASONS, REASON_CHARS = 3, 200

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


@dataclass(frozen=True)
class _Reason:
    """Why groups have no signal; `told` ends the finding's title."""

    code: FindingCode
    level: FindingLevel
    told: str
    cause: str
    remedy: str
    keys: str


def no_signal(facts: RunSnapshot) -> Iterator[Finding]:
    """All completions of a prompt earn the same, so nothing is learned: too hard, too easy, or
    equal for another reason."""
    flat, reward, mark = facts.of(SIGNAL), facts.of("reward").last(), facts.full_mark
    last = flat.last()
    if facts.job.teacher or facts.job.is_pushed or len(flat) < FEWEST or last.median < FLAT:
        return
    same = _share_of_one_text(facts.newest)
    is_same = facts.job.sampling.group_size == 1 or same >= SAME_ANSWERS
    if not is_same and reward.median >= (1 - NEAR) * mark:
        reason = _easy(facts, f"the reward is {reward.median:.3g} of {mark:g} throughout")
    elif not is_same and reward.median <= NEAR * mark:
        reason = _hard(facts)
    else:
        reason = _equal(facts, same)
    yield finding(
        code=reason.code,
        level=reason.level,
        since_step=flat.since(lambda share: share >= FLAT),
        evidence=[flat, reward],
        title=f"{percent(last.median)} of the groups of {steps_of(last)} teach nothing: "
        f"{reason.told}",
        cause=reason.cause,
        remedy=reason.remedy,
        keys=reason.keys,
    )


def _easy(facts: RunSnapshot, told: str) -> _Reason:
    """Nearly all completions earn everything: from the beginning, or by now; or the reward is
    earned without the answer."""
    had = facts.of(SIGNAL).first().median < FLAT
    if hacks := sorted({found.code for found in reward_hacks(facts)}):
        why = f"the reward is earned without the right answer: see {', '.join(hacks)}"
        how = "let the reward refuse such completions, and train again"
        return _Reason("no_signal_easy", "problem", told, why, how, "rewards")
    why = "the model has learned what these problems can teach"
    how = (
        "stop here (stop.target), or take harder problems: difficulty.skip_right skips problems "
        "that are always solved"
    )
    return _Reason(
        code="no_signal_easy",
        level="notice" if had else "problem",
        told=told,
        cause=why if had else "the problems are too easy for the model",
        remedy=how,
        keys="stop.target difficulty.skip_right",
    )


def _hard(facts: RunSnapshot) -> _Reason:
    """Hardly any completion earns a reward: from the beginning, or by now."""
    told = "hardly any completion earns a reward"
    if any(reward_fell(facts)):
        why = "the policy has lost what it could do, as its reward shows"
        how = "continue from the best checkpoint with a lower training.learning_rate"
        return _Reason("no_signal_hard", "problem", told, why, how, "training.learning_rate")
    return _Reason(
        code="no_signal_hard",
        level="problem",
        told=told,
        cause="the problems are too hard for the model, or the reward never finds what it looks "
        "for: `hone rollouts` shows answers beside their rewards",
        remedy="check the reward by `hone grade`, then take easier problems, more completions of "
        "each (sampling.group_size), longer ones (sampling.max_tokens), or skip what is always "
        "wrong (difficulty.skip_wrong)",
        keys="sampling.group_size sampling.max_tokens difficulty.skip_wrong",
    )


def _equal(facts: RunSnapshot, same: float) -> _Reason:
    """Rewards are equal, and neither all right nor all wrong."""
    if facts.job.sampling.group_size == 1:
        why = "sampling.group_size is 1, so no completion is compared with another"
        how, keys = "set sampling.group_size to 8 or more", "sampling.group_size"
    elif same >= SAME_ANSWERS:
        why = f"in {percent(same)} of the groups all completions are the same text"
        how = "raise sampling.temperature; widen sampling.top_p, top_k and min_p, if they are set"
        keys = "sampling.temperature sampling.top_p sampling.top_k sampling.min_p"
    else:
        why = "the rewards give different completions the same number"
        how, keys = "let the rewards tell better from worse answers: try `hone grade`", "rewards"
    told = "all completions of a prompt earn the same"
    return _Reason(
        code="no_signal_equal", level="problem", told=told, cause=why, remedy=how, keys=keys
    )


def _share_of_one_text(batch: Batch | None) -> float:
    """Returns the share of groups whose completions are all one text; 0 if it is not known."""
    groups = [group for group in batch.groups if len(group.rollouts) > 1] if batch else []
    texts = [{rollout.text for rollout in group.rollouts} for group in groups]
    return statistics.fmean(len(each) == 1 for each in texts) if texts else 0.0


def reward_constant(facts: RunSnapshot) -> Iterator[Finding]:
    """One of several rewards has never varied."""
    if len(facts.job.rewards) < 2:
        return  # then no group has signal, which is said by `no_signal`
    for reward in facts.job.rewards:
        mean, std = (facts.of(f"rewards/{reward.label}/{each}") for each in ("mean", "std"))
        if len(std) < FEWEST or max(std.values) > 0 or max(mean.values) > min(mean.values):
            continue
        value, has_all = mean.values[-1], mean.values[-1] >= 1
        yield finding(
            code="reward_constant",
            level="notice" if has_all else "warning",
            since_step=mean.steps[0],
            evidence=[mean, std],
            title=f"reward {reward.label!r} has given every completion {value:g} in all "
            f"{len(mean)} steps",
            cause="every completion has what it rewards already"
            if has_all
            else "it finds in no completion what it looks for, or looks at the wrong column",
            remedy="try it on a completion that should differ (`hone grade`), or leave reward "
            f"{reward.label!r} out",
            keys="rewards",
        )


def rewards_contradict(facts: RunSnapshot) -> Iterator[Finding]:
    """Two rewards pull against each other within the groups of the newest batch."""
    if not (batch := facts.newest):
        return
    weighed = [reward for reward in facts.job.rewards if reward.weight]
    for one, other in itertools.combinations(weighed, 2):
        pairs = _within_groups(batch.scores, one, other)
        found = correlation(pairs)
        if len(pairs) < FEWEST_PAIRS or found is None or found > CONTRADICTS:
            continue
        shown = Evidence(
            metric="rollouts",
            steps=(batch.step,),
            values=(round(found, 4),),
            text=f"correlation of what both add to the reward, over {len(pairs)} completions, "
            "each less its group's mean",
        )
        yield finding(
            code="rewards_contradict",
            level="warning",
            since_step=batch.step,
            evidence=[shown],
            title=f"rewards {one.label!r} and {other.label!r} pull against each other: among the "
            f"completions of a prompt their correlation is {found:.2f}",
            cause="what one of them rewards costs the other one, so their sum moves little",
            remedy="lower the weight of one, or set its `shaping` so that it decides no group",
            keys="rewards.weight rewards.shaping",
        )


def _within_groups(
    scores_PG: Sequence[Sequence[Score]], one: RewardSpec, other: RewardSpec
) -> list[tuple[float, float]]:
    """Returns what both rewards add to each completion that has both, less the group's mean."""
    found: list[tuple[float, float]] = []
    for scores_G in scores_PG:
        both = [
            (one.weight * a.value, other.weight * b.value)
            for score in scores_G
            if (a := score.parts.get(one.label)) and (b := score.parts.get(other.label))
            if a.value is not None and b.value is not None
        ]
        if len(both) > 1:
            means = [statistics.fmean(each) for each in zip(*both, strict=True)]
            found += [(a - means[0], b - means[1]) for a, b in both]
    return found


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns Pearson's correlation; None where one side does not vary."""
    if len(pairs) < 2:
        return None
    ones, others = zip(*pairs, strict=True)
    try:
        return statistics.correlation(ones, others)
    except statistics.StatisticsError:
        return None


def truncation(facts: RunSnapshot) -> Iterator[Finding]:
    """Many completions reach `sampling.max_tokens`."""
    cut_off = facts.of("completions/clipped_ratio")
    last = cut_off.last()
    if len(cut_off) < FEWEST or last.median < TRUNCATED:
        return
    masks = facts.job.advantages.mask_truncated
    yield finding(
        code="truncation",
        level="problem" if last.median >= MOSTLY_TRUNCATED else "warning",
        since_step=cut_off.since(lambda share: share >= TRUNCATED),
        evidence=[cut_off, facts.of("completions/mean_length")],
        title=f"{percent(last.median)} of the completions of {steps_of(last)} were cut off at "
        f"{facts.job.sampling.max_tokens} tokens",
        cause="sampling.max_tokens ends completions before the model does, or the model does not "
        "know how to end (a template or a stop token is missing)"
        + ("; they are left out of training (advantages.mask_truncated)" if masks else ""),
        remedy="raise sampling.max_tokens; if completions do not end by themselves, check "
        "sampling.stop and the chat template"
        + ("" if masks else "; advantages.mask_truncated leaves them out of training"),
        keys="sampling.max_tokens sampling.stop advantages.mask_truncated",
    )


def overlong_prompts(facts: RunSnapshot) -> Iterator[Finding]:
    """Many prompts leave no room for a completion."""
    series = facts.of("overlong_prompts")
    if series and series.last().median >= OVERLONG:
        yield finding(
            code="overlong_prompts",
            level="warning",
            since_step=series.since(lambda share: share >= OVERLONG),
            evidence=[series],
            title=f"{percent(series.last().median)} of the prompts are too long for the model "
            f"beside sampling.max_tokens = {facts.job.sampling.max_tokens}",
            cause="prompt and completion together have to fit max_model_len",
            remedy="raise max_model_len, lower sampling.max_tokens, or say what happens to such "
            'prompts by sampling.overlong_prompts ("drop" takes others)',
            keys="max_model_len sampling.max_tokens sampling.overlong_prompts",
        )


def missing_rewards(facts: RunSnapshot) -> Iterator[Finding]:
    """Completions without a reward, with the graders' reasons."""
    series = facts.of("missing_rewards")
    last = series.last(FEWEST)
    if series and last.median >= MISSING:
        yield finding(
            code="missing_rewards",
            level="problem" if last.median >= MANY_MISSING else "warning",
            since_step=series.since(lambda share: share >= MISSING),
            evidence=[series, *_reasons(facts.newest, _why_missing)],
            title=f"{percent(last.median)} of the completions of {steps_of(last)} got no reward",
            cause="a grader, the sandbox or a judge failed on them; they are never counted as 0",
            remedy="fix what the reasons say, and try it with `hone grade`; beyond "
            "HONE_MAX_MISSING_REWARDS the job pauses",
            keys="rewards HONE_MAX_MISSING_REWARDS",
        )


def errored_rollouts(facts: RunSnapshot) -> Iterator[Finding]:
    """Completions that went wrong, or were not done in time."""
    errors, late = facts.of("errored_rollouts"), facts.of("timed_out_rollouts")
    last = errors.last(FEWEST)
    if not errors or last.median < WENT_WRONG:
        return
    slow = bool(late) and late.last(FEWEST).median >= last.median / 2
    yield finding(
        code="errored_rollouts",
        level="warning",
        since_step=errors.since(lambda share: share >= WENT_WRONG),
        evidence=[errors, late, *_reasons(facts.newest, _why_wrong)],
        title=f"{percent(last.median)} of the completions of {steps_of(last)} went wrong, and are "
        "neither graded nor trained on",
        cause="they were not done by HONE_GENERATE_DEADLINE_S"
        if slow
        else "see the reasons: prompts too long, a template that breaks, log-probs not finite",
        remedy="raise HONE_GENERATE_DEADLINE_S, or lower sampling.max_tokens"
        if slow
        else "fix the data or the settings that the reasons name",
        keys="HONE_GENERATE_DEADLINE_S sampling.max_tokens"
        if slow
        else "sampling.overlong_prompts max_model_len",
    )


def environment_failures(facts: RunSnapshot) -> Iterator[Finding]:
    """Conversations without a reward, as their environment died."""
    series = facts.of("environment_failures")
    last = series.last(FEWEST)
    if series and last.median >= MISSING:
        yield finding(
            code="environment_failures",
            level="warning",
            since_step=series.since(lambda share: share >= MISSING),
            evidence=[series, *_reasons(facts.newest, _why_wrong)],
            title=f"{percent(last.median)} of the conversations lost their environment",
            cause="its process died, its server refused more episodes, or a deadline passed",
            remedy="look at the environment's own log; lower sampling.prompts_per_step if it "
            "cannot hold as many episodes at once",
            keys="environment sampling.prompts_per_step",
        )


def _reasons(batch: Batch | None, reasons_of: Callable[[Batch], Iterable[str]]) -> list[Evidence]:
    """Returns the commonest reasons in a batch, the most frequent first."""
    counts = Counter(each[:REASON_CHARS] for each in reasons_of(batch)) if batch else Counter[str]()
    found = [f"{count} x {reason}" for reason, count in counts.most_common(NUM_REASONS)]
    step = (batch.step,) if batch else ()
    return [Evidence(metric="rollouts", steps=step, text="; ".join(found))] if found else []


def _why_missing(batch: Batch) -> Iterator[str]:
    for score in (score for scores_G in batch.scores for score in scores_G):
        for label, part in score.parts.items():
            if part.value is None and part.verdict != "skipped":
                yield f"{label}: {part.detail or part.verdict}"


def _why_wrong(batch: Batch) -> Iterator[str]:
    for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
        if rollout.went_wrong:
            yield rollout.error or rollout.finish_reason


def data_repeated(facts: RunSnapshot) -> Iterator[Finding]:
    """The job has gone through its data many times."""
    series = facts.of(PASSES)
    if series and series.values[-1] >= MANY_PASSES:
        yield finding(
            code="data_repeated",
            level="notice",
            since_step=series.since(lambda value: value >= MANY_PASSES),
            evidence=[series],
            title=f"the job has gone through its {_num_problems(facts, series)} problems "
            f"{series.values[-1]:.1f} times",
            cause="data.train has few problems for so many steps",
            remedy="add problems to data.train, take fewer steps, or let difficulty.skip_right "
            "skip what is learned; held-out problems (data.eval) show whether it still helps",
            keys="data.train steps difficulty.skip_right data.eval",
        )


def _num_problems(facts: RunSnapshot, passes: Series) -> int:
    return round(passes.steps[-1] * facts.job.sampling.prompts_per_step / passes.values[-1])


def data_exhausted(facts: RunSnapshot) -> Iterator[Finding]:
    """Nearly all problems are skipped as they teach nothing."""
    skipped, passes = facts.of("skipped_problems"), facts.of(PASSES)
    if not skipped or not passes:
        return
    num = _num_problems(facts, passes)
    if skipped.values[-1] >= USED_UP * num:
        yield finding(
            code="data_exhausted",
            level="warning",
            since_step=skipped.since(lambda value: value >= USED_UP * num),
            evidence=[skipped],
            title=f"{skipped.values[-1]:.0f} of {num} problems are skipped because they teach "
            "nothing",
            cause="the problems are all right or all wrong by now, so skipped ones are taken again",
            remedy="add problems to data.train, or let skipped ones come back sooner "
            "(difficulty.skip_steps)",
            keys="data.train difficulty.skip_steps",
        )


def evaluation_too_small(facts: RunSnapshot) -> Iterator[Finding]:
    """Held-out problems are too few to tell what training changed."""
    steps = facts.job.steps
    for held_out in facts.held_out():
        if len(held_out.rewards) > 1 and steps and held_out.rewards.steps[-1] >= LATE * steps:
            yield from _too_small(facts, held_out)
    summary = facts.record.summary if facts.record else None
    if summary and summary.get("evaluation"):
        yield from _cannot_compare(EvaluationReport.model_validate(summary["evaluation"]))


def _too_small(facts: RunSnapshot, held_out: HeldOut) -> Iterator[Finding]:
    rewards, half = held_out.rewards, held_out.half_widths[-1]
    first, last = rewards.values[0], rewards.values[-1]
    margin = held_out.margin(0, -1, facts.full_mark)
    if half < TOO_WIDE * facts.full_mark or abs(last - first) >= margin:
        return
    name = f"held-out set {held_out.name!r}" if held_out.name else "held-out problems"
    upper_end = Evidence(
        metric=f"{rewards.metric}_high",
        steps=rewards.steps[-1:],
        values=(round(last + half, 6),),
        text="upper end of the 95 % confidence interval",
    )
    yield finding(
        code="evaluation_too_small",
        level="notice",
        since_step=rewards.steps[-1],
        evidence=[rewards, upper_end],
        title=f"the {name} are too few to tell: the reward went from {first:.3f} to {last:.3f}, "
        f"and chance alone makes {margin:.3f} of difference",
        cause="the interval's width goes with one over the square root of the number of problems",
        remedy="take four times as many problems for half the width (data.eval, "
        "evaluation.num_prompts), or several completions of each (evaluation.samples, with "
        "evaluation.temperature above 0)",
        keys="data.eval evaluation.num_prompts evaluation.samples",
    )


def _cannot_compare(report: EvaluationReport) -> Iterator[Finding]:
    for of_set, model in ((each, model) for each in report.sets for model in each.models):
        found = model.differences.get("reward")
        if found is None or found.low is None or found.high is None:
            continue
        if (found.high - found.low) / 2 >= TOO_WIDE and found.low < 0 < found.high:
            yield finding(
                code="evaluation_too_small",
                level="notice",
                since_step=None,
                evidence=[Evidence(metric="eval/reward", text=of_set.source)],
                title=f"{of_set.num_problems} problems are too few to tell {model.name!r} from "
                f"{of_set.models[0].name!r}: {found.mean:+.3f}, between {found.low:+.3f} and "
                f"{found.high:+.3f} with 95 % confidence",
                cause="the models differ by less than these problems can show",
                remedy="take more problems (data.eval, evaluation.num_prompts) or several "
                "completions of each (evaluation.samples)",
                keys="data.eval evaluation.num_prompts evaluation.samples",
            )


def evaluation_ignored(facts: RunSnapshot) -> Iterator[Finding]:
    """The last evaluation counts nowhere, since too many completions have no reward."""
    for name in ("", *facts.job.evaluation.sets):
        prefix = metric_prefix(name)
        ignored, all_of = facts.of(f"{prefix}ignored"), facts.of(f"{prefix}errored_rollouts")
        if ignored and ignored.steps[-1] == all_of.steps[-1]:
            yield finding(
                code="evaluation_ignored",
                level="warning",
                since_step=ignored.steps[0],
                evidence=[ignored],
                title=f"the evaluation of step {ignored.steps[-1]} counts nowhere: "
                f"{percent(ignored.values[-1])} of its completions have no reward",
                cause="graders failed, or completions went wrong, on more than "
                "HONE_MAX_MISSING_REWARDS of them; neither stop.target nor checkpoints.keep_best "
                "takes it into account",
                remedy="see the reward service's log, and try the graders on a row of data.eval by "
                "`hone grade`",
                keys="HONE_MAX_MISSING_REWARDS data.eval",
            )
