"""What is wrong with a run. READ FIRST. Pure functions over its facts (facts.py): each yields a
finding where something is wrong and nothing where all is well, so page, `hone doctor JOB` and the
job's events say the same. docs/diagnosis.md has the table of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from services.orchestrator.extensions.diagnosis import (
    completions,
    problems,
    reward_hacking,
    rewards,
    speed,
    state,
    suspects,
    updates,
)
from services.orchestrator.extensions.diagnosis.facts import Facts
from services.orchestrator.extensions.diagnosis.gathering import of_folder
from services.orchestrator.store.folder import RunFolder
from shared.host.logs import get_logger
from shared.job import Job
from shared.wire import Finding, FindingList, JobRecord

Check = Callable[[Facts], Iterator[Finding]]

OF_STATE: tuple[Check, ...] = (
    state.ended_badly,
    state.waits,
    state.stalled,
    state.recovers_often,
)
"""Checks of the job's state at this moment."""

OF_RUN: tuple[Check, ...] = (
    updates.steps_skipped,
    updates.updates,
    suspects.reward_fell,
    reward_hacking.rewarded_copies,
    reward_hacking.rewarded_without_answer,
    rewards.no_signal,
    rewards.reward_constant,
    rewards.rewards_contradict,
    completions.missing_rewards,
    completions.errored_rollouts,
    completions.environment_failures,
    suspects.held_out_falls,
    suspects.lengths,
    suspects.one_text,
    completions.truncation,
    completions.overlong_prompts,
    updates.spikes,
    updates.entropy_collapse,
    updates.mismatch,
    updates.off_policy,
    problems.evaluation_ignored,
    problems.evaluation_too_small,
    problems.data_exhausted,
    problems.data_repeated,
    speed.slow_stage,
    speed.slower,
    speed.samplers_wait,
    speed.sampler_idle,
)
"""Checks of what the run's files say, and its summary. Of equal level, the state is shown first and
then an earlier check: what holds a run up, then what ruins it, then what follows from that."""

LEVELS = ("problem", "warning", "notice")


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Returns the findings, the worst first."""
    return _worst_first(found_by(OF_STATE, facts) + found_by(OF_RUN, facts))


def diagnose_run(folder: RunFolder, job: Job) -> tuple[Finding, ...]:
    """Returns the findings of a run folder. Reads its rows and its newest batches."""
    return diagnose(of_folder(folder, job))


def found_by(checks: Sequence[Check], facts: Facts) -> list[Finding]:
    """Returns what the checks find. One that fails is logged and finds nothing."""
    return [finding for check in checks for finding in _found_by(check, facts)]


def _found_by(check: Check, facts: Facts) -> list[Finding]:
    try:
        return list(check(facts))
    except Exception as error:  # the other checks may still say what is wrong
        get_logger().error("a check of the run failed", check=check.__name__, reason=repr(error))
        return []


def _worst_first(found: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level)))


def findings_of(
    facts: Facts, record: JobRecord, of_run: Sequence[Finding] | None = None
) -> FindingList:
    """Returns the findings as the API has them. `of_run`: the run's findings; None: unknown."""
    of_run = found_by(OF_RUN, facts) if of_run is None else of_run
    found = _worst_first([*found_by(OF_STATE, facts), *of_run])
    return FindingList(
        job_id=record.id,
        status=record.status,
        step=facts.rows[-1].step if facts.rows else 0,
        well=all(finding.level == "notice" for finding in found),
        findings=found,
    )
