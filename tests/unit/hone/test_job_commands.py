"""`hone ls`, `cancel`, `pause`, `resume`, `rm`: what is printed of what comes back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hone.cli import app
from hone.commands import jobs, results, stack, submit
from hone.long_calls import CheckpointDownload, Progress
from hone.view import job_table
from services.orchestrator.store.records import fields_of
from shared.errors import BadRequest, NotFound
from shared.job import Job
from shared.wire import (
    Checkpoint,
    CheckpointList,
    JobDeleted,
    JobList,
    JobRecord,
    JobState,
    Obstacle,
    Plan,
    Recovered,
    RecoveredJob,
)
from shared.wire.records import Cost, Placement, StepTime, TrainerMemory
from tests.support.job_records import JOB, record

PLACEMENT = Placement.model_construct(
    trainer=TrainerMemory.model_construct(peak_gib=13.002),
    time=StepTime(sample_s=7.9, train_s=44.8, step_s=52.9),
)
COST = Cost(currency="USD", per_hour=1.1016, per_step=0.016, total=2.59)


WAITS_FOR = {
    "gpu-1:8002": Obstacle(job="demo-0"),
    "gpu-3:8002": Obstacle(away="no connection"),
}


class Orchestrator:
    """Answers as `hone.Client` does, for a job in one state."""

    waits: Mapping[str, object] = {}
    url = "http://127.0.0.1:8000"

    def __init__(self, status: str) -> None:
        why = "gave up after 20 attempts" if status == "paused" else None
        self.record = record(status, why).model_copy(update=self.waits)

    def list(self, limit: int, **wanted: Any) -> JobList:
        return JobList(jobs=(self.record,)[:limit], unreadable=("old-1",)[:limit])

    def submit(self, job: Job, *, key: str | None = None) -> JobRecord:
        return self.record

    def plan(self, job: Job) -> Plan:
        if job.model == "owner/unknown":
            raise BadRequest("the model 'owner/unknown' is not in the cache")
        return Plan.model_construct(
            gpus="1xA10G", fits=True, placement=PLACEMENT, steps=job.steps, cost=COST
        )

    def get(self, job: str) -> JobRecord:
        if job not in (self.record.id, self.record.name):
            raise NotFound(f"no job {job!r}")
        return self.record

    def change(self, job: str, changes: Sequence[str] = ()) -> JobState:
        return JobState(id=self.get(job).id, status=self.record.status)

    cancel = pause = resume = change

    def checkpoints(self, job: str) -> CheckpointList:
        path = f"{self.get(job).run_dir}/checkpoints/step-000003"
        return CheckpointList(checkpoints=(Checkpoint(step=3, path=path, size_bytes=3 << 19),))

    def download(
        self, job: str, to: Path | None, *, step: int | None, state: bool, progress: Progress
    ) -> CheckpointDownload:
        progress("config.json", 1, 2)
        name = f"{self.get(job).id}-step-{step or 3:06d}{'-state' if state else ''}"
        return CheckpointDownload(step=step or 3, folder=to or Path(name), files=())

    def recover(self) -> Recovered:
        broken = RecoveredJob(id="broken-1", problem="it cannot be read: [no] JSON")
        job = RecoveredJob(id="demo-1", status="paused", step=3, steps=9)
        return Recovered(jobs=(broken, job, job.model_copy(update={"known": True})))

    def delete(self, job: str, *, files: bool) -> JobDeleted:
        return JobDeleted(id=self.get(job).id, files=files)


def run(monkeypatch: pytest.MonkeyPatch, status: str, *arguments: str) -> tuple[int, str]:
    for module in (jobs, results, stack, submit):
        connected = contextlib.nullcontext(Orchestrator(status))
        monkeypatch.setattr(module, "connect", lambda connected=connected: connected)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return result.exit_code, result.output


def test_what_a_job_will_cost_is_said_when_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'name = "t"\nmodel = "owner/model"\nsteps = 3\n[data]\ntrain = "x"\n'
        '[[rewards]]\ngrader = "length"\n'
    )
    code, shown = run(monkeypatch, "queued", "submit", str(file))
    said = (
        "  estimated: 13.0 GiB for the trainer on 1xA10G, 52.9 s a step, all steps: about 3 "
        "minutes, 2.59 USD (1.10 USD per hour)\n"
    )
    assert code == 0 and said in shown
    code, shown = run(monkeypatch, "queued", "submit", str(file), "--set", "model=owner/unknown")
    assert code == 0 and "  not planned: the model 'owner/unknown' is not in the cache\n" in shown


def test_jobs_are_listed_for_people_and_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = run(monkeypatch, "running", "ls")
    assert code == 0 and shown.splitlines()[1].split()[:3] == ["demo-1", "running", "3/9"]
    assert shown.splitlines()[2:] == ["not shown, for this version of Hone cannot read them: old-1"]
    _, shown = run(monkeypatch, "running", "ls", "-o", "json")
    assert [job["id"] for job in json.loads(shown.splitlines()[0])] == ["demo-1"]
    _, shown = run(monkeypatch, "running", "ls", "--limit", "0")
    assert shown == "no jobs yet; `hone submit JOB.toml` starts one\n"


def test_jobs_are_listed_by_status_name_and_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Noting(Orchestrator):
        def list(self, limit: int, **wanted: Any) -> JobList:
            asked.append(wanted)
            return super().list(limit)

    monkeypatch.setattr(f"{__name__}.Orchestrator", Noting)
    given = ("--status", "paused", "--name", "demo", "--metadata", "team=a=b", "--metadata", "x=")
    assert run(monkeypatch, "paused", "ls", *given)[0] == 0
    metadata = {"team": "a=b", "x": ""}
    assert asked == [{"status": "paused", "name": "demo", "metadata": metadata}]
    code, shown = run(monkeypatch, "paused", "ls", "--metadata", "team")
    assert code == 2 and "--metadata 'team': expected NAME=VALUE" in shown
    code, shown = run(monkeypatch, "paused", "ls", "demo", "--name", "demo")
    assert code == 2 and "choose from the list; name no job" in shown


@pytest.mark.parametrize(
    ("command", "status", "sentence"),
    [
        ("cancel", "cancelled", "job demo-1 is cancelled"),
        ("cancel", "running", "job demo-1 is being cancelled"),
        ("pause", "paused", "job demo-1 is paused; `hone resume demo-1` continues from there"),
        (
            "pause",
            "running",
            "job demo-1 is being paused; `hone resume demo-1` continues from there",
        ),
        ("resume", "queued", "job demo-1 is queued; `hone logs -f demo-1` watches it"),
    ],
)
def test_a_change_is_told_in_a_sentence_or_as_json(
    monkeypatch: pytest.MonkeyPatch, command: str, status: str, sentence: str
) -> None:
    assert run(monkeypatch, status, command, "demo") == (0, sentence + "\n")
    _, shown = run(monkeypatch, status, command, "demo", "-o", "json")
    assert json.loads(shown)["status"] == status


def test_a_job_is_removed_with_its_files_or_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "failed", "rm", "demo") == (0, "job demo-1 is removed\n")
    _, shown = run(monkeypatch, "failed", "rm", "demo", "--files")
    assert shown == "job demo-1 and its run folder are removed\n"
    _, shown = run(monkeypatch, "failed", "rm", "demo", "--files", "-o", "json")
    assert json.loads(shown) == {"id": "demo-1", "files": True}


def test_an_error_is_one_sentence_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = run(monkeypatch, "queued", "ls", "other")
    assert (code, shown) == (2, "hone: no job 'other'\n")


def test_a_paused_job_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = run(monkeypatch, "paused", "ls")
    assert shown.splitlines()[2] == "demo-1 is paused: gave up after 20 attempts"


def test_what_was_rebuilt_is_shown_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = run(monkeypatch, "paused", "recover")
    assert code == 0 and [" ".join(line.split()) for line in shown.splitlines()] == [
        "job status step",
        "broken-1 it cannot be read: [no] JSON",
        "demo-1 paused 3/9 rebuilt from its run folder",
        "demo-1 paused 3/9 was known already",
    ]


def test_a_queued_job_is_shown_with_its_place_and_who_has_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: dict[str, object] = {"place": 2, "waits_for": WAITS_FOR}
    monkeypatch.setattr(Orchestrator, "waits", waits)
    _, shown = run(monkeypatch, "queued", "ls")
    assert shown.splitlines()[1].split()[:3] == ["demo-1", "queued", "(2)"]
    assert shown.splitlines()[2:4] == [
        "the trainer gpu-1:8002 is taken by demo-0",
        "the trainer gpu-3:8002 takes no job: no connection",
    ]
    _, shown = run(monkeypatch, "queued", "ls", "demo")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "place in the queue 2" in lines
    assert any(
        line.startswith("waits because the trainer gpu-1:8002 is taken by") for line in lines
    )


def test_a_job_of_0_steps_is_shown_with_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"name": "base", "missing_rewards": 0.0, "errored_rollouts": 0.0}
    scores["metrics"] = {"reward": {"mean": 0.25, "num_problems": 8}}
    held_out = {"name": "", "source": "'t.jsonl'", "num_problems": 8, "num_samples": 1}
    report = {
        "id": "eval-1",
        "temperature": 0,
        "seed": 0,
        "sets": [held_out | {"models": [scores]}],
    }
    ended: dict[str, object] = {"step": 0, "steps": 0, "summary": {"evaluation": report}}
    monkeypatch.setattr(Orchestrator, "waits", ended)
    _, shown = run(monkeypatch, "succeeded", "ls")
    assert shown.splitlines()[1].split()[:3] == ["demo-1", "succeeded", "evaluates"]
    _, shown = run(monkeypatch, "succeeded", "ls", "demo")
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "8 problems of 't.jsonl', 1 completion(s) each, temperature 0, seed 0" in lines
    assert "base 8 0.250" in lines
    _, shown = run(monkeypatch, "succeeded", "ls", "demo", "-o", "json")
    assert json.loads(shown)["summary"]["evaluation"]["id"] == "eval-1"


def test_a_job_that_waits_for_what_is_not_there_says_for_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = "cannot reach the reward service at http://127.0.0.1:8003: ConnectError"
    monkeypatch.setattr(Orchestrator, "waits", {"waits": away})
    _, shown = run(monkeypatch, "running", "ls")
    assert shown.splitlines()[2] == f"demo-1 waits: {away}"


def test_checkpoints_are_listed_and_one_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shown = run(monkeypatch, "running", "download", "demo", "--list")
    assert [line.split() for line in shown.splitlines()] == [
        ["step", "MiB", "folder"],
        ["3", "1.5", "/runs/demo-1/checkpoints/step-000003"],
    ]
    code, shown = run(monkeypatch, "running", "download", "demo")
    assert (code, shown.strip()) == (0, "the checkpoint of step 3 is in demo-1-step-000003")
    arguments = ("demo", "--step", "5", "--to", "here", "--state", "-o", "json")
    _, shown = run(monkeypatch, "running", "download", *arguments)
    assert json.loads(shown) == {"step": 5, "folder": "here", "files": []}
    code, shown = run(monkeypatch, "running", "download", "other")
    assert code == 2 and "no job 'other'" in shown


def test_the_list_names_the_model_and_the_learning_rate() -> None:
    job = record("running").model_copy(
        update={"model": "/models/Qwen3-0.6B/", "learning_rate": fields_of(JOB)["learning_rate"]}
    )
    console = Console(width=160)
    with console.capture() as shown:
        console.print(job_table([job]))
    head, row = shown.get().splitlines()[:2]
    assert head.split() == ["job", "status", "step", "reward", "age", "ETA", "model", "rate"]
    assert row.split()[-2:] == ["Qwen3-0.6B", "1e-06"]
