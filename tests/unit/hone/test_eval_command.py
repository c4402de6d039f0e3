"""`hone eval`: which job and models its options stand for, and what is shown."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hone import cli, long_calls, reports
from hone.cli import app
from hone.client import Client
from hone.commands import eval as command
from hone.view import what_next
from shared.errors import BadRequest, NotFound
from shared.job import Job, StopSpec
from shared.job.file import parse_job
from shared.wire import (
    Checkpoint,
    CheckpointList,
    Estimate,
    EvaluationReport,
    JobProgress,
    JobRecord,
    ModelScores,
    SetReport,
)
from tests.support.job_records import JOB as JOB_RECORD
from tests.support.job_records import record

JOB = """
name = "demo"
model = "m/m"
steps = 1
[data]
train = "train.jsonl"
eval = "test.jsonl"
[sampling]
max_tokens = 7
[[rewards]]
grader = "exact_match"
"""


def scores(name: str, reward: float, margin: float | None, *, better: float = 0.0) -> ModelScores:
    def around(mean: float) -> Estimate:
        bounds = {} if margin is None else {"low": mean - margin, "high": mean + margin}
        return Estimate(mean=mean, num_problems=10, **bounds)

    return ModelScores(
        name=name,
        metrics={"reward": around(reward), "pass@1": around(reward)},
        differences={"reward": around(better), "pass@1": around(better)} if better else {},
        missing_rewards=0.0,
        errored_rollouts=0.05 if better else 0.0,
    )


SUBMITTED = parse_job(
    JOB_RECORD.model_dump(mode="json")
    | {
        "data": {"train": "t.jsonl", "eval": "held_out.jsonl"},
        "stop": {"max_hours": 1.0},
        "wandb": {"project": "p"},
        "metadata": {"team": "math"},
    }
)

REPORT = EvaluationReport(
    id="eval-1",
    temperature=0.6,
    seed=3,
    sets=(
        SetReport(
            name="hard",
            source="'test.jsonl'",
            num_problems=10,
            num_samples=4,
            models=(scores("base", 0.5, 0.04), scores("demo:50", 0.6, 0.04, better=0.1)),
        ),
    ),
)


class FakeClient:
    """An orchestrator that has a job "demo" with two checkpoints."""

    def __init__(self) -> None:
        self.job: Any = None
        self.raises: BaseException | None = None

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def checkpoints(self, job: str) -> CheckpointList:
        if job == "new":
            return CheckpointList(checkpoints=())
        if job != "demo":
            raise NotFound(f"no job {job!r}")
        found = [Checkpoint(step=step, path=f"/runs/{step}", size_bytes=1) for step in (50, 100)]
        return CheckpointList(checkpoints=tuple(found))

    def get(self, job: str) -> JobRecord:
        if job != "demo":
            raise NotFound(f"no job {job!r}")
        return JobRecord.model_validate(record("succeeded").model_dump() | {"job": SUBMITTED})

    def submit(self, job: Job, *, key: str) -> JobRecord:
        self.job = job
        found = record("queued").model_dump() | {"id": "eval-demo-1", "job": job}
        return JobRecord.model_validate(found | {"warnings": ("the model was not looked at",)})

    def run(self, _: Any) -> EvaluationReport:
        if self.raises:
            raise self.raises
        return REPORT


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient()
    monkeypatch.setattr(command, "connect", lambda: client)
    return client


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)


def test_a_job_file_says_what_to_evaluate_on_and_options_change_it(
    client: FakeClient, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    done = run("a/b", "--job", str(file), "-k", "4", "--temperature", "0.6", "--num-prompts", "9")
    assert done.exit_code == 0, done.output
    job = client.job
    assert (job.data.eval, job.sampling.max_tokens) == ("test.jsonl", 7)
    assert (job.evaluation.samples, job.evaluation.temperature) == (4, 0.6)
    assert (job.evaluation.num_prompts, job.rewards[0].grader) == (9, "exact_match")
    run("a/b", "--job", str(file), "--grader", "math", "--data", "other.jsonl", "--seed", "5")
    job = client.job
    assert (job.rewards[0].grader, job.data.eval, job.seed) == ("math", "other.jsonl", 5)


def test_a_job_that_was_submitted_says_what_to_evaluate_on_by_its_name(client: FakeClient) -> None:
    """What is about its training alone is left out."""
    assert run("a/b@v2", "demo", "--job", "demo", "--num-prompts", "9").exit_code == 0
    job = client.job
    assert (job.name, job.model, job.model_revision, job.steps) == ("eval-demo", "a/b", "v2", 0)
    assert (job.data.train, job.data.eval) == (None, "held_out.jsonl")
    assert (job.stop, job.wandb, job.rewards) == (StopSpec(), None, SUBMITTED.rewards)
    assert (job.evaluation.num_prompts, job.metadata) == (9, {"team": "math"})
    refused = run("a/b", "--job", "other")
    assert refused.exit_code == 2 and "no job 'other'" in refused.output
    refused = run("a/b", "--job", "demo", "--set", "data.eval=[]")
    assert refused.exit_code == 2, refused.output


def test_without_a_job_file_data_and_grader_do(client: FakeClient, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}")
    done = run("a/b", "--data", str(data), "--grader", "math", "--set", "data.template={{ q }}")
    assert done.exit_code == 0, done.output
    job = client.job
    assert (job.data.eval, job.data.template) == (str(data), "{{ q }}")
    refused = run("a/b", "--data", str(data))
    assert refused.exit_code == 2 and "--job with a job file, or --data" in refused.output


def test_a_model_is_a_folder_a_jobs_checkpoint_or_on_the_hub(
    client: FakeClient, tmp_path: Path
) -> None:
    data = ("--data", "x/y", "--grader", "math")
    run(str(tmp_path), "demo", "demo:50", "owner/name", "gpt2", "owner/name@abc", *data)
    models = client.job.evaluation.models
    assert [(model.model, model.revision) for model in models] == [
        (str(tmp_path.resolve()), None),
        ("/runs/100", None),
        ("/runs/50", None),
        ("owner/name", None),
        ("gpt2", None),
        ("owner/name", "abc"),
    ]
    assert models[2].name == "demo:50"
    wrong = run("demo:70", *data)
    assert wrong.exit_code == 2
    assert "no checkpoint of step 70; it has checkpoints of steps 50, 100" in " ".join(
        wrong.output.split()
    )
    assert run("new", *data).exit_code == 2


def test_a_checkpoint_is_evaluated_in_the_dtype_of_the_job_that_made_it(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own dtype is another one, and the base model's is not known."""
    trained = record("succeeded").model_copy(update={"summary": {"dtype": "float32"}})
    monkeypatch.setattr(client, "get", lambda job: trained if job == "demo" else none(job))
    file = tmp_path / "job.toml"
    file.write_text(JOB + '[training]\ndtype = "bfloat16"\n')
    done = run("a/b", "demo:50", "--job", str(file))
    assert client.job.training.dtype == "float32"
    assert done.stderr.splitlines()[0] == (
        "evaluates in float32: 'demo:50' was trained in float32; `--set training.dtype=...` takes "
        "another one"
    )
    run("a/b", "demo:50", "--job", str(file), "--set", "training.dtype=bfloat16")
    assert client.job.training.dtype == "bfloat16", "what the caller sets counts"
    run("a/b", "--job", str(file))
    assert client.job.training.dtype == "bfloat16", "of a model without a job nothing is known"
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    done = run(str(tmp_path), "--data", "x/y", "--grader", "math")
    assert client.job.training.dtype == "bfloat16"
    run(str(tmp_path), "demo", "--data", "x/y", "--grader", "math")
    assert client.job.training.dtype == "float32", "it has the numbers of both"


