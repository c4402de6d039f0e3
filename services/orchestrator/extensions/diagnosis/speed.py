"""Where the time of a step goes, and who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.orchestrator.extensions.diagnosis.facts import (
    FEWEST,
    WINDOW,
    Facts,
    Series,
    percent,
    steps_of,
)
from shared.wire import Evidence, Finding

LONG_S = 3600.0
"""Seconds that all steps of a job take, below which its speed is nobody's concern."""

SIDE_SHARE = 0.3
"""Share of a step that anything but sampling and training may take: these two are what is paid
for."""

BUSY, IDLE = 0.9, 0.5
"""Shares of time/step for which a service has work, from which on it bounds the step, and below
which it is idle most of the time."""

SLOWER = 2.0
"""How many times as long as its first steps a job's last ones take."""

FAIR_SHARE = 0.25
"""Share of its part of the groups below which a sampler is idle: uneven lengths leave a sampler
half of it."""

FEWEST_EACH = 4
"""Groups per sampler below which a step cannot be shared out."""

SIDES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reward": (
        "grading the last completions",
        "give the reward service more processors or HONE_SANDBOX_SLOTS, shorten a grader's "
        "timeout_s, or run it at another host (HONE_REWARD_URL)",
        ("HONE_SANDBOX_SLOTS", "HONE_REWARD_URL"),
    ),
    "sync": (
        "bringing the weights to the samplers",
        'take a faster weight_sync ("shm" on one host, "nccl" between GPUs, "lora" for adapters), '
        "or sync less often (sync_every, with max_staleness)",
        ("weight_sync", "sync_every", "max_staleness"),
    ),
    "store": ("writing the batch", "put HONE_RUNS_DIR on a faster disk", ("HONE_RUNS_DIR",)),
    "keep": ("writing finished groups", "put HONE_RUNS_DIR on a faster disk", ("HONE_RUNS_DIR",)),
    "record": ("writing the row", "put HONE_RUNS_DIR on a faster disk", ("HONE_RUNS_DIR",)),
    "checkpoint": (
        "writing checkpoints",
        "raise checkpoints.every, or put HONE_RUNS_DIR on a faster disk",
        ("checkpoints.every", "HONE_RUNS_DIR"),
    ),
    "eval": (
        "evaluating held-out problems",
        "raise evaluation.every, or lower evaluation.num_prompts or samples",
        ("evaluation.every", "evaluation.num_prompts", "evaluation.samples"),
    ),
}
"""Stages beside sampling and training: what they are, the remedy, and the keys that it names."""


def slow_stage(facts: Facts) -> Iterator[Finding]:
    """A stage beside sampling and training takes much of a step, or sampling alone bounds it."""
    total = facts.of("time/step").last()
    if not _is_long(facts):
        return
    for stage, (what, remedy, keys) in SIDES.items():
        series = _over(facts.of(f"time/{stage}"), total)
        share = sum(series.values) / sum(total.values)
        if share >= SIDE_SHARE:
            yield Finding(
                code="slow_stage",
                level="warning",
                title=f"{what} takes {percent(share)} of the time of {steps_of(total)}",
                since_step=total.steps[0],
                evidence=(series.evidence(), total.evidence()),
                cause=f"time/{stage} bounds the step, not sampling or training",
                remedy=remedy,
                keys=keys,
            )
    yield from _bound_by_samplers(facts, total)


def _is_long(facts: Facts) -> bool:
    """Returns whether the job takes so long that its speed matters."""
    total = facts.of("time/step")
    return len(total) >= FEWEST and total.last().median * facts.job.steps >= LONG_S


def _over(series: Series, total: Series) -> Series:
    """Returns the values at the steps of `total`."""
    kept = [(step, value) for step, value in series if step >= total.steps[0]]
    steps, values = zip(*kept, strict=True) if kept else ((), ())
    return Series(series.metric, steps, values)


def _bound_by_samplers(facts: Facts, total: Series) -> Iterator[Finding]:
    rollout, trainer = (facts.of(f"utilization/{each}") for each in ("rollout", "trainer"))
    if not facts.job.max_staleness or not trainer:
        return
    if rollout.last().median < BUSY or trainer.last().median > IDLE:
        return
    yield Finding(
        code="slow_stage",
        level="notice",
        title=f"sampling bounds the step: the samplers are busy for "
        f"{percent(rollout.last().median)} of {total.median:.0f} s, the trainer for "
        f"{percent(trainer.last().median)}",
        since_step=rollout.since(lambda share: share >= BUSY),
        evidence=(rollout.evidence(), trainer.evidence(), facts.of("time/generate").evidence()),
        cause="there are too few samplers for this trainer, or completions are very uneven: the "
        "longest one of a step ends it",
        remedy="add samplers (HONE_ROLLOUT_URL, HONE_ROLLOUT_REPLICAS), or lower "
        "sampling.max_tokens",
        keys=("HONE_ROLLOUT_URL", "HONE_ROLLOUT_REPLICAS", "sampling.max_tokens"),
    )


