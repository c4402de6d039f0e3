"""Each example of `examples/` as a user runs it, on one real stack with a tiny model and rows of
the real layouts; a kernel that is interrupted; a job whose stack is killed meanwhile.

The jobs that train an adapter come last: they need another engine than the others.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import hone
from deploy.tool_model import make_tokenizer, make_tool_model
from services.orchestrator.store.folder import RunFolder
from shared.wire import JobRecord
from tests.support.hone_stack import HoneStack, own_environment
from tests.support.tiny_models import make_byte_model

pytestmark = [pytest.mark.clients, pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SMALL = ("--model", "model", "--max-tokens", "16")
GSM8K = (*SMALL, "--data", "gsm8k.jsonl", "--batch-size", "2")
TRL_ROWS = [
    {"prompt": [{"role": "user", "content": "What is $1 + 1$?"}], "solution": "$2$"},
    {"prompt": [{"role": "user", "content": "Solve $x^2 = 9$ for $x > 0$."}], "solution": "$3$"},
]
SCORE = 3
"""What the judge gives, of 10."""


class Judge(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that gives every text the same score."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = asked["messages"][-1]["content"].rpartition('{"key": "')[2].partition('"')[0]
        verdict = json.dumps({"key": key, "reason": "no words", "score": SCORE})
        message = {"role": "assistant", "content": verdict}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": asked["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Stack(HoneStack):
    def newest(self) -> JobRecord:
        with hone.Client(self.url) as client:
            return client.get(client.list(1)[0].id)

    def kill(self, service: str) -> None:
        """Kills the process of a service as nothing can be caught, and leaves its starter."""
        children = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children.split()}
        (pid,) = [pid for pid, command in commands.items() if f"services.{service}" in command]
        os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("examples")
    make_byte_model(folder / "model")
    make_tool_model(folder / "game")
    with gzip.open(ROOT / "tests/data/gsm8k/test.jsonl.gz", "rt") as rows:
        (folder / "gsm8k.jsonl").write_text("".join(next(rows) for _ in range(20)))
    opc = ROOT / "tests/data/opc_sft_stage2/rows.jsonl"
    (folder / "opc.jsonl").write_text(opc.read_text())
    (folder / "trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRL_ROWS))
    judge = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    environment = own_environment(
        HONE_TOOL_PARSER="hermes",
        HONE_JUDGE_URL=f"http://127.0.0.1:{judge.server_port}/v1",
        HONE_JUDGE_API_KEY="none",
    )
    try:
        with Stack(folder, environment).running() as stack:
            yield stack
    finally:
        judge.shutdown()


def check(stack: Stack, steps: int, rewards: list[str]) -> JobRecord:
    """Returns the newest job, which has succeeded and graded everything."""
    record = stack.newest()
    assert (record.status, record.step) == ("succeeded", steps)
    assert [reward.label for reward in record.job.rewards] == rewards
    with hone.Client(stack.url) as client:
        last = client.metrics(record.id).rows[-1].metrics
        (*_, checkpoint) = client.checkpoints(record.id)
    assert last["missing_rewards"] == 0
    assert {f"rewards/{name}/mean" for name in rewards} <= last.keys()
    assert (Path(checkpoint.path) / "model.safetensors").is_file()
    return record


EXAMPLES: list[tuple[tuple[str, ...], int, list[str], str]] = [
    (
        ("gsm8k_grpo.py", *GSM8K, "--eval-data", "gsm8k.jsonl", "--max-steps", "2"),
        2,
        ["math"],
        "2 steps; held out: 0.0",
    ),
    (
        ("code_with_tests.py", *SMALL, "--data", "opc.jsonl", "--batch-size=2", "--max-steps=1"),
        1,
        ["code_tests", "defines"],
        "earned {'code_tests': 0.0, 'defines': 0.0}",
    ),
    (
        ("llm_judge.py", *SMALL, "--judge", "any", "--max-steps", "1"),
        1,
        ["llm_judge"],
        f"the judge gave 0.{SCORE}0 of 1",
    ),
    (
        ("own_reward.py", *SMALL, "--max-steps", "1"),
        1,
        ["RunsRight"],
        "verdicts: ['runtime_error']",
    ),
]


@pytest.mark.parametrize(("command", "steps", "rewards", "said"), EXAMPLES)
def test_an_example_trains_and_says_what_it_promises(
    stack: Stack, command: tuple[str, ...], steps: int, rewards: list[str], said: str
) -> None:
    name, *arguments = command
    assert said in stack.run(sys.executable, str(ROOT / "examples" / name), *arguments)
    check(stack, steps, rewards)


def test_the_mode_remote_sends_the_rows(stack: Stack) -> None:
    remote = ("--mode", "remote", "--url", stack.url, "--reward", "own", "--max-steps", "1")
    arguments = (*GSM8K, "--eval-data", "gsm8k.jsonl", *remote)
    stack.run(sys.executable, str(ROOT / "examples/gsm8k_grpo.py"), *arguments)
    record = check(stack, 1, ["own"])
    assert str(record.job.data.train).startswith("file-")
    assert record.job.data.train == record.job.data.eval  # the same rows, stored once


def test_the_quick_start_of_trl_trains_with_two_lines_changed(stack: Stack) -> None:
    recipe = json.dumps({"max_steps": 1, "batch_size": 2, "max_completion_length": 16})
    example = ROOT / "examples/trl_quickstart.py"
    stack.run(sys.executable, str(example), MODEL="model", DATA="trl.jsonl", RECIPE=recipe)
    record = check(stack, 1, ["accuracy_reward"])
    assert "import trl\n" not in (record.job.rewards[0].source or "")


def test_plain_rest_by_curl_leaves_a_checkpoint(stack: Stack) -> None:
    own = {"MODEL": f"{stack.folder}/model", "DATA": f"{stack.folder}/gsm8k.jsonl"}
    small = {"STEPS": "1", "PROMPTS": "2", "TOKENS": "16", "HONE_ORCHESTRATOR_URL": stack.url}
    said = stack.run("sh", str(ROOT / "examples/rest.sh"), **own, **small)
    assert "status: succeeded, step 1" in said and "step 1: reward 0, loss 0" in said
    check(stack, 1, ["math"])
    kept = stack.folder / "checkpoint"
    assert json.loads((kept / "config.json").read_text())["model_type"] == "qwen2"
    assert (kept / "model.safetensors").stat().st_size > 100_000


def test_the_notebook_shows_each_step_and_the_figure(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stack.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("MODEL", "DATA", "STEPS", "BATCH_SIZE", "MAX_TOKENS"):
        monkeypatch.setenv(name, {"MODEL": "model", "DATA": "gsm8k.jsonl"}.get(name, "2"))
    notebook = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    place = {"metadata": {"path": str(stack.folder)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    outputs = {
        cell.source.splitlines()[-1]: [out.get("data", {}) for out in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    *progress, steps = (data.get("text/plain", "") for data in outputs["output.global_step"])
    assert steps == "2"
    assert all(any(f"step {step}/2  reward" in line for line in progress) for step in (1, 2))
    (figure,) = outputs['run.plot("reward", "completions/mean_length")']
    assert figure["image/png"].startswith("iVBORw0KGgo")
    check(stack, 2, ["right"])


PLAYED = """
import hone
rows = [{"prompt": "Find the number.", "secret": secret} for secret in (3, 19)]
trainer = hone.Trainer("game", environment=Game, train_dataset=rows, batch_size=2,
                       num_generations=4, max_completion_length=200, max_steps=2)
