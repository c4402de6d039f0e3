"""What is wrong with a run: `GET /v1/jobs/{job_id}/findings`; why sampler and trainer disagree:
`POST /v1/jobs/{job_id}/experiments`."""

from __future__ import annotations

from typing import Literal

from shared.wire.base import JobId, Listing, Wire
from shared.wire.jobs import JobStatus

FindingLevel = Literal["problem", "warning", "notice"]
"""How much it matters: a "problem" keeps the job from its aim, a "warning" probably does, and a
"notice" is worth knowing."""

FindingCode = Literal[
    "no_signal_hard",
    "no_signal_easy",
    "no_signal_equal",
    "reward_constant",
    "rewards_contradict",
    "reward_fell",
    "held_out_falls",
    "lengths_collapse",
    "lengths_at_limit",
    "one_text",
    "rewarded_copies",
    "rewarded_without_answer",
    "truncation",
    "overlong_prompts",
    "entropy_collapse",
    "kl_spike",
    "gradient_spike",
    "updates_too_large",
    "updates_too_small",
    "steps_skipped",
    "mismatch",
    "off_policy",
    "slow_stage",
    "slower",
    "samplers_wait",
    "sampler_idle",
    "data_repeated",
    "data_exhausted",
    "evaluation_too_small",
    "evaluation_ignored",
    "missing_rewards",
    "errored_rollouts",
    "environment_failures",
    "failed",
    "paused",
    "waits",
    "stalled",
    "recovers_often",
]
"""What a program tells findings apart by; docs/diagnosis.md explains each."""


class Evidence(Wire):
    """What a finding follows from: a `metric` with its `values` at `steps`, in the same order; or
    what `text` says, with `metric` as the place where it was found (rollouts, record)."""

    metric: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    text: str = ""


class Finding(Wire):
    """One thing that is wrong, or probably is. `title`, `cause` and `remedy` are for people: what
    is so, why it probably is, what to do. `since_step` is the first step of which it is true; None:
    it is about no step. `keys` are the keys of the job and the settings that the remedy names."""

    code: FindingCode
    level: FindingLevel
    title: str
    since_step: int | None = None
    evidence: tuple[Evidence, ...] = ()
    cause: str
    remedy: str
    keys: tuple[str, ...] = ()


class FindingList(Listing[Finding]):
    """Everything that is wrong with a job, the worst first, as of its last `step` with metrics.
    `well`: nothing is a problem or a warning."""

    job_id: JobId
    status: JobStatus
    step: int
    well: bool
    findings: tuple[Finding, ...]


class Experiment(Wire):
    """A comparison with one sampler. `agrees` None: it could not be made, and `detail` says why.
    `difference` is the mean absolute difference of log-probs in nats, and `allowed` what rounding
    may come to."""

    name: str
    sampler: str
    agrees: bool | None
    difference: float | None = None
    allowed: float | None = None
    detail: str = ""


class ExperimentReport(Listing[Experiment]):
    """Experiments with each sampler that serves the job, by its weights of `version`, and the
    `causes` that they leave; none: they do not tell."""

    job_id: JobId
    version: int
    experiments: tuple[Experiment, ...]
    causes: tuple[str, ...] = ()