def samplers_wait(facts: Facts) -> Iterator[Finding]:
    """Samplers are idle most of the time, because they wait for the trainer."""
    rollout, total = facts.of("utilization/rollout"), facts.of("time/step").last()
    if not _is_long(facts) or not rollout or rollout.last().median > IDLE:
        return
    overlaps = facts.job.max_staleness > 0
    yield Finding(
        code="samplers_wait",
        level="notice",
        title=f"the samplers have work for {percent(rollout.last().median)} of a step of "
        f"{total.median:.0f} s",
        since_step=rollout.since(lambda share: share <= IDLE),
        evidence=(rollout.evidence(), facts.of("time/wait_for_trainer").evidence()),
        cause="the trainer is slower than they are"
        if overlaps
        else "with max_staleness = 0 sampling and training take turns",
        remedy="give the trainer more of the GPUs (HONE_TRAINER_RANKS), or take fewer samplers"
        if overlaps
        else "set max_staleness = 1, unless they share a GPU (HONE_COLOCATE)",
        keys=("HONE_TRAINER_RANKS",) if overlaps else ("max_staleness",),
    )


def sampler_idle(facts: Facts) -> Iterator[Finding]:
    """One sampler of several gets hardly any groups."""
    batch = facts.newest
    names = {each["replica"] for each in facts.syncs[-1]["samplers"]} if facts.syncs else set[str]()
    counts = Counter(group.replica for group in batch.groups) if batch else Counter[str]()
    total = sum(counts[name] for name in names)
    if batch is None or len(names) < 2 or total < FEWEST_EACH * len(names):
        return
    fair = total / len(names)
    for name in sorted(names):
        if counts[name] < FAIR_SHARE * fair:
            yield Finding(
                code="sampler_idle",
                level="notice",
                title=f"sampler {name!r} got {counts[name]} of {total} groups of step "
                f"{batch.step}; an equal part is {fair:.0f}",
                since_step=batch.step,
                evidence=(
                    Evidence(
                        metric="rollouts",
                        steps=(batch.step,),
                        text=", ".join(f"{each}: {counts[each]}" for each in sorted(names)),
                    ),
                ),
                cause="it is slower than the others, joined late, or has room for fewer tokens",
                remedy="see its line in `hone doctor`, and how many completions it may have at "
                "once (HONE_MAX_NUM_SEQS, HONE_GPU_MEMORY_UTILIZATION)",
                keys=("HONE_MAX_NUM_SEQS", "HONE_GPU_MEMORY_UTILIZATION"),
            )


def slower(facts: Facts) -> Iterator[Finding]:
    """Steps take far longer than in the beginning."""
    total = _without_extras(facts)
    if len(total) < 3 * WINDOW:
        return
    first, last = total.first().median, total.last().median
    if not _is_long(facts) or last < SLOWER * first:
        return
    stage, before, now = _grown(facts)
    length = facts.of("completions/mean_length")
    longer = length.last().median / max(length.first().median, 1.0) if length else 1.0
    yield Finding(
        code="slower",
        level="notice" if longer >= SLOWER else "warning",
        title=f"a step takes {last:.0f} s, and took {first:.0f} s in the beginning",
        since_step=total.since(lambda seconds: seconds >= SLOWER * first),
        evidence=(total.evidence(), facts.of(stage).evidence()),
        cause=f"{stage} went from {before:.1f} to {now:.1f} s"
        + (f"; completions are {longer:.1f} times as long" if longer >= SLOWER else ""),
        remedy="lower sampling.max_tokens if the length is of no use"
        if longer >= SLOWER
        else "see what else uses that machine; `hone doctor` shows how its services are",
        keys=("sampling.max_tokens",) if longer >= SLOWER else (),
    )


def _without_extras(facts: Facts) -> Series:
    """Returns time/step without evaluations and checkpoints, which only some steps have."""
    extras = [dict(facts.of(f"time/{each}")) for each in ("eval", "checkpoint")]
    total = facts.of("time/step")
    values = [value - sum(each.get(step, 0.0) for each in extras) for step, value in total]
    return Series(total.metric, total.steps, tuple(values))


def _grown(facts: Facts) -> tuple[str, float, float]:
    """Returns the stage that grew most, and its seconds at first and at last."""
    found: list[tuple[str, float, float]] = []
    for stage in ("generate", "reward", "store", "train", "sync", "keep"):
        series = facts.of(f"time/{stage}")
        if series:
            found.append((series.metric, series.first().median, series.last().median))
    return max(found, key=lambda one: one[2] - one[1], default=("time/step", 0.0, 0.0))
