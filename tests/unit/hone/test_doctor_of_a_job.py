"""`hone doctor JOB`: what it shows, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from hone.cli import app
from hone.commands.doctor import findings_text
from shared.wire import Evidence, Finding, FindingList
from tests.support.run_facts import job_with

FOUND = Finding(
    code="truncation",
    level="warning",
    title="30% of the completions were cut off",
    since_step=3,
    evidence=(
        Evidence(metric="completions/clipped_ratio", steps=(8, 9), values=(0.29, 0.31)),
        Evidence(metric="rollouts", text="red \x1b[31m text"),
    ),
    cause="sampling.max_tokens is small",
    remedy="raise sampling.max_tokens",
)


def listed(*found: Finding, well: bool = False) -> FindingList:
    return FindingList(job_id="demo-1", status="running", step=9, well=well, findings=found)


def test_a_finding_is_shown_with_cause_remedy_and_evidence() -> None:
    assert findings_text(listed(FOUND)).plain == (
        "demo-1: running, step 9: not well:\n"
        "\n"
        "WARNING truncation since step 3\n"
        "  30% of the completions were cut off\n"
        "  cause: sampling.max_tokens is small\n"
        "  do:    raise sampling.max_tokens\n"
        "  seen:  completions/clipped_ratio of steps 8 to 9: 0.29, 0.31\n"
        "  seen:  rollouts: red \\x1b[31m text"
    )
    assert findings_text(listed(well=True)).plain == "demo-1: running, step 9: nothing is wrong"
    new = FindingList(job_id="demo-1", status="running", step=0, well=True, findings=())
    assert findings_text(new).plain == ("demo-1: running, step 0: no step is done yet to look at")


def run_folder(folder: Path, flat: float) -> Path:
    rows = [{"step": step, "reward": 0.0, "frac_reward_zero_std": flat} for step in range(1, 9)]
    folder.mkdir()
    (folder / "job.json").write_text(job_with().model_dump_json())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_folder_is_diagnosed_without_a_stack(tmp_path: Path) -> None:
    ill = run_folder(tmp_path / "ill-1", 1.0)
    result = CliRunner().invoke(app, ["doctor", str(ill)])
    assert result.exit_code == 1 and "PROBLEM no_signal_hard since step 1" in result.output
    asked = CliRunner().invoke(app, ["doctor", str(ill), "-o", "json"])
    found = FindingList.model_validate_json(asked.output)
    assert (asked.exit_code, found.job_id, found[0].code) == (1, "ill-1", "no_signal_hard")
    well = CliRunner().invoke(app, ["doctor", str(run_folder(tmp_path / "well-1", 0.2))])
    assert well.exit_code == 0 and "nothing is wrong" in well.output


def test_the_check_of_weights_takes_no_job() -> None:
    result = CliRunner().invoke(app, ["doctor", "demo", "--weights"])
    assert result.exit_code == 2 and "leave the job out" in result.output
