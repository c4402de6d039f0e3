"""`hone.Trainer` against a real orchestrator: a script, an event loop, another process, Ctrl-C, and
wrong uses, each with its sentence."""

from __future__ import annotations

import _thread
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse

import hone
from tests.support.model_folders import make_model_folder
from tests.support.served_stack import ServedStack, served_stack

BONUS = 0.25
ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(12)]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [BONUS + float(completion == wanted) for completion, wanted in pairs]


class Brief(hone.RewardEnvironment):
    def __init__(self, longest: int) -> None:
        super().__init__(sandbox=hone.SandboxConfig(timeout_s=2.0))
        self.longest = longest

    def score(self, prompt: str, completion: str, **columns: Any) -> float:
        return float(len(completion) <= self.longest)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    with served_stack(tmp_path_factory.mktemp("served")) as stack:
        yield stack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model_folder(tmp_path_factory.mktemp("model") / "model", window=2048))


def made(folder: str, served: ServedStack, **given: Any) -> hone.Trainer:
    values: dict[str, Any] = {
        "model": folder,
        "reward_funcs": [right, Brief(3), "math"],
        "reward_weights": [1.0, 0.5, 0.1],
        "train_dataset": ROWS,
        "mode": hone.Remote(served.url),
        "batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 8,
        "max_steps": 2,
    }
    return hone.Trainer(**(values | given))


def test_training_returns_what_trls_does_and_the_run_has_the_rest(
    model: str, served: ServedStack, tmp_path: Path
) -> None:
    import pandas

    trainer = made(model, served, eval_dataset=pandas.DataFrame(ROWS[:4]))
    output = trainer.train()
    assert output.global_step == 2
    assert trainer.run and trainer.run.status == "succeeded"
    record = trainer.run.record
    assert [reward.label for reward in record.job.rewards] == ["right", "Brief", "math"]
    assert [reward.weight for reward in record.job.rewards] == [1.0, 0.5, 0.1]
    assert "BONUS = 0.25" in (record.job.rewards[0].source or "")
    frame = trainer.run.metrics()
    assert list(frame.index) == [0, 1, 2]
    assert output.metrics["reward"] == frame["reward"][2]
    assert len(trainer.run.rollouts(2)) == 4
    assert trainer.run.plot("reward").axes[0].lines[0].get_ydata()[-1] == frame["reward"][2]
    text = trainer.to_toml(tmp_path / "job.toml")
    again = hone.from_toml(tmp_path / "job.toml").job
    assert text == (tmp_path / "job.toml").read_text()
    assert again.rewards == trainer.job.rewards and again.sampling == trainer.job.sampling
    rows = [json.loads(line) for line in Path(str(again.data.train)).read_text().splitlines()]
    assert rows == ROWS


def test_many_rows_are_uploaded_and_the_same_rows_once(model: str, served: ServedStack) -> None:
    import datasets

    rows = datasets.Dataset.from_list([*ROWS] * 100)
    runs = [made(model, served, train_dataset=rows).train(detach=True) for _ in range(2)]
    sources = {str(run.record.job.data.train) for run in runs}
    assert len(sources) == 1 and sources.pop().startswith("file-")
    assert {run.wait().status for run in runs} == {"succeeded"}


def test_a_detached_job_is_found_again_from_another_process(
    model: str, served: ServedStack
) -> None:
    async def detached() -> hone.Run:
        return made(model, served).train(detach=True)

    run = asyncio.run(detached())  # within a running event loop, as in a notebook
    code = f"import hone; run = {run!r}; print(run.follow().global_step)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "2", done.stderr
    with pytest.raises(hone.NotFound, match="no job 'no-such-job'"):
        hone.attach("no-such-job", served.url)


def test_ctrl_c_detaches_and_says_how_to_come_back(model: str, served: ServedStack) -> None:
    released = threading.Event()

    async def wait(_: Any) -> None:
        while not released.is_set():
            await asyncio.sleep(0.01)

    served.fakes.fault["model"] = wait
    trainer = made(model, served)
    timer = threading.Timer(2.0, _thread.interrupt_main)
    timer.start()
    with pytest.raises(hone.Detached, match=r"continues. hone.attach\('.*-grpo-.*'"):
        trainer.train()
    del served.fakes.fault["model"]
    released.set()
    assert trainer.run and trainer.run.wait().status == "succeeded"


def test_a_job_that_does_not_succeed_raises_with_the_reason(
    model: str, served: ServedStack
) -> None:
    run = made(model, served, max_steps=10_000).train(detach=True)
    run.pause()
    assert run.wait().status == "paused"
    with pytest.raises(hone.NotEnded, match=r"is paused.*\.resume\(\) continues"):
        run.follow()
    run.resume()
    run.cancel()
    with pytest.raises(hone.Failed, match="is cancelled"):
        run.follow()