print(trainer.train().global_step)
"""


def test_a_script_trains_a_model_that_calls_a_tool_over_several_turns(stack: Stack) -> None:
    game = (ROOT / "deploy/jobs/guess.py").read_text()
    (stack.folder / "played.py").write_text(game + PLAYED)
    assert stack.run(sys.executable, "played.py").split()[-1] == "2"
    record = check(stack, 2, ["environment"])
    batch = RunFolder(Path(record.run_dir)).batch(2)
    tokenizer = make_tokenizer()
    scope: dict[str, Any] = {}
    exec(game, scope)
    turns = 0
    for prompt, group, scores in zip(batch.prompts, batch.groups, batch.scores, strict=True):
        for rollout, score in zip(group.rollouts, scores, strict=True):
            # the game is played again by hand: each call has the answer that the game gives it
            again = scope["Game"]()
            again.reset(**prompt.row)
            asked = [c for m in rollout.messages for c in m.get("tool_calls") or ()]
            told = [m["content"] for m in rollout.messages if m["role"] == "tool"]
            legal = zip(asked, told, strict=False)
            for call, said in legal:
                arguments = json.loads(call["function"]["arguments"])
                if set(arguments) == {"number"} and type(arguments["number"]) is int:
                    assert again.guess(**arguments) == said
            assert score.value == again.get_reward()
            turns += rollout.info["turns"]
            # what was sampled is what the policy said, and nothing else
            ids, mask = (
                list(rollout.token_ids),
                list(rollout.sampled or [1] * len(rollout.token_ids)),
            )
            answers = sum(m["role"] == "assistant" for m in rollout.messages)
            runs = sum(one and not before for before, one in zip([0, *mask], mask, strict=False))
            assert runs == answers == rollout.info["turns"]
            last = max(at for at, m in enumerate(rollout.messages) if m["role"] == "assistant")
            heard = sum(m["role"] == "tool" for m in rollout.messages[:last])
            given = tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if not one])
            assert given.count("tool\n") == heard
    assert turns > 16  # of eight conversations
    with hone.Client(stack.url) as client:
        metrics = client.metrics(record.id).rows[-1].metrics
    assert metrics["conversations/mean_turns"] == pytest.approx(turns / 8)


ENDLESS = """
import hone
rows = [{"prompt": "1 + 1 =", "answer": "2"}] * 4
trainer = hone.Trainer("model", "math", train_dataset=rows, batch_size=2, num_generations=2,
                       max_completion_length=4, max_steps=100_000)