def none(job: str) -> JobRecord:
    raise NotFound(f"no job {job!r}")


def test_the_table_names_the_dtype() -> None:
    lines = printed(reports.evaluation_report(REPORT.model_copy(update={"dtype": "float32"})))
    assert lines[0].endswith("temperature 0.6, seed 3, float32")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"summary": {"checkpoint": "/r/c", "dtype": "float32"}},
            "vllm serve /r/c --dtype float32",
        ),
        ({"summary": {"checkpoint": "/r/c"}}, "vllm serve /r/c"),
    ],
)
def test_the_line_that_serves_a_checkpoint_names_its_dtype(
    changes: dict[str, Any], line: str
) -> None:
    done = record("succeeded").model_copy(update=changes)
    (shown,) = [each for each in what_next(done).plain.splitlines() if "vllm serve" in each]
    assert shown.strip().partition("    ")[0].strip() == line


def test_a_job_without_rewards_names_no_evaluation_that_would_be_refused() -> None:
    done = record("succeeded").model_copy(update={"summary": {"checkpoint": "/r/c"}})
    job = JOB_RECORD.model_copy(update={"data": SUBMITTED.data})
    assert "hone eval" in what_next(done.model_copy(update={"job": job})).plain
    dpo = job.model_copy(update={"rewards": ()})
    assert "hone eval" not in what_next(done.model_copy(update={"job": dpo})).plain