def test_a_run_is_asked_while_the_samplers_have_its_weights(
    model: str, served: ServedStack
) -> None:
    app = served.fakes.service("rollout").app

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "policy"}]})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> JSONResponse:
        asked = await request.json()
        said = f"{asked['model']}: {asked['messages'][0]['content']}"
        return JSONResponse({"choices": [{"index": 0, "message": {"content": said}}]})

    run = made(model, served).train(detach=True)
    run.wait()
    assert run.chat("2 + 3 =", max_tokens=4) == "policy: 2 + 3 ="
    made(model, served).train()
    with pytest.raises(hone.NotFound, match="is not served now"):
        run.chat("2 + 3 =")
    with pytest.raises(hone.BadRequest, match="expected text, or a list of messages"):
        run.chat("")


class NoMethods:
    pass


class Client:
    """Has no text as plain data."""


judge = Client()


def judged(completions: list[str], **columns: Any) -> list[Any]:
    return [judge for _ in completions]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is None; expected a folder in Hugging Face format"),
    ({"model": Client()}, "expected a folder in Hugging Face format or a name of the Hub"),
    ({"reward_funcs": None}, "reward_funcs is empty"),
    ({"reward_funcs": []}, "reward_funcs is empty"),
    ({"reward_funcs": 3, "reward_weights": None}, r"reward_funcs\[0\] is 3; expected a function"),
    ({"reward_funcs": NoMethods}, "the class 'NoMethods' without score and score_batch"),
    ({"reward_funcs": judged}, "'judged', .* uses 'judge', an object of type"),
    ({"reward_funcs": Brief(2).score}, "is a method of"),
    ({"reward_weights": [1.0]}, "reward_weights has 1 weights and reward_funcs 3 rewards"),
    ({"train_dataset": None}, "'data.train' is missing"),
    ({"train_dataset": []}, "train_dataset has no rows"),
    ({"train_dataset": ["text"]}, "row 0 is 'text'; expected a dict of columns"),
    ({"train_dataset": {"train": ROWS}}, "is a dict of 'train'; expected one table of rows"),
    ({"train_dataset": "rows.jsonl"}, "is 'rows.jsonl', and there is no such file"),
    ({"train_dataset": [{"prompt": object()}]}, "column 'prompt' is <object .* cannot be written"),
    ({"train_dataset": [{"prompt": "a", "image": b""}]}, "row 0, column 'image' is b'', which"),
    ({"train_dataset": "tests"}, "is 'tests', a folder; expected a file"),
    ({"reward_weights": [None] * 3}, "expected a list with a number for each reward"),
    ({"data": "main"}, "data is 'main'; expected a dict"),
    ({"output_dir": 3}, "output_dir is 3; expected a folder"),
    ({"mode": ""}, "mode is ''; expected hone.Local"),
    ({"mode": "local"}, r"mode is 'local'; expected hone.Local\(\)"),
    ({"mode": hone.Remote}, r"expected Remote\(...\), with its arguments"),
    ({"max_step": 3}, "'max_step' is unknown; did you mean 'max_steps'"),
    ({"num_generations": 1}, "sampling.group_size"),
    ({"learning_rate": "fast"}, "training.learning_rate"),
    ({"args": {"beta": 0.1}}, "args is .*; expected a trl.GRPOConfig"),
    ({"processing_class": Client()}, "expected the tokenizer of"),
    ({"weight_sync_method": "magic"}, "weight_sync"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG)
def test_a_wrong_use_is_a_sentence_before_anything_is_submitted(
    model: str, served: ServedStack, given: dict[str, Any], sentence: str
) -> None:
    kept = {"reward_weights": None} if "reward_funcs" in given else {}
    with pytest.raises(hone.BadRequest, match=sentence):
        made(model, served, **(kept | given))


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        (hone.Remote("http://127.0.0.1:9"), "cannot reach the orchestrator"),
        (hone.Simple(3), "folder is 3; expected a folder"),  # pyright: ignore
        (hone.SingleNode("H100:2"), "takes turns on one GPU; expected one, or 'serve'"),
        (hone.SingleNode("H100", vllm_mode="both"), "vllm_mode is 'both'"),  # pyright: ignore
        (hone.SingleNode(None), "gpu is None; expected a GPU"),  # pyright: ignore
        (hone.Distributed("H100", "A10G", 0), "num_rollout_workers is 0; expected a whole number"),
        (hone.Distributed("H100:x", "A10G"), "actor is 'H100:x'; expected a GPU as Modal"),
    ],
)
def test_a_mode_that_cannot_be_is_a_sentence(
    model: str, served: ServedStack, mode: Any, sentence: str
) -> None:
    with pytest.raises(hone.HoneError, match=sentence):
        made(model, served, mode=mode).train()