trainer.train()
"""


def wait_for(client: Any, asked: str, wanted: Callable[[Any], bool]) -> Any:
    """Returns the first message about what was `asked` that is `wanted`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") == asked and wanted(message):
            return message
    raise TimeoutError(f"no such message of the kernel within 120 s; the last was {message}")


def test_interrupting_a_kernel_detaches_with_the_sentence_alone(stack: Stack) -> None:
    manager, client = start_new_kernel(cwd=str(stack.folder), env=stack.environment)
    try:
        asked = client.execute(ENDLESS)
        wait_for(client, asked, lambda message: "step 1/" in str(message["content"].get("data")))
        manager.interrupt_kernel()
        error = wait_for(client, asked, lambda message: message["msg_type"] == "error")["content"]
        assert error["ename"] == "Detached" and "continues. hone.attach('" in error["evalue"]
        assert error["traceback"] == [error["evalue"]]
        assert stack.newest().status == "running"
        cancel = "trainer.run.cancel(); trainer.run.wait()"
        assert client.execute_interactive(cancel, timeout=60)["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


DETACHED = """
import hone
rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]
run = hone.Trainer("model", "math", train_dataset=rows, batch_size=2, num_generations=2,
                   max_completion_length=16, max_steps=20).train(detach=True)
print(run.id)
"""
ATTACHED = "import hone, sys; print(hone.attach(sys.argv[1]).follow().global_step)"


def test_a_detached_job_outlives_its_script_and_a_killed_stack(stack: Stack) -> None:
    id = stack.run(sys.executable, "-c", DETACHED).split()[-1]
    deadline = time.monotonic() + 120
    while stack.newest().step < 2:
        assert time.monotonic() < deadline, stack.newest()
        time.sleep(0.1)
    stack.kill("trainer")
    stack.kill("orchestrator")
    said = stack.run(sys.executable, "-c", ATTACHED, id)
    assert said.splitlines()[-1] == "20"
    assert check(stack, 20, ["math"]).id == id


def test_lora_leaves_merged_weights_and_the_adapter(stack: Stack) -> None:
    arguments = (*GSM8K, "--max-steps", "1", "--output-dir", "trained")
    said = stack.run(sys.executable, str(ROOT / "examples/lora.py"), *arguments)
    assert "2 + 3 = " in said
    record = check(stack, 1, ["math"])
    assert record.job.lora and (record.job.lora.rank, record.job.lora.alpha) == (16, 32)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (stack.folder / "trained" / name).is_file()


def test_openais_client_trains_and_calls_the_model(stack: Stack) -> None:
    example = str(ROOT / "examples/openai_fine_tuning.py")
    arguments = ("--model", "model", "--rows", "8", "--max-tokens", "8")
    said = stack.run(sys.executable, example, *arguments, HONE_ORCHESTRATOR_URL=stack.url)
    record = check(stack, 2, ["answer"])
    assert f"model {record.id}" in said and "3 + 3 = " in said
