"""The job files that come with Hone: each is a job, and maps rows of its data set by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from services.orchestrator.grpo.prompts import load_prompts
from shared.job.file import load_job
from shared.settings import Settings

ROOT = Path(__file__).parents[3]
JOBS = sorted((ROOT / "deploy/jobs").glob("*.toml"))


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_every_job_file_is_a_job(file: Path) -> None:
    assert load_job(file).name == file.stem.replace("_", "-")


def test_rows_of_public_data_sets_become_prompts_and_what_graders_read(tmp_path: Path) -> None:
    gsm8k = gzip.decompress((ROOT / "tests/data/gsm8k/test.jsonl.gz").read_bytes())
    opc = (ROOT / "tests/data/opc_sft_stage2/rows.jsonl").read_bytes()
    for name, rows, prompt, read in (
        ("gsm8k", gsm8k, "question", {"answer": "answer"}),
        ("opc_sft_stage2", opc, "instruction", {"tests": "testcase"}),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(rows)
        changes = [f"data.{key}={path}" for key in ("train", "eval")]
        job = load_job(ROOT / f"deploy/jobs/{name}.toml", changes)
        for made in load_prompts(job, Settings()).for_step(1):
            row = json.loads(rows.splitlines()[made.index])
            assert made.content[-1] == {"role": "user", "content": row[prompt]}
            assert {new: made.row[new] for new in read} == {
                new: row[old] for new, old in read.items()
            }
