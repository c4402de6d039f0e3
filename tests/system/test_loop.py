"""The whole loop on the real stack: vLLM, DeepSpeed on two ranks, Redis, the sandbox. It learns,
and only if every part works.

One stack for the module, started as a user would start it. To break one link of the loop, an
orchestrator of the test's own reaches the same services through a proxy that spoils exactly that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from services.orchestrator.app import create_service
from services.orchestrator.store.store import Store
from shared.http import codec
from shared.http.client import Client
from shared.job import Job
from shared.settings import Settings
from shared.wire import (
    TERMINAL,
    EvaluationReport,
    Event,
    EventList,
    FolderWeights,
    JobRecord,
    JobState,
    RegradeReport,
    RolloutList,
    ServingWeights,
    SubmitRequest,
    TrainStepRequest,
    WeightsRef,
)
from tests.support.browser import browser, tab, until
from tests.support.hone_stack import HoneStack, own_environment
from tests.support.proxy import proxy
from tests.support.running import lives, running_redis

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STEPS = 40
FAST = (f"steps={STEPS}", "training.learning_rate=2e-4")
"""Enough to see learning: held-out accuracy is then about 0.9, from about a third."""
TRAINED = ".trained.msgpack"
FEW_STEPS = 25
"""Enough to see whether anything is learned."""


@dataclass
class Stack(HoneStack):
    """`processes`: those that it was seen to have."""

    processes: set[psutil.Process] = field(default_factory=set[psutil.Process])

    def job(self, **changes: Any) -> Job:
        from shared.job.file import load_job

        here = Path.cwd()
        os.chdir(self.folder)
        try:
            job = load_job(self.folder / "job.toml", [*FAST, "evaluation.every=1000"])
        finally:
            os.chdir(here)
        return Job.model_validate(job.model_dump() | changes)


def processes_of(launcher: int) -> set[psutil.Process]:
    """The launcher and every process below it."""
    own = psutil.Process(launcher)
    return {own, *own.children(recursive=True)}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    subprocess.run(
        [sys.executable, "-m", "deploy.tiny_model", "--out", str(folder / "task"), "--seed", "3"],
        check=True,
        cwd=ROOT,
    )
    text = (ROOT / "deploy/jobs/demo_tiny.toml").read_text().replace(".hone/demo-tiny/task", "task")
    (folder / "job.toml").write_text(text)
    stack = Stack(folder, own_environment(HONE_TRAINER_RANKS="2"))
    killed = folder / "killed"
    left = Settings().shm_dir / f"killed-{os.getpid()}"
    left.mkdir(parents=True)
    (left / "of-stack").symlink_to(killed)
    with stack.running():
        assert killed not in owners_of_shared_memory(), (
            "what a killed stack left in memory stays there"
        )
        assert folder / ".hone" in owners_of_shared_memory()
        stack.processes = processes_of(stack.launcher)
        yield stack


@pytest.fixture(scope="module")
def learned(stack: Stack) -> dict[str, Any]:
    """The record of a job submitted from the shell, at its end."""
    changes = (*FAST, "checkpoints.every=20", "evaluation.every=20")
    shown = stack.hone(
        "submit",
        "job.toml",
        *(part for change in changes for part in ("--set", change)),
        "--follow",
    )
    assert f"step {STEPS}/{STEPS}  reward" in shown and "ETA" in shown
    return dict(json.loads(stack.hone("ls", "demo-tiny", "-o", "json")))


def test_the_model_learns_problems_it_never_saw(learned: dict[str, Any]) -> None:
    summary = learned["summary"]
    assert learned["status"] == "succeeded"
    assert summary["eval_before"] <= 0.45
    assert summary["eval_after"] >= 0.75


def test_sampler_and_trainer_compute_the_same_log_probs(
    stack: Stack, learned: dict[str, Any]
) -> None:
    rows = json.loads(stack.hone("metrics", "demo-tiny", "-o", "json"))["rows"]
    differences = [row["metrics"]["mismatch/logprob_diff_max"] for row in rows if row["step"]]
    assert len(differences) == STEPS and max(differences) < 1e-3


def test_the_checkpoint_reproduces_the_held_out_accuracy_in_plain_transformers(
    stack: Stack, learned: dict[str, Any]
) -> None:
    checkpoint = learned["summary"]["checkpoint"]
    assert accuracy(Path(checkpoint), stack.folder / "task" / "test.jsonl") == pytest.approx(
        learned["summary"]["eval_after"], abs=0.03
    )


def accuracy(checkpoint: Path, problems: Path) -> float:
    """Held-out accuracy by Hugging Face's own greedy decoding and Python's own arithmetic."""
    import re

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    right = 0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
            )
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        numbers = sorted(int(number) for number in re.findall(r"\d+", text))
        if re.fullmatch(r"\d+[-+*]\d+", text) and numbers == sorted(row["numbers"]):
            right += eval(text) == row["target"]  # digits and one operator, checked above
    return right / len(rows)


def test_the_run_folder_has_everything(stack: Stack, learned: dict[str, Any]) -> None:
    run = stack.folder / "runs" / "demo-tiny"
    assert run.resolve() == Path(learned["run_dir"])
    assert (run / "job.json").is_file() and len(
        (run / "metrics.jsonl").read_text().splitlines()
    ) == STEPS + 1
    names = {path.name for path in (run / "rollouts").iterdir()}
    steps = range(1, STEPS + 1)
    assert {f"{step:06d}.msgpack" for step in steps} <= names
    assert names <= {f"{step:06d}{end}" for step in steps for end in (".msgpack", TRAINED)}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000020",
        "step-000040",
    ]
    summary = json.loads((run / "summary.json").read_text())
    assert {"eval_before", "eval_after", "steps", "train_s", "wall_s", "versions"} <= set(summary)


def test_every_command_shows_a_finished_job(stack: Stack, learned: dict[str, Any]) -> None:
    job_id = learned["id"]
    assert job_id in stack.hone("ls")
    assert "succeeded" in stack.hone("logs", job_id)
    assert "held-out reward" in stack.hone("logs", job_id, "-f")
    assert "grad norm" in stack.hone("metrics", job_id, "--min-step", "38")
    listed = RolloutList.model_validate_json(
        stack.hone("rollouts", job_id, "--step", "7", "-n", "500", "-o", "json")
    )
    assert listed.step == 7 and len(listed.rollouts) == 48 * 8
    verdicts = {
        rollout.parts["python_value"].verdict for rollout in listed.rollouts if rollout.reward
    }
    assert verdicts == {"ok"}
    regrade = ("grade", "--job", job_id, "--step")
    regraded = stack.hone(*regrade, "7:8", "--reward", "job.toml")
    assert "0 of 768 rewards would change, and 0 advantages their sign." in regraded
    (stack.folder / "new.toml").write_text(
        '[[rewards]]\ngrader = "length"\nparams = { target = 1 }\n'
    )
    report = RegradeReport.model_validate_json(
        stack.hone(*regrade, "7", "--reward", "new.toml", "-n", "3", "-o", "json")
    )
    assert len(report.steps) == 1 and len(report.examples) == 3 and report.steps[0].flipped
    doctor = json.loads(stack.hone("doctor", "-o", "json"))
    assert doctor["ok"] and {"rollout", "trainer", "reward", "orchestrator"} <= {
        check["name"] for check in doctor["checks"]
    }
    refused = stack.attempt(sys.executable, "-m", "hone.cli", "cancel", job_id)
    assert refused.returncode == 2 and "has succeeded" in refused.stderr


def test_a_browser_follows_a_job_through_the_death_of_the_orchestrator(
    stack: Stack, learned: dict[str, Any]
) -> None:
    """A job is started from the form, and the orchestrator killed; the page continues
    automatically. Then the weights are asked, and the tokens shown beside what the trainer said of
    them."""
    text = (stack.folder / "job.toml").read_text()
    text = text.replace("steps = 40", "steps = 12")
    url = stack.urls["orchestrator"]
    here = str(stack.folder / "task")
    with browser() as chrome, tab(chrome) as page:
        page.goto(f"{url}/#/jobs/{learned['id']}")
        chart = page.get_by_role("img", name=re.compile("^reward: "))
        told = chart.get_attribute("aria-label")
        assert "training reward" in told and f"at step {STEPS}" in told
        page.locator(".well").wait_for()
        page.screenshot(path=stack.folder / "page.png")
        page.goto(f"{url}/#/new")
        page.get_by_label("the job, as TOML").fill(text.replace('"task/', f'"{here}/'))
        page.get_by_role("button", name="start it").click()
        page.wait_for_url(re.compile("#/jobs/.+"))
        job = page.url.rpartition("/")[2]
        until(page, "/[2-9]\\/12/.test(document.querySelector('.job-head')?.textContent)", 120)
        os.kill(pid_of(stack, "services.orchestrator"), signal.SIGKILL)
        page.get_by_text("the connection is lost").wait_for()
        page.locator(".job-head").get_by_text("succeeded").wait_for(timeout=240_000)
        assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
        page.goto(f"{url}/#/jobs/{job}/talk")
        page.get_by_label("what you say").fill("3 5 15")
        page.get_by_role("button", name="ask").click()
        page.locator(".turns .assistant").wait_for()
        page.goto(f"{url}/#/services")
        page.get_by_role("cell", name=re.compile("^sampler")).wait_for()
        assert page.locator(".bad").count() == 0
        page.goto(f"{url}/#/jobs/{job}/rollouts?step=12")
        page.get_by_role("button", name="trainer", exact=True).click()
        titles = [one.get_attribute("title") for one in page.locator(".token").all()[:200]]
        apart = [float(one.split(", ")[-1].split()[0]) for one in titles if "apart" in one]
        assert apart and max(map(abs, apart)) < 1e-3
        page.get_by_role("button", name="entropy", exact=True).click()
        page.locator(".token[title*=entropy]").first.wait_for()
    rows = [json.loads(line) for line in _lines(stack.folder / "runs" / job / "metrics.jsonl")]
    assert [row["step"] for row in rows] == list(range(13))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def pid_of(stack: Stack, module: str) -> int:
    """Returns the process of the stack that runs the module itself."""
    for process in sorted(processes_of(stack.launcher), key=lambda one: one.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in process.cmdline():
                return process.pid
    raise AssertionError(f"no process of the stack runs {module!r}")


def test_the_openai_client_samples_the_trained_policy(
    stack: Stack, learned: dict[str, Any]
) -> None:
    import openai

    rows = [
        json.loads(line)
        for line in (stack.folder / "task" / "test.jsonl").read_text().splitlines()[:32]
    ]
    client = openai.OpenAI(base_url=f"{stack.urls['rollout']}/v1", api_key="none")
    model = client.models.list().data[0].id
    texts = [
        client.completions.create(model=model, prompt=row["prompt"], max_tokens=6, temperature=0)
        .choices[0]
        .text
        for row in rows
    ]
    right = sum(
        "".join(text.split()) == text and _value(text) == row["target"]
        for text, row in zip(texts, rows, strict=True)
    )
    assert right / len(rows) >= 0.6


@pytest.mark.soak
def test_models_are_compared_by_a_job_of_0_steps(stack: Stack, learned: dict[str, Any]) -> None:
    """The model that training began with and the last checkpoint, loaded as they are, get what the
    job's own evaluations said; the sampler serves a job's weights again afterwards."""
    models = ("task/model", f"demo-tiny:{STEPS}")
    report = EvaluationReport.model_validate_json(
        stack.hone("eval", *models, "--job", "job.toml", "-o", "json")
    )
    (held_out,) = report.sets
    before, after = held_out.models
    summary = learned["summary"]
    assert before.metrics["reward"].mean == pytest.approx(summary["eval_before"], abs=0.03)
    assert after.metrics["pass@1"].mean == pytest.approx(summary["eval_after"], abs=0.03)
    better = after.differences["reward"]
    assert better.mean > 0 and (better.low is None or better.low > 0)
    assert after.metrics["completions/mean_length"].mean > 1


def _value(text: str) -> int | None:
    import re

    return int(eval(text)) if re.fullmatch(r"\d+[-+*]\d+", text) else None


@contextlib.asynccontextmanager
async def own_orchestrator(stack: Stack, folder: Path, **urls: str) -> AsyncGenerator[Client]:
    """An orchestrator of the test's own over the stack's services, some of them behind a proxy."""
    services = {f"{name}_url": stack.urls[name] for name in ("rollout", "trainer", "reward")} | urls
    settings = Settings(runs_dir=folder / "runs", **services)  # type: ignore[arg-type]
    with running_redis(folder / "redis") as redis_url:
        store = Store(redis_url)
        await store.open()
        service = create_service(settings, store)
        async with service.app.router.lifespan_context(service.app):
            transport = httpx.ASGITransport(app=service.app)
            yield Client("orchestrator", "http://localhost", transport=transport)


async def finish(client: Client, job: Job) -> tuple[JobRecord, EventList]:
    return await follow(client, job, lambda _: False)


async def follow(
    client: Client, job: Job, enough: Callable[[Event], bool]
) -> tuple[JobRecord, EventList]:
    """Returns the job and its events once it has ended or paused, or an event is `enough`."""
    record = await client.call("POST", "/v1/jobs", SubmitRequest(job=job), JobRecord, deadline_s=60)
    while True:
        record = await client.get(f"/v1/jobs/{record.id}", JobRecord)
        events = await client.get(f"/v1/jobs/{record.id}/events", EventList)
        if record.status in (*TERMINAL, "paused") or any(map(enough, events.events)):
            return record, events
        await asyncio.sleep(0.2)


async def test_weights_that_arrive_on_paper_only_are_caught_by_the_canary(
    stack: Stack, learned: dict[str, Any], tmp_path: Path
) -> None:
    """A replica that loads the first weights again and again and claims the version it was asked
    for."""
    first: dict[str, FolderWeights] = {}
    asked: dict[str, FolderWeights] = {}

    async def load_old(body: bytes) -> bytes:
        ref = codec.decode(WeightsRef, body, codec.MSGPACK).root
        assert isinstance(ref, FolderWeights)
        asked["ref"] = ref
        if ref.job_id not in first:
            kept = stack.folder / "runs" / "first"
            shutil.copytree(ref.path, kept)
            first[ref.job_id] = ref.model_copy(update={"path": str(kept)})
        old = first[ref.job_id].model_copy(update={"version": ref.version})
        return codec.encode(WeightsRef(old), codec.MSGPACK)

    async def claim(body: bytes) -> bytes:
        answer = codec.decode(ServingWeights, body, codec.MSGPACK)
        return codec.encode(
            answer.model_copy(update={"digest": asked["ref"].digest}), codec.MSGPACK
        )

    async with (
        proxy(
            stack.urls["rollout"], "/reload_weights", request=load_old, response=claim
        ) as rollout_url,
        own_orchestrator(stack, tmp_path, rollout_url=rollout_url) as client,
    ):
        caught = "the sampler does not compute with version"
        record, events = await follow(
            client, stack.job(name="stale"), lambda event: caught in event.message
        )
    warnings = [
        event.message
        for event in events.events
        if event.level == "warning" and "finding" not in event.data
    ]
    assert any(caught in message for message in warnings)
    assert record.step < STEPS


@pytest.mark.soak
async def test_with_shuffled_advantages_nothing_is_learned(
    stack: Stack, learned: dict[str, Any], tmp_path: Path
) -> None:
    """Each advantage goes to a rollout it does not belong to."""
    shuffler = random.Random(0)

    async def shuffle(body: bytes) -> bytes:
        step = codec.decode(TrainStepRequest, body, codec.MSGPACK)
        advantages = [example.advantage for example in step.examples]
        shuffler.shuffle(advantages)
        mixed = tuple(
            example.model_copy(update={"advantage": advantage})
            for example, advantage in zip(step.examples, advantages, strict=True)
        )
        return codec.encode(step.model_copy(update={"examples": mixed}), codec.MSGPACK)

    async with (
        proxy(stack.urls["trainer"], "/train_step", request=shuffle) as trainer_url,
        own_orchestrator(stack, tmp_path, trainer_url=trainer_url) as client,
    ):
        record, _ = await finish(client, stack.job(name="shuffled", steps=FEW_STEPS))
    assert record.status == "succeeded" and record.summary is not None
    assert (
        record.summary["eval_after"]
        <= record.summary["eval_before"] + 0.15
        <= learned["summary"]["eval_after"] - 0.1
    )


@pytest.mark.soak
async def test_the_overlapped_loop_learns_too(
    stack: Stack, learned: dict[str, Any], tmp_path: Path
) -> None:
    async with own_orchestrator(stack, tmp_path) as client:
        record, _ = await finish(
            client, stack.job(name="overlapped", steps=FEW_STEPS, max_staleness=1)
        )
    assert record.status == "succeeded" and record.summary is not None
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs" / "overlapped" / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(row.get("staleness", 0) for row in rows) == 1
    assert record.summary["eval_after"] >= record.summary["eval_before"] + 0.25


async def test_a_users_reward_function_runs_with_wandb_and_its_mistakes_pause_the_job(
    stack: Stack, tmp_path: Path
) -> None:
    good = (
        "def reward(completions, target, **kwargs):\n"
        "    return [float(str(t)[0] in c) for c, t in zip(completions, target)]\n"
    )
    wrong = "def reward(completions, **kwargs):\n    return [1.0, 2.0, 3.0]\n"
    raising = "def reward(completions, **kwargs):\n    raise KeyError('answer')\n"
    async with own_orchestrator(stack, tmp_path) as client:
        for source, status, sentence in (
            (good, "succeeded", ""),
            (wrong, "paused", "'reward' returned 3 values for"),
            (raising, "paused", "KeyError"),
        ):
            job = stack.job(
                name="own",
                steps=2,
                rewards=[{"source": source}],
                evaluation={"num_prompts": 8},
                wandb={"project": "hone", "mode": "offline"},
            )
            record, _ = await finish(client, job)
            assert record.status == status, record.error
            assert sentence in (record.error or "")
            if status == "succeeded":
                (kept,) = Path(record.run_dir).glob("wandb/offline-run-*/run-*.wandb")
                assert kept.stat().st_size > 0
            else:
                await client.call(
                    "POST", f"/v1/jobs/{record.id}/cancel", None, JobState, deadline_s=10
                )


@pytest.mark.soak
def test_a_job_survives_a_pause_a_detached_follower_and_a_killed_trainer_rank(
    stack: Stack, learned: dict[str, Any]
) -> None:
    """The last test on this stack but one. The trainer comes back by itself from its newest
    checkpoint, the one of the pause, and the steps since are replayed. (A rank that dies right
    after a checkpoint costs no recovery: there is nothing to replay.)"""
    steps = 100  # far more than are done before the pause
    changes = (
        f"steps={steps}",
        f"checkpoints.every={steps}",
        "evaluation.num_prompts=8",
        "sampling.prompts_per_step=8",
    )
    settings = [part for change in changes for part in ("--set", change)]
    record = json.loads(stack.hone("submit", "job.toml", *settings, "-o", "json"))
    follow = start_following(stack, record["id"])
    assert follow.stdout
    next(line for line in follow.stdout if "step 3/" in line)
    detached = start_following(stack, record["id"])
    assert detached.stdout
    next(line for line in detached.stdout if "step 2/" in line)
    detached.send_signal(signal.SIGINT)
    hint = detached.communicate(timeout=30)[1]
    assert detached.returncode == 130 and f"hone cancel {record['id']}" in hint
    assert "hone resume" in stack.hone("pause", record["id"])
    assert f"hone resume {record['id']}" in follow.communicate(timeout=60)[0]
    assert follow.returncode == 3
    assert json.loads(stack.hone("ls", record["id"], "-o", "json"))["status"] == "paused"
    stack.hone("resume", record["id"])
    follow = start_following(stack, record["id"])
    assert follow.stdout
    next(line for line in follow.stdout if f"/{steps}  reward" in line)
    kill_a_trainer_rank(stack)
    rest = follow.communicate(timeout=400)[0]
    stack.processes |= processes_of(stack.launcher)
    ended = json.loads(stack.hone("ls", record["id"], "-o", "json"))
    assert (ended["status"], ended["step"]) == ("succeeded", steps), rest
    assert ended["recoveries"] >= 1, rest
    assert "loading the job again (recovery 1 of 3)" in rest
    run = Path(ended["run_dir"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps + 1))
    differences = [row["mismatch/logprob_diff_max"] for row in rows[1:] if row["num_examples"]]
    assert max(differences) < 1e-3, "the sampler went back and forth with the trainer"


def start_following(stack: Stack, job_id: str) -> subprocess.Popen[str]:
    """As from a terminal: a shell's background jobs, of which the tests may be one, ignore
    Ctrl-C."""
    command = [sys.executable, "-m", "hone.cli", "logs", "-f", job_id]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, cwd=stack.folder, env=stack.environment, text=True, **pipes
        )
    finally:
        signal.signal(signal.SIGINT, ignored)


def kill_a_trainer_rank(stack: Stack) -> None:
    """Kill -9 of the last process, which serves no HTTP."""
    ranks: list[psutil.Process] = []
    for process in processes_of(stack.launcher):
        with contextlib.suppress(psutil.NoSuchProcess):
            named = "services.trainer.processes.ranks" in process.cmdline()
            if named and "LOCAL_RANK" in process.environ():
                ranks.append(process)
    max(ranks, key=lambda rank: rank.pid).kill()


@pytest.mark.soak
def test_adapters_alone_are_moved_and_a_finished_jobs_model_is_called_by_its_id(
    stack: Stack,
) -> None:
    """Two jobs at once on the trainer, each with steps that are sampled while the one before
    trains."""
    import openai

    ids, turns = [], 0
    for name in ("first", "second"):
        changes = (f"name={name}", "steps=4", "max_staleness=1", "lora.rank=4", "lora.alpha=64")
        sets = [part for change in changes for part in ("--set", change)]
        stack.hone("submit", "job.toml", *sets)
    for name in ("first", "second"):
        stack.hone("logs", "-f", name)
        record = json.loads(stack.hone("ls", name, "-o", "json"))
        assert record["status"] == "succeeded", record["error"]
        ids.append(record["id"])
        lines = (Path(record["run_dir"]) / "weights.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["method"] for row in rows] == ["lora"] * 5
        gaps = [row["samplers"][0]["canary_difference"] for row in rows]
        assert max(gaps) < 1e-4
        metrics = json.loads(stack.hone("metrics", name, "-o", "json"))["rows"]
        differences = [
            row["metrics"]["mismatch/logprob_diff_max"] for row in metrics if row["step"]
        ]
        assert len(differences) == 4
        turns += sum("time/turn" in row["metrics"] for row in metrics)
    assert turns > 1, "they took turns"
    client = openai.OpenAI(base_url=f"{stack.urls['rollout']}/v1", api_key="none")
    assert {model.id for model in client.models.list().data} >= set(ids)
    answers = [
        client.completions.create(model=model, prompt="1 2 -> 3", max_tokens=2) for model in ids
    ]
    assert [answer.model.partition("/")[0] for answer in answers] == ids
    stack.hone("doctor", "--weights")


MANY = gzip.decompress((ROOT / "tests/data/gsm8k/test.jsonl.gz").read_bytes()).splitlines()[:40]
GSM8K = MANY[:6]
OPC = (ROOT / "tests/data/opc_sft_stage2/rows.jsonl").read_bytes().splitlines()


def test_gsm8k_as_published_trains_by_two_commands(stack: Stack) -> None:
    folder = stack.folder / "published"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(b"\n".join(MANY))
    (folder / "test.jsonl").write_bytes(b"\n".join(GSM8K))
    model = ("--model", "task/model", "--name", "first")
    written = stack.hone("init", "first.toml", "--data", "published/train.jsonl", *model)
    assert "'question' is the prompt, 'answer' is the right answer" in written
    short = ("steps=2", "sampling.prompts_per_step=2", "sampling.group_size=2")
    changes = [word for change in short for word in ("--set", change)]
    shown = stack.hone("run", "first.toml", *changes)
    assert "math: reference answers earn 1.00, empty completions earn 0.00" in shown
    assert "step 2/2  reward" in shown and "vllm serve " in shown
    assert "step 2" in stack.hone("metrics", "first", "--plot")


RIGHT_ANSWER = (
    "{{ numbers[0] }}{% if numbers[0] + numbers[1] == target %}+"
    "{% elif numbers[0] - numbers[1] == target %}-{% else %}*{% endif %}{{ numbers[1] }}"
)


def test_answers_of_the_data_are_learned_and_then_rewards(stack: Stack) -> None:
    """24 supervised steps of 64 rows, of which the model had a third right, then two steps of
    rewards."""
    changes = (
        *("name=warm", "steps=26", "warmup.steps=24", "warmup.learning_rate=1e-3"),
        *("sampling.prompts_per_step=64", "sampling.group_size=2", "evaluation.every=24"),
        f"data.answer={RIGHT_ANSWER}",
    )
    options = [word for change in changes for word in ("--set", change)]
    shown = stack.hone("run", "job.toml", *options)
    assert "step 24/26  loss 0." in shown and "step 25/26  reward 0." in shown
    steps = json.loads(stack.hone("metrics", "warm", "-o", "json"))["rows"]
    rows = {row["step"]: row["metrics"] for row in steps}
    assert rows[24]["eval/reward"] > 0.8 > 0.5 > rows[0]["eval/reward"]
    assert rows[24]["loss"] < rows[1]["loss"] / 4
    assert [step for step, row in rows.items() if "supervised" in row] == [*range(1, 25)]
    assert rows[25]["mismatch/logprob_diff_mean"] < 1e-3, "the samplers have the last weights"
    folder = stack.folder / "runs/warm"
    syncs = [json.loads(line) for line in (folder / "weights.jsonl").read_text().splitlines()]
    assert [sync["version"] for sync in syncs] == [0, 24, 25, 26]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "rows", "right"), [("gsm8k", GSM8K, "answer"), ("opc_sft_stage2", OPC, "output")]
)
def test_a_public_data_set_trains_in_its_own_layout_by_its_job_file(
    stack: Stack, name: str, rows: list[bytes], right: str
) -> None:
    """`right` is the column with a completion that is right."""
    file = stack.folder / f"{name}.jsonl"
    file.write_bytes(b"\n".join(rows))
    job = str(ROOT / f"deploy/jobs/{name}.toml")
    changes = (
        *("model=task/model", f"data.train={file.name}", f"data.eval={file.name}", "steps=2"),
        *("sampling.prompts_per_step=2", "sampling.group_size=2", "sampling.max_tokens=8"),
        *(
            "sampling.overlong_prompts=truncate",
            "evaluation.num_prompts=2",
            "training.dtype=float32",
        ),
    )
    options = [word for change in changes for word in ("--set", change)]
    tried = json.loads(stack.hone("submit", job, "--dry-run", "-o", "json", *options))
    first = tried["prompts"][0]
    row = json.loads(rows[first["index"]])
    question = row["question" if name == "gsm8k" else "instruction"]
    assert [said["role"] for said in first["content"]] == ["system", "user"]
    assert first["content"][1]["content"] == question and question in first["text"]
    assert (tried["num_train"], tried["num_held_out"]) == (6, 2) and first["num_tokens"] > 10
    stack.hone("submit", job, "--follow", *options)
    record = json.loads(stack.hone("ls", tried["job"]["name"], "-o", "json"))
    assert (record["status"], record["step"]) == ("succeeded", 2)
    assert record["data"]["train"].startswith("xxh3-")
    steps = json.loads(stack.hone("metrics", record["name"], "-o", "json"))["rows"]
    rows = [step["metrics"] for step in steps]
    assert {row["missing_rewards"] for row in rows if "missing_rewards" in row} == {0}
    assert {row["eval/missing_rewards"] for row in rows if "eval/missing_rewards" in row} == {0}
    graded_row = row | {"tests": row.get("testcase")}
    for completion, reward in ((row[right], 1.0), ("9", 0.0)):
        grade = (
            "grade",
            "--reward",
            job,
            "--completion",
            completion,
            "--row",
            json.dumps(graded_row),
        )
        assert json.loads(stack.hone(*grade, "-o", "json"))["value"] == reward


@pytest.mark.soak
def test_an_openai_client_trains_a_model_and_calls_it_by_its_name(stack: Stack) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{stack.urls['orchestrator']}/v1", api_key="none")
    train, test = (
        client.files.create(file=(stack.folder / "task" / name).open("rb"), purpose="fine-tune")
        for name in ("train.jsonl", "test.jsonl")
    )
    demo = stack.job()
    grader: Any = {"type": demo.rewards[0].grader, **demo.rewards[0].params}
    assert client.fine_tuning.alpha.graders.validate(grader=grader).grader is not None
    knobs: Any = {"batch_size": 16, "eval_samples": 1}
    job = client.fine_tuning.jobs.create(
        model=demo.model,
        training_file=train.id,
        validation_file=test.id,
        suffix="countdown",
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": knobs},
        },
        extra_body={
            "hone": {
                "steps": 3,
                "data": {"columns": {"prompt": "prompt"}},
                "sampling": {"max_tokens": demo.sampling.max_tokens},
                "training": {"dtype": "float32"},
                "evaluation": {"num_prompts": 16},
                "lora": {"rank": 4, "alpha": 64},
            }
        },
    )
    deadline = time.monotonic() + 300
    while (now := client.fine_tuning.jobs.retrieve(job.id)).finished_at is None:
        assert now.status in ("queued", "running"), now.error
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert (now.status, now.fine_tuned_model) == ("succeeded", job.id), now.error
    events = list(client.fine_tuning.jobs.list_events(job.id))
    assert {event.type for event in events} == {"message", "metrics"}
    (newest, *_) = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert newest.step_number == 3
    assert job.id in {model.id for model in client.models.list()}
    answer = client.completions.create(model=job.id, prompt="1 2 -> 3", max_tokens=2)
    assert answer.model.partition("/")[0] == job.id


def test_nothing_is_left_when_the_stack_is_down(stack: Stack) -> None:
    """The last test on this stack: it stops it."""
    assert stack.hone("down").strip() == "stopped"
    _, left = psutil.wait_procs(stack.processes, timeout=1)
    assert not [process for process in left if lives(process.pid)]
    assert "no stack runs" in stack.hone("down")
    assert stack.folder / ".hone" not in owners_of_shared_memory()


def owners_of_shared_memory() -> list[Path]:
    """The folders of all stacks that have weights in shared memory."""
    links = [folder / "of-stack" for folder in Settings().shm_dir.iterdir()]
    return [link.readlink() for link in links if link.is_symlink()]
