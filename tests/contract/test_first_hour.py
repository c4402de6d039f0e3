"""From an empty folder with two data files and a model folder to a job that trains: by commands as
they are typed, with no file edited."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from rich.console import Console
from typer.testing import CliRunner

from deploy import demo
from hone import Client, NotEnded, load_job, stack, view
from hone.cli import app
from services.orchestrator.api import history
from services.orchestrator.jobs import recovery
from shared.errors import Unavailable
from shared.wire import Checkpoint, JobProgress, MetricsRow
from tests.support.model_folders import make_model_folder
from tests.support.served_stack import ServedStack, quiet_logs, served_stack

pytestmark = pytest.mark.slow

SKILL = Path(__file__).parents[2] / "skills/hone/SKILL.md"
FIRST_JOB = Path(__file__).parents[2] / "docs/first_job.md"
GSM8K = Path(__file__).parents[1] / "data/gsm8k/test.jsonl.gz"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    with served_stack(tmp_path_factory.mktemp("served")) as stack:
        yield stack


@pytest.fixture
def here(tmp_path: Path, served: ServedStack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with GSM8K's two files and a model, where `hone` finds the stack."""
    lines = gzip.decompress(GSM8K.read_bytes()).decode().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:64]))
    (tmp_path / "test.jsonl").write_text("".join(lines[64:72]))
    make_model_folder(tmp_path / "model", window=2048)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HONE_ORCHESTRATOR_URL", served.url)
    return tmp_path


def until(released: threading.Event) -> Callable[[Any], Awaitable[None]]:
    """Returns what keeps a fake service waiting, in the loop of its own thread."""

    async def wait(_: Any) -> None:
        while not released.is_set():
            await asyncio.sleep(0.01)

    return wait


def hone(*arguments: str, code: int = 0) -> str:
    quiet_logs()
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_four_commands_and_no_editing_from_gsm8k_to_a_trained_model(here: Path) -> None:
    hone("init", "--name", "first")
    tried = hone("submit", "--dry-run", "job.toml")
    shown = hone("run", "job.toml", "--set", "steps=2")
    curve = hone("metrics", "first", "--plot")
    assert "is valid: 64 problems, 8 held out" in tried
    assert "reference answers earn 1.00, empty completions earn 0.00" in tried
    assert "step 2/2  reward" in shown and "status" in shown
    record = json.loads(hone("ls", "first", "-o", "json"))
    assert (record["status"], record["step"]) == ("succeeded", 2)
    for command in (
        f"hone download {record['id']}",
        f"hone metrics {record['id']} --plot",
        f"hone eval {here}/model {record['id']} --job",
    ):
        assert command in shown, shown
    dtype = record["summary"]["dtype"]
    assert f"vllm serve {record['summary']['checkpoint']} --dtype {dtype}" in shown
    assert curve.startswith("first\n") and "step 2" in curve and "●" in curve


