"""Completions that were cut off, went wrong, or got no reward, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from services.orchestrator.extensions.diagnosis.facts import FEWEST, Facts, percent, steps_of
from shared.wire import Batch, Evidence, Finding

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

NUM_REASONS = 3

REASON_CHARS = 200

Reasons = Callable[[Batch], Iterable[str]]


def truncation(facts: Facts) -> Iterator[Finding]:
    """Many completions reach `sampling.max_tokens`."""
    cut_off = facts.of("completions/clipped_ratio")
    if len(cut_off) < FEWEST or cut_off.last().median < TRUNCATED:
        return
    last, limit = cut_off.last(), facts.job.sampling.max_tokens
    masks = facts.job.advantages.mask_truncated
    yield Finding(
        code="truncation",
        level="problem" if last.median >= MOSTLY_TRUNCATED else "warning",
        title=f"{percent(last.median)} of the completions of {steps_of(last)} were cut off at "
        f"{limit} tokens",
        since_step=cut_off.since(lambda share: share >= TRUNCATED),
        evidence=(cut_off.evidence(), facts.of("completions/mean_length").evidence()),
        cause="sampling.max_tokens ends completions before the model does, or the model does not "
        "know how to end (a template or a stop token is missing)"
        + ("; they are left out of training (advantages.mask_truncated)" if masks else ""),
        remedy="raise sampling.max_tokens; if completions do not end by themselves, check "
        "sampling.stop and the chat template"
        + ("" if masks else "; advantages.mask_truncated leaves them out of training"),
        keys=("sampling.max_tokens", "sampling.stop", "advantages.mask_truncated"),
    )


def overlong_prompts(facts: Facts) -> Iterator[Finding]:
    """Many prompts leave no room for a completion."""
    series = facts.of("overlong_prompts")
    if not series or series.last().median < OVERLONG:
        return
    yield Finding(
        code="overlong_prompts",
        level="warning",
        title=f"{percent(series.last().median)} of the prompts are too long for the model beside "
        f"sampling.max_tokens = {facts.job.sampling.max_tokens}",
        since_step=series.since(lambda share: share >= OVERLONG),
        evidence=(series.evidence(),),
        cause="prompt and completion together have to fit max_model_len",
        remedy="raise max_model_len, lower sampling.max_tokens, or say what happens to such "
        'prompts by sampling.overlong_prompts ("drop" takes others)',
        keys=("max_model_len", "sampling.max_tokens", "sampling.overlong_prompts"),
    )


def missing_rewards(facts: Facts) -> Iterator[Finding]:
    """Completions without a reward, with the graders' reasons."""
    series = facts.of("missing_rewards")
    if not series or series.last(FEWEST).median < MISSING:
        return
    last = series.last(FEWEST)
    yield Finding(
        code="missing_rewards",
        level="problem" if last.median >= MANY_MISSING else "warning",
        title=f"{percent(last.median)} of the completions of {steps_of(last)} got no reward",
        since_step=series.since(lambda share: share >= MISSING),
        evidence=(series.evidence(), *_reasons(facts.newest, _why_missing)),
        cause="a grader, the sandbox or a judge failed on them; they are never counted as 0",
        remedy="fix what the reasons say, and try it with `hone grade`; beyond "
        "HONE_MAX_MISSING_REWARDS the job pauses",
        keys=("rewards", "HONE_MAX_MISSING_REWARDS"),
    )


def errored_rollouts(facts: Facts) -> Iterator[Finding]:
    """Completions that went wrong, or were not done in time."""
    errors, late = facts.of("errored_rollouts"), facts.of("timed_out_rollouts")
    if not errors or errors.last(FEWEST).median < WENT_WRONG:
        return
    slow = bool(late) and late.last(FEWEST).median >= errors.last(FEWEST).median / 2
    yield Finding(
        code="errored_rollouts",
        level="warning",
        title=f"{percent(errors.last(FEWEST).median)} of the completions of "
        f"{steps_of(errors.last(FEWEST))} went wrong, and are neither graded nor trained on",
        since_step=errors.since(lambda share: share >= WENT_WRONG),
        evidence=(errors.evidence(), late.evidence(), *_reasons(facts.newest, _why_wrong)),
        cause="they were not done by HONE_GENERATE_DEADLINE_S"
        if slow
        else "see the reasons: prompts too long, a template that breaks, log-probs not finite",
        remedy="raise HONE_GENERATE_DEADLINE_S, or lower sampling.max_tokens"
        if slow
        else "fix the data or the settings that the reasons name",
        keys=("HONE_GENERATE_DEADLINE_S", "sampling.max_tokens")
        if slow
        else ("sampling.overlong_prompts", "max_model_len"),
    )


def environment_failures(facts: Facts) -> Iterator[Finding]:
    """Conversations without a reward, as their environment died."""
    series = facts.of("environment_failures")
    if not series or series.last(FEWEST).median < MISSING:
        return
    yield Finding(
        code="environment_failures",
        level="warning",
        title=f"{percent(series.last(FEWEST).median)} of the conversations lost their environment",
        since_step=series.since(lambda share: share >= MISSING),
        evidence=(series.evidence(), *_reasons(facts.newest, _why_wrong)),
        cause="its process died, its server refused more episodes, or a deadline passed",
        remedy="look at the environment's own log; lower sampling.prompts_per_step if it cannot "
        "hold as many episodes at once",
        keys=("environment", "sampling.prompts_per_step"),
    )


def _reasons(batch: Batch | None, reasons_of: Reasons) -> list[Evidence]:
    """Returns the commonest reasons in a batch, the most frequent first."""
    counts = Counter(reasons_of(batch)) if batch else Counter[str]()
    found = [f"{count} x {reason}" for reason, count in counts.most_common(NUM_REASONS)]
    step = (batch.step,) if batch else ()
    return [Evidence(metric="rollouts", steps=step, text="; ".join(found))] if found else []


def _why_missing(batch: Batch) -> Iterator[str]:
    for scores_G in batch.scores:
        for score in scores_G:
            for label, part in score.parts.items():
                if part.value is None and part.verdict != "skipped":
                    yield f"{label}: {part.detail or part.verdict}"[:REASON_CHARS]


def _why_wrong(batch: Batch) -> Iterator[str]:
    for group in batch.groups:
        for rollout in group.rollouts:
            if rollout.went_wrong:
                yield (rollout.error or rollout.finish_reason)[:REASON_CHARS]