def test_the_report_is_a_table_and_json(client: FakeClient) -> None:
    done = run("base", "demo:50", "--data", "x/y", "--grader", "math", "-o", "json")
    assert EvaluationReport.model_validate(json.loads(done.stdout)) == REPORT


def test_the_job_is_named_at_once_with_what_is_probably_wrong(client: FakeClient) -> None:
    done = run("base", "--data", "x/y", "--grader", "math")
    assert done.stderr.splitlines() == ["warning: the model was not looked at", "job eval-demo-1"]
    assert client.job.name == "eval"


@pytest.mark.parametrize(
    ("raised", "exit_code", "said"),
    [
        (
            long_calls.Paused("job eval-demo-1 is paused: x"),
            3,
            "hone: job eval-demo-1 is paused: x",
        ),
        (KeyboardInterrupt(), 130, "interrupted: job eval-demo-1 is being cancelled"),
    ],
)
def test_an_evaluation_without_a_report_says_what_became_of_its_job(
    client: FakeClient, raised: BaseException, exit_code: int, said: str
) -> None:
    client.raises = raised
    done = run("base", "--data", "x/y", "--grader", "math")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (exit_code, said)


def printed(shown: object) -> list[str]:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(shown)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_each_model_has_a_row_with_intervals_and_its_difference_to_the_first() -> None:
    lines = printed(reports.evaluation_report(REPORT))
    assert lines[0] == (
        "hard: 10 problems of 'test.jsonl', 4 completion(s) each, temperature 0.6, seed 3"
    )
    assert lines[2].split() == ["model", "n", "reward", "pass@1"]
    assert lines[3] == "base     10  0.500 ± 0.040  0.500 ± 0.040"
    assert "above base, on the same problems" in lines
    assert lines[8].split() == ["demo:50", "10", "+0.100", "±", "0.040*", "+0.100", "±", "0.040*"]
    assert "demo:50: 5.0% of the completions could not be sampled" in lines


def test_a_metric_without_interval_or_value_is_shown_as_such() -> None:
    alone = Estimate(mean=12.34, num_problems=1)
    assert reports.estimate_text("completions/mean_length", alone) == "12.3"
    assert reports.estimate_text("reward", None) == "none"
    none_of_10 = Estimate(mean=0.0, low=0.0, high=0.27753, num_problems=10)
    assert reports.estimate_text("pass@1", none_of_10) == "0.000 [0.000, 0.278]"
    unsure = Estimate(mean=0.1, low=-0.1, high=0.3, num_problems=5)
    assert reports.estimate_text("reward", unsure, signed=True) == "+0.100 ± 0.200"


def test_a_star_takes_the_exact_test_too_where_few_problems_differ() -> None:
    def shown(**found: float) -> str:
        estimate = Estimate(mean=0.02, num_problems=200, **found)
        return reports.estimate_text("pass@1", estimate, signed=True)

    assert shown(low=0.0004, high=0.0396, p_value=2 / 16) == "+0.020 ± 0.020"
    assert shown(low=0.0004, high=0.0396, p_value=2 / 64) == "+0.020 ± 0.020*"
    assert shown(low=0.0004, high=0.0396) == "+0.020 ± 0.020*"


def test_a_command_has_its_place_among_the_others() -> None:
    assert "eval" in cli.find_commands()
    with pytest.raises(BadRequest):
        command._job(FakeClient(), None, None, "math", [])  # type: ignore[arg-type]


def test_an_evaluation_into_a_log_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in the queue for long, and a log has no live line."""
    now, told = 0.0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(command, "err", Console(file=told, width=80))

    async def follow(
        _client: object, _job: str, progress: Callable[[JobProgress], None]
    ) -> EvaluationReport:
        nonlocal now
        for now in range(2, 42, 2):
            progress(JobProgress(message=f"queued, {now} s", time=0.0))
        return REPORT

    monkeypatch.setattr(long_calls, "follow", follow)
    client = cast(Client, SimpleNamespace(run=lambda call: asyncio.run(call(None))))
    assert command._followed(client, "eval-1") == REPORT
    waits = [line.partition("queued, ")[2] for line in told.getvalue().splitlines()]
    assert waits == ["4 s", "10 s", "22 s"]