def test_the_skill_for_coding_agents_works_as_written(here: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", SKILL.read_text(), re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert {command[0] for command in commands} == {"hone"}
    for _, *words in commands:
        # the stack is up, looks at no machine, and its trainer writes no checkpoint
        if words[0] not in ("up", "doctor", "eval", "download"):
            hone(*words)
    record = json.loads(hone("ls", "first", "-o", "json"))
    assert (record["status"], record["step"]) == ("succeeded", 2)


def test_a_follower_hears_what_a_job_is_at_while_nothing_happens(
    here: Path, served: ServedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PROGRESS_S", 0.2)
    monkeypatch.setattr(recovery, "LOOK_AT_SERVICES_S", 0.2)
    heard: list[str] = []
    released = threading.Event()
    served.fakes.fault["model"] = until(released)
    served.fakes.doing = "reading the weights"

    def hear(told: JobProgress) -> None:
        heard.append(told.message)
        if "reading" in told.message:
            released.set()

    hone("init", "--name", "slow")
    with Client(served.url) as client:
        job = json.loads(hone("submit", "job.toml", "--set", "steps=1", "-o", "json"))["id"]
        messages = [event.message for event in client.events(job, follow=True, progress=hear)]
    served.fakes.doing = None
    del served.fakes.fault["model"]
    assert "the sampler is reading the weights" in messages
    loading = next(line for line in heard if "reading" in line)
    assert loading.startswith("loading the model: rollout: loading the model, ")
    assert "the sampler is reading the weights" in loading
    assert loading.endswith("; then its weights go to the sampler")


def test_run_starts_a_stack_only_where_there_is_none_and_none_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(stack, "control", lambda _, folder, **__: started.append(folder) or 0)
    assert stack.ensure(here) is False
    monkeypatch.setenv("HONE_ORCHESTRATOR_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable):
        stack.ensure(here)
    assert started == []
    monkeypatch.delenv("HONE_ORCHESTRATOR_URL")
    monkeypatch.setenv("HONE_ORCHESTRATOR_PORT", "9")
    (here / "stack.json").write_text('{"urls": {"orchestrator": "http://127.0.0.1:9"}}')
    assert stack.ensure(here) is True
    assert started == [here]


def test_the_demo_is_never_silent_and_shows_its_table_before_the_picture(
    here: Path, served: ServedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PROGRESS_S", 0.2)
    monkeypatch.setattr(view, "SILENT_S", 0.1)
    told = io.StringIO()
    console = Console(file=told, width=160)
    released, shown = threading.Event(), ""
    served.fakes.fault["model"] = until(released)
    hone("init", "--name", "demo")

    def drawn(rows: Sequence[MetricsRow], path: Path, title: str) -> Path:
        nonlocal shown
        shown = told.getvalue()
        return path

    monkeypatch.setattr(demo, "plot_learning_curve", drawn)
    loading = "... loading the model: rollout: loading the model, "

    def release_when_told() -> None:
        deadline = time.monotonic() + 60
        while loading not in told.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        released.set()

    threading.Thread(target=release_when_told, daemon=True).start()
    with Client(served.url) as client:
        job = load_job(Path("job.toml"), ["steps=1", "evaluation.every=1"])
        assert demo._train(client, job, console, time.monotonic())
    del served.fakes.fault["model"]
    assert loading in shown
    assert shown.index("succeeded") < shown.index("held-out pr") < shown.index("held-out accuracy")
    assert shown.rstrip().rpartition("\n")[2].startswith("drawing the learning curve")
    assert "learning_curve.png\nchat with it" in told.getvalue()


def test_who_follows_a_job_that_pauses_is_told_how_it_continues(
    here: Path, served: ServedStack
) -> None:
    hone("init", "--name", "held")
    released = threading.Event()
    served.fakes.fault["train_step"] = until(released)
    job = json.loads(hone("submit", "job.toml", "--set", "steps=2", "-o", "json"))["id"]
    with Client(served.url) as client, pytest.raises(NotEnded, match=r"after 0.2 s, and continues"):
        client.wait(job, timeout_s=0.2)
    hone("pause", job)
    for shown in (hone("logs", "-f", job, code=3), hone("logs", "-f", "-n", "1", job, code=3)):
        assert f"hone resume {job}" in shown and "paused because" in shown
    with Client(served.url) as client:
        assert client.wait(job).status == "paused"
        (last,) = client.events(job, last=1)
        assert last.data["status"] == "paused"
    assert "no job is paused" not in hone("resume", "--all")
    released.set()
    del served.fakes.fault["train_step"]
    assert "succeeded" in hone("logs", "-f", job)
    assert len(hone("logs", "-n", "2", job).splitlines()) == 2
    rows = json.loads(hone("metrics", job, "--keys", "reward, loss", "-o", "json"))["rows"]
    assert [sorted(row["metrics"]) for row in rows[1:]] == [["loss", "reward"]] * 2
    assert hone("metrics", job, "--keys", "reward").splitlines()[0].split() == ["step", "reward"]
    wrong = hone("metrics", job, "--keys", "rewrd", code=2)
    assert "no metric 'rewrd'; did you mean 'reward'?" in wrong
    for arguments in (["resume"], ["resume", job, "--all"], ["resume", "--all", "--set", "a=1"]):
        assert "name one job, to which --set may be added" in hone(*arguments, code=2)


def with_files(checkpoint: Checkpoint) -> Checkpoint:
    """Writes what a trainer writes into a checkpoint: files, and a manifest that names them."""
    (Path(checkpoint.path) / "trainer").mkdir()
    (Path(checkpoint.path) / "config.json").write_text("{}")
    manifest = {"format": 1, "files": {"config.json": {"size_bytes": 2, "crc32": 2745614147}}}
    (Path(checkpoint.path) / "trainer/manifest.json").write_text(json.dumps(manifest))
    return checkpoint


@pytest.mark.parametrize("token", [None, "open-sesame"])
def test_the_page_shows_how_to_do_it_all_by_curl(
    here: Path, tmp_path_factory: pytest.TempPathFactory, token: str | None
) -> None:
    (shown,) = re.findall(r"```sh\n(url=.*?)```", FIRST_JOB.read_text(), re.DOTALL)
    secret = {"token": SecretStr(token)} if token else {}
    with served_stack(tmp_path_factory.mktemp("by-curl"), **secret) as stack:
        stack.fakes.change["checkpoint"] = with_files
        own = {"HONE_ORCHESTRATOR_URL": stack.url, "HONE_TOKEN": token or ""}
        done = subprocess.run(
            ["sh", "-euc", shown], env=os.environ | own, capture_output=True, text=True, timeout=120
        )
        with Client(stack.url, token=token) as client:
            (record,) = client.list().jobs
            (checkpoint,) = client.checkpoints(record.id).checkpoints
    assert done.returncode == 0, done.stderr
    assert re.search(r"^event: end$", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.splitlines()[-1] == json.dumps(
        [record.id, "succeeded", 2], separators=(",", ":")
    )
    for name in ("config.json", "trainer/manifest.json"):
        fetched = (here / "checkpoint" / name).read_bytes()
        assert fetched == (Path(checkpoint.path) / name).read_bytes()
