"""The names of a step's metrics, and how they are computed. Names are TRL's if TRL has the metric;
docs/observability.md lists the other names, and what each metric means.

Rewards include dropped groups. Lengths are of the rollouts that did not end in an error. A step
follows the one before without a gap, so their time/step add up to the whole: waiting for the batch,
store, train, sync, checkpoint, eval and record. time/generate, time/reward and time/keep (until all
groups were sampled, then graded, then on disk) are of this step's batch: without staleness all of
the waiting for it, else in part under earlier steps.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.orchestrator.grpo.advantages import has_signal
from services.orchestrator.grpo.examples import teacher_metrics
from services.orchestrator.grpo.groups import ENVIRONMENT_FAILED, is_graded, missing_share
from services.orchestrator.grpo.pipeline import Step
from services.orchestrator.store.leases import SUPERVISED
from shared.job import Job
from shared.wire import Rollout, RolloutGroup, Score

REPLAYED = "replayed"
"""The metric, 1, of a step whose batch was on disk because an earlier attempt had sampled it."""

WRITTEN = "time/checkpoint"
"""The metric of a step whose checkpoint was written."""

TOKENS, HOURS, COST = "total/tokens", "total/hours", "total/cost"

PASSES = "total/passes"

CANARY_CHANGE = "canary_change"


def step_metrics(step: Step, job: Job, num_skipped: int | None = None) -> dict[str, float]:
    """Returns the metrics of a step whose weights serve. `num_skipped` problems are skipped, with
    `[difficulty]`."""
    result, plays = step.result, job.environment is not None and not job.is_pushed
    is_supervised, groups = job.is_supervised(step.batch.step), step.batch.groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    went_wrong = [rollout.went_wrong for rollout in rollouts]
    return {
        **(
            {SUPERVISED: 1.0, "errored_rollouts": statistics.fmean(went_wrong)}
            if is_supervised
            else reward_metrics((*step.batch.scores, *step.batch.dropped), job, groups)
        ),
        "dropped_groups": len(step.batch.dropped),
        "resampled_groups": step.num_resampled,
        "timed_out_rollouts": statistics.fmean(r.finish_reason == "timeout" for r in rollouts),
        "overlong_prompts": statistics.fmean(group.overlong for group in groups),
        "mixed_rollouts": statistics.fmean(len(r.versions) > 1 for r in rollouts),
        **_completion_metrics([rollout for rollout in rollouts if not rollout.went_wrong]),
        **(_conversation_metrics(rollouts) if plays else {}),
        **(
            teacher_metrics(step.batch, job.teacher.max_log_ratio)
            if job.teacher and not is_supervised
            else {}
        ),
        **({} if step.staleness is None else {"staleness": step.staleness}),
        **({} if step.canary_change is None else {CANARY_CHANGE: step.canary_change}),
        "skipped_steps": int(result.skipped),
        "num_examples": result.num_examples,
        "num_tokens": result.num_tokens,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        **result.metrics,
        **{f"time/{stage}": seconds for stage, seconds in step.seconds.items()},
        **({REPLAYED: 1.0} if step.replayed else {}),
        **({"skipped_problems": num_skipped} if num_skipped is not None else {}),
    }


def passes(step: int, job: Job, num_train: int | None) -> dict[str, float]:
    """Returns how often the job has gone through its `num_train` problems at the end of the step;
    empty for a stream, and for groups that were sampled elsewhere."""
    return {PASSES: step * job.sampling.prompts_per_step / num_train} if num_train else {}


def reward_metrics(
    scores_PG: Sequence[Sequence[Score]], job: Job, groups: Sequence[RolloutGroup] = ()
) -> dict[str, float]:
    """Returns reward statistics over `[P][G]` scores; a mean over nothing is left out. `groups` are
    the rollouts of the first scores; the turns of the other rollouts are not known."""
    scores = [score for scores_G in scores_PG for score in scores_G]
    present_PG = [
        [score.value for score in scores_G if score.value is not None] for scores_G in scores_PG
    ]
    values = [value for values_G in present_PG for value in values_G]
    spreads = [statistics.stdev(values_G) for values_G in present_PG if len(values_G) > 1]
    num_flat = sum(
        not has_signal(scores_G, job, group)
        for scores_G, group in itertools.zip_longest(scores_PG, groups)
    )
    # a rollout that came with advantages and without a reward is not graded, and did not go wrong
    went_wrong = [rollout.went_wrong for group in groups for rollout in group.rollouts]
    went_wrong += [not is_graded(score) for score in scores[len(went_wrong) :]]
    metrics = {
        "missing_rewards": missing_share(scores_PG),
        "errored_rollouts": statistics.fmean(went_wrong),
        "frac_reward_zero_std": num_flat / len(scores_PG),
    }
    if values:
        metrics["reward"] = statistics.fmean(values)
    if len(values) > 1:
        metrics["reward_std"] = statistics.stdev(values)
    if spreads:
        metrics["group_reward_std"] = statistics.fmean(spreads)
    for name in sorted({name for score in scores for name in score.parts}):
        parts = [score.parts[name].value for score in scores if name in score.parts]
        applicable = [value for value in parts if value is not None]
        if applicable:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(applicable)
        if len(applicable) > 1:
            metrics[f"rewards/{name}/std"] = statistics.stdev(applicable)
    return metrics


def _completion_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    ended = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    return {
        **_lengths("length", rollouts),
        **(_lengths("terminated_length", ended) if ended else {}),
        "completions/clipped_ratio": statistics.fmean(
            rollout.finish_reason == "length" for rollout in rollouts
        ),
    }


def _conversation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    played = [rollout.info for rollout in rollouts if not rollout.went_wrong]
    numbers_of = {
        name: [info[name] for info in played if name in info]
        for name in ("turns", "tool_calls", "tool_errors", "environment_s")
    }
    return {
        **{
            f"conversations/mean_{name}": statistics.fmean(numbers)
            for name, numbers in numbers_of.items()
            if numbers
        },
        "conversations/forks": sum(len(rollout.branches) for rollout in rollouts),
        **_agent_metrics(played),
        "environment_failures": statistics.fmean(
            ENVIRONMENT_FAILED in rollout.info for rollout in rollouts
        ),
    }


def _agent_metrics(played: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the means of the metrics that agents reported, over the rollouts with each."""
    values_of: dict[str, list[float]] = {}
    for info in played:
        for name, value in info.get("agent", {}).items():
            values_of.setdefault(f"agent/mean_{name}", []).append(value)
    return {name: statistics.fmean(values) for name, values in values_of.items()}


def _lengths(what: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = [rollout.num_sampled for rollout in rollouts]
    return {
        f"completions/mean_{what}": statistics.fmean(lengths),
        f"completions/min_{what}": min(lengths),
        f"completions/max_{what}": max(lengths),
    }


class StepClock:
    """Measures one step after another, without a gap between them. `busy_s` returns for each
    service the seconds so far in which it worked for the job."""

    def __init__(
        self,
        busy_s: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s = busy_s
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begins a step now."""
        self._began, self._before = self._clock(), dict(self._busy_s())

    def end(self) -> dict[str, float]:
        """Returns `time/step`, and as `utilization/<service>` the share of it in which the service
        was busy, 0 to 1; the next step begins."""
        began, before = self._began, self._before
        self.begin()
        seconds = self._began - began
        shares = {
            # the clock and the services are read one after the other
            f"utilization/{service}": min((busy_s - before.get(service, 0.0)) / seconds, 1.0)
            for service, busy_s in self._before.items()
        }
        return {"time/step": seconds, **(shares if seconds else {})}
