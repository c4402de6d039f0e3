"""Estimates from completions: pass@k, and means over problems with 95 % confidence intervals. Pure.

Problems count as drawn at random from all possible ones, and the completions of one problem are
correlated. So an interval is over the means of problems, not over completions (clustered standard
errors, arXiv 2411.00640, sections 2.1 and 2.2):

    mean +- t s / sqrt(n),   s^2 = sum_i (x_i - mean)^2 / (n - 1)

with x_i the mean of problem i and t the quantile of Student's distribution with n - 1 degrees of
freedom. It was preferred to the bootstrap: it is exact for normal x_i, the same each time without a
seed, and wide enough for few problems, where the bootstrap's percentiles are too narrow. For two
models on the same problems, x_i is the difference on problem i (section 4.2), which removes the
problem's difficulty for both.

If only few differences are not 0, they are far from normal. For example, if one model alone got 4
of 200 problems right, the interval is above 0, though 4 coins fall alike as often as 1 time in 8.
For these the paired permutation test is exact (Fisher, The Design of Experiments, 1935, section
21).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from services.orchestrator.grpo.advantages import full_mark, outcome, reaches
from shared.job import Job
from shared.wire import Estimate, Score, ScoredGroup

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5 % quantiles of Student's distribution with 1 to 30 degrees of freedom."""

Z_975 = 1.959964
"""The 97.5 % quantile of the normal distribution."""

SHARES = ("pass@", "completions/clipped_ratio")
"""The beginnings of the names of metrics from 0 to 1."""

MAX_FLIPPED = 16
"""Most differing problems for the permutation test, which tries all signs, at most 65,536. With
more, Student's t is close to it."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the probability that at least one of `k` completions is right, unbiased, where
    `num_passed` of `num_samples` were: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374)."""
    if k > num_samples:
        raise ValueError(f"pass@{k} of {num_samples} completions; expected at most {num_samples}")
    draws = math.comb(num_samples, k)
    return (draws - math.comb(num_samples - num_passed, k)) / draws


def ks(num_samples: int) -> list[int]:
    """Returns the k for which pass@k is shown: the powers of 2, and the number of completions."""
    powers = [2**power for power in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def is_right(score: Score, job: Job) -> bool | None:
    """Returns whether the completion counts as right; None if it has no outcome."""
    value, chosen = outcome(score, job), job.evaluation.pass_reward
    if value is None:
        return None
    return reaches(value, full_mark(score, job) if chosen is None else chosen)


def problem_metrics(graded: ScoredGroup, job: Job) -> dict[str, float]:
    """Returns the metrics of one problem; its reward is without `shaping` rewards. Completions that
    went wrong or have no reward count neither as right nor as wrong, so k of pass@k is at most the
    number of the others."""
    metrics: dict[str, float] = {}
    rewards = [earned for score in graded.scores if (earned := outcome(score, job)) is not None]
    if rewards:
        metrics["reward"] = statistics.fmean(rewards)
        judged = [right for score in graded.scores if (right := is_right(score, job)) is not None]
        for k in ks(len(graded.scores)):
            if k <= len(judged):
                metrics[f"pass@{k}"] = pass_at_k(len(judged), sum(judged), k)
    for label in sorted({label for score in graded.scores for label in score.parts}):
        parts = [score.parts[label].value for score in graded.scores if label in score.parts]
        if applicable := [value for value in parts if value is not None]:
            metrics[f"rewards/{label}/mean"] = statistics.fmean(applicable)
    rollouts = [rollout for rollout in graded.group.rollouts if not rollout.went_wrong]
    if rollouts:
        metrics["completions/mean_length"] = statistics.fmean(r.num_sampled for r in rollouts)
        metrics["completions/clipped_ratio"] = statistics.fmean(
            rollout.finish_reason == "length" for rollout in rollouts
        )
    return metrics


def drop_partial_pass_at_k(problems: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Returns the problems' metrics without any pass@k that a problem with a pass@1 lacks: its mean
    would be over other problems than pass@1's."""
    judged = [metrics for metrics in problems if "pass@1" in metrics]
    partial = {
        name
        for name in _by_metric(judged)
        if name.startswith("pass@") and any(name not in metrics for metrics in judged)
    }
    return [
        {name: value for name, value in metrics.items() if name not in partial}
        for metrics in problems
    ]


def means(problems: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the problems that have it."""
    return {name: statistics.fmean(values) for name, values in _by_metric(problems).items()}


def estimates(problems: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    """Returns each metric's mean over the problems that have it, with its interval."""
    return {
        name: (share if name.startswith(SHARES) else estimate)(values)
        for name, values in _by_metric(problems).items()
    }


def differences(
    of: Sequence[Mapping[str, float]], to: Sequence[Mapping[str, float]]
) -> dict[str, Estimate]:
    """Returns the difference of each metric between model `of` and model `to` on the same problems,
    in the same order, over the problems where both have it."""
    pairs = [
        {name: one[name] - other[name] for name in one if name in other}
        for one, other in zip(of, to, strict=True)
    ]
    return {name: difference(values) for name, values in _by_metric(pairs).items()}


def difference(values: Sequence[float]) -> Estimate:
    """Returns the mean of at least one paired difference, with its p-value if few are not 0."""
    return estimate(values).model_copy(update={"p_value": permutation_p(values)})


def permutation_p(differences: Sequence[float]) -> float | None:
    """Returns the probability of a sum at least as far from 0 if each paired difference had either
    sign with probability 1/2; None if more than MAX_FLIPPED are not 0. For differences of -1, 0 or
    1 it is the p-value of McNemar's exact test."""
    sizes = [abs(value) for value in differences if not reaches(0.0, abs(value))]
    if len(sizes) > MAX_FLIPPED:
        return None
    sums = [0.0]
    for size in sizes:
        sums = [*(total + size for total in sums), *(total - size for total in sums)]
    observed = abs(math.fsum(differences))
    return sum(reaches(abs(total), observed) for total in sums) / len(sums)


def share(values: Sequence[float]) -> Estimate:
    """Returns the mean of at least one value from 0 to 1, with an interval within 0 and 1. If all
    are 0, or all 1, it is Wilson's interval, whose width is not 0: for n zeros `z^2 / (n +
    z^2)`."""
    plain = estimate(values)
    if plain.low is not None and plain.high is not None:
        bounds = {"low": max(plain.low, 0.0), "high": min(plain.high, 1.0)}
        return plain.model_copy(update=bounds)
    if len(values) == 1 or plain.mean not in (0, 1):
        return plain
    width = Z_975**2 / (len(values) + Z_975**2)
    low, high = (0.0, width) if plain.mean == 0 else (1 - width, 1.0)
    return plain.model_copy(update={"low": low, "high": high})


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of at least one value with its interval. A single value, or equal values,
    have no interval, because they do not show how much others would differ."""
    mean, count = statistics.fmean(values), len(values)
    if reaches(min(values), max(values)):
        return Estimate(mean=mean, num_problems=count)
    margin = t_975(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean=mean, low=mean - margin, high=mean + margin, num_problems=count)


def t_975(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's distribution; beyond the table by its expansion
    (Abramowitz and Stegun 26.7.5), right to 0.0001."""
    if degrees <= len(T_975):
        return T_975[degrees - 1]
    z = Z_975
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / degrees + second / degrees**2


def _by_metric(problems: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for metrics in problems for name in metrics)
    return {name: [metrics[name] for metrics in problems if name in metrics] for name in names}
