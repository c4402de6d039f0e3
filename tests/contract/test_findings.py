"""What is wrong with a job, over the API and without a stack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.job import Job
from shared.wire import Finding, FindingList, MetricsRow, Part, RolloutGroup
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures

MODULE = "services.orchestrator.extensions.diagnosis.diagnosing"

FLAT = {"frac_reward_zero_std": 1.0, "reward": 0.0}


async def found(stack: Stack, job_id: str) -> FindingList:
    return await stack.client.get(f"/v1/jobs/{job_id}/findings", FindingList)


async def test_a_job_that_does_well_has_no_findings(stack: Stack) -> None:
    record = await stack.until((await stack.submit()).id)
    listed = await found(stack, record.id)
    assert (listed.job_id, listed.status, listed.step) == (record.id, "succeeded", 8)
    assert listed.well and not listed.findings
    assert await found(stack, record.id) == listed, "asking changes nothing"


async def test_a_job_without_signal_is_told_so_also_without_a_stack(stack: Stack) -> None:
    def differ(group: RolloutGroup) -> RolloutGroup:
        said = [one.model_copy(update={"text": str(at)}) for at, one in enumerate(group.rollouts)]
        return group.model_copy(update={"rollouts": tuple(said)})

    stack.fakes.change["generate"] = differ
    record = await stack.until((await stack.submit()).id)
    for step in range(1, 9):
        stack.folder(record.id).replace_metrics(MetricsRow(step=step, metrics=FLAT))
    listed = await found(stack, record.id)
    (finding,) = listed
    assert (finding.code, finding.level, finding.since_step) == ("no_signal_hard", "problem", 1)
    assert not listed.well
    alone = subprocess.run(
        [sys.executable, "-m", MODULE, record.run_dir],
        capture_output=True,
        text=True,
    )
    assert FindingList.model_validate_json(alone.stdout) == listed, alone.stderr


async def test_what_is_wrong_is_in_the_events_once(stack: Stack) -> None:
    stack.fakes.grade = lambda item: Part(value=0.0)
    job = stack.job.model_copy(update={"steps": 12})
    record = await stack.until((await stack.submit(job)).id)
    events = [event for event in await stack.events(record.id) if "finding" in event.data]
    told = [Finding.model_validate(event.data["finding"]) for event in events]
    kinds = [finding.code for finding in told]
    assert kinds and len(kinds) == len(set(kinds)), "each kind is said once"
    assert kinds[0].startswith("no_signal") and {event.level for event in events} == {"warning"}
    assert events[0].message.startswith(f"step 5: {told[0].title}; probably {told[0].cause}; ")
    assert {finding.code for finding in await found(stack, record.id)} <= set(kinds)


async def test_a_reward_that_is_hacked_is_an_event_of_the_running_job(stack: Stack) -> None:
    """Completions repeat the sum and earn 1 from the first step on: said after step 1."""

    def repeats(group: RolloutGroup) -> RolloutGroup:
        rollouts = [one.model_copy(update={"text": "8 + 9"}) for one in group.rollouts]
        return group.model_copy(update={"rollouts": tuple(rollouts)})

    stack.fakes.change["generate"] = repeats
    stack.fakes.grade = lambda item: Part(value=1.0)
    rows = [{"prompt": f"{number}. What is 8 + 9?", "answer": 17} for number in range(20)]
    changes = {"data": {"train": rows}, "rewards": [{"grader": "math", "name": "right"}]}
    changes |= {"evaluation": {}}
    record = await stack.until(
        (await stack.submit(Job.model_validate(stack.job.model_dump() | changes))).id
    )
    events = [event for event in await stack.events(record.id) if "finding" in event.data]
    told = {event.data["finding"]["code"]: event for event in events}
    for code in ("rewarded_copies", "rewarded_without_answer"):
        assert told[code].level == "warning" and told[code].message.startswith("step 1: 100% of ")
        finding = Finding.model_validate(told[code].data["finding"])
        assert finding.level == "problem" and len(finding.evidence) == 3
        assert finding.evidence[1].text.endswith("What is 8 + 9?', completion '8 + 9', reward 1")
        assert code in [each.code for each in await found(stack, record.id)]


def test_a_folder_of_no_job_is_refused_with_a_sentence(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", MODULE, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "is no run folder: expected one with job.json" in ended.stderr
