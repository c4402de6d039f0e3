"""A real run that does well has no findings, and each thing that is made wrong in it has one."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from services.orchestrator.extensions.diagnosis import diagnosing
from services.orchestrator.extensions.diagnosis import facts as gathering
from services.orchestrator.extensions.diagnosis.diagnosing import diagnose, findings_of
from services.orchestrator.extensions.diagnosis.facts import RunSnapshot
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.store.lists import Readable
from shared.job import Job
from shared.job.file import load_job
from shared.wire import Event, JobRecord, MetricsRow
from tests.support.run_facts import codes

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "tests/data/demo_run"
JOB = load_job(ROOT / "deploy/jobs/demo_tiny.toml")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The run folder of `make demo-tiny`, as it was when its job had succeeded."""
    folder = tmp_path / "demo-1"
    (folder / "rollouts").mkdir(parents=True)
    note = Note(created_at=1.0, finished_at=2.0, status="succeeded")
    (folder / "record.json").write_text(note.model_dump_json())
    (folder / "job.json").write_text(JOB.model_dump_json())
    for file in DEMO.glob("*.gz"):
        name = file.name.removesuffix(".gz")
        place = f"rollouts/{name}" if name.endswith(".msgpack") else name
        (folder / place).write_bytes(gzip.decompress(file.read_bytes()))
    return folder


def test_a_demo_that_learned_has_no_findings(run_folder: Path) -> None:
    facts, record = gathering.alone(run_folder)
    assert facts.newest and facts.newest.step == 40 and len(facts.syncs) == 41
    assert facts.learned and facts.of("total/passes").values[-1] == pytest.approx(1.019)
    listed = findings_of(facts, record, diagnose(facts))
    assert (listed.status, listed.step, listed.well) == ("succeeded", 40, True)
    assert not listed.findings


async def test_pages_that_ask_at_once_read_a_run_once_until_it_changes(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, record = gathering.alone(run_folder)
    read = list[Path]()

    def of_folder(folder: RunFolder, job: Job) -> RunSnapshot:
        read.append(folder.path)
        return gathering.of_folder(folder, job)

    class OneJob:
        async def get(self, _: str) -> JobRecord:
            return record

        async def newest_events(self, *_: object) -> list[Event]:
            return []

    monkeypatch.setattr(diagnosing, "of_folder", of_folder)
    findings = diagnosing.Findings(cast(Readable, OneJob()))
    first, *others = await asyncio.gather(*(findings.of("demo-1") for _ in range(3)))
    assert first == findings_of(facts, record, []) and others == [first, first]
    assert read == [run_folder]
    flat = {"frac_reward_zero_std": 1.0, "reward": 0.0}
    RunFolder(run_folder).append_metrics(MetricsRow(step=41, metrics=flat))
    assert (await findings.of("demo-1")).step == 41 and len(read) == 2
    record = record.model_copy(update={"status": "failed", "error": "the disk is full"})
    assert [finding.code for finding in await findings.of("demo-1")] == ["failed"]
    assert len(read) == 2


@pytest.mark.parametrize("steps", [1, 3, 6, 11, 21, 31])
def test_a_demo_under_way_has_no_findings(run_folder: Path, steps: int) -> None:
    facts = gathering.of_folder(RunFolder(run_folder), JOB)
    found = codes(replace(facts, rows=[row for row in facts.rows if row.step <= steps]))
    assert found == (["too_few_steps"] if steps < 5 else [])


def test_a_run_without_batches_or_syncs_is_diagnosed_by_its_metrics(run_folder: Path) -> None:
    for file in (*run_folder.glob("rollouts/*"), run_folder / "weights.jsonl"):
        file.unlink()
    facts, _ = gathering.alone(run_folder)
    assert not facts.newest and not facts.syncs and not diagnose(facts)
