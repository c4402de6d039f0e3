"""The real trainer: `python -m services.trainer`, torchrun, DeepSpeed ZeRO-2, one and two ranks, against plain torch autograd."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tiny_models import make_tiny_model

from shared.client import Client
from shared.errors import BadRequest, Conflict, Failed, HoneError
from shared.job import Job
from shared.job_file import parse_job
from shared.wire import (
    Checkpoint,
    CheckpointRequest,
    Example,
    PublishRequest,
    StepResult,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
    WeightsRef,
)

ROOT = Path(__file__).parents[2]
TEMPERATURE = 0.8
LEARNING_RATE, MAX_GRAD_NORM = 1e3, 1e-9
"""With gradients clipped far below Adam's epsilon (1e-8) its first step is linear in the gradient: -lr * g / (|g| + eps). Then a
relative error of the update is one of the gradient, and not the sign of elements whose gradient is rounding noise."""

pytestmark = [pytest.mark.engine, pytest.mark.system]


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    shm: Path

    def call(self, method: str, path: str, body, result):
        return asyncio.run(self._call(method, path, body, result))

    async def _call(self, method: str, path: str, body, result):
        async with Client("trainer", f"http://127.0.0.1:{self.port}", binary=True) as client:
            if body is None:
                return await client.get(path, result, deadline_s=90)
            return await client.call(method, path, body, result, deadline_s=90)

    def load(self, job_id: str, job: Job) -> TrainerState:
        return self.call("PUT", "/job", TrainerJob(job_id=job_id, job=job), TrainerState)

    def step(self, job_id: str, step: int, examples) -> StepResult:
        return self.call("POST", "/train_step", TrainStepRequest(job_id=job_id, step=step, examples=examples), StepResult)

    def publish(self, job_id: str, version: int) -> WeightsRef:
        return self.call("POST", "/publish_weights", PublishRequest(job_id=job_id, version=version, method="shm"), WeightsRef)

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@contextlib.contextmanager
def running(folder: Path, ranks: int, module: str = "services.trainer") -> Iterator[Service]:
    """A trainer of its own port and folders; its log is shown if a test fails."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shm = Path("/dev/shm") / f"hone-test-{os.getpid()}-{port}"
    settings = {
        "HONE_TRAINER_PORT": str(port),
        "HONE_TRAINER_RANKS": str(ranks),
        "HONE_TRAINER_THREADS": "1",
        "HONE_RUNS_DIR": str(folder / "runs"),
        "HONE_SHM_DIR": str(shm),
        "TMPDIR": str(folder),
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env=clean | settings, stdout=output, stderr=output)
    try:
        yield Service(process, port, log, shm)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            sys.stdout.write(log.read_text())
            with contextlib.suppress(FileNotFoundError):
                shm.rmdir()


@pytest.fixture(scope="module")
def services(tmp_path_factory) -> Iterator[dict[int, Service]]:
    """One trainer of one rank and one of two."""
    folder = tmp_path_factory.mktemp("trainers")
    with running(folder / "one", 1) as one, running(folder / "two", 2) as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def a_job(model: Path, **training: object) -> Job:
    settings = {"dtype": "float32", "learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM, **training}
    return parse_job(
        {
            "name": "t",
            "model": str(model),
            "steps": 1,
            "data": {"train": "x"},
            "rewards": [{"grader": "x"}],
            "sampling": {"temperature": TEMPERATURE},
            "training": settings,
        }
    )


def some_examples(model: Path, num: int = 12) -> tuple[Example, ...]:
    """Examples of very different lengths; old log-probs are the model's own, disturbed, so that some ratios are clipped."""
    rng = random.Random(5)
    policy = load(model)
    examples = []
    for _ in range(num):
        prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 9))]
        completion = [rng.randrange(64) for _ in range(rng.randrange(1, 24))]
        old = [value + rng.gauss(0, 0.2) for value in logprobs(policy, prompt, completion).tolist()]
        examples.append(Example(prompt_token_ids=prompt, token_ids=completion, old_logprobs=old, advantage=rng.gauss(0, 1)))
    return tuple(examples)


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logprobs(policy, prompt, completion):
    """Log-probs of one unpadded sequence's completion, from the model's whole logits."""
    import torch

    logits = policy(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1)[range(len(completion)), list(completion)]


def reference_update(model: Path, examples, loss: str):
    """The change of each weight by one AdamW step of plain torch, the loss, and the gradient's norm: token by token."""
    import torch

    policy = load(model)
    total_tokens = sum(len(example.token_ids) for example in examples)
    total = torch.zeros(())
    for example in examples:
        new = logprobs(policy, example.prompt_token_ids, example.token_ids)
        scale = 1 / total_tokens if loss == "dapo" else 1 / len(example.token_ids) / len(examples)
        for logprob, old in zip(new, example.old_logprobs, strict=True):
            ratio = (logprob - old).exp()
            bounded = ratio.clip(1 - 0.2, 1 + 0.28)
            total = total - scale * torch.min(ratio * example.advantage, bounded * example.advantage)
    total.backward()
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0).step()
    return (
        {name: parameter.detach() - before[name] for name, parameter in policy.named_parameters()},
        total.item(),
        grad_norm.item(),
    )


def weights(folder: str | Path):
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def relative(update, expected) -> float:
    distance = math.sqrt(sum(((update[name] - expected[name]).double() ** 2).sum().item() for name in expected))
    return distance / math.sqrt(sum((value.double() ** 2).sum().item() for value in expected.values()))


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_any_split_gives_the_update_of_one_big_batch(services, model, loss):
    examples = some_examples(model)
    before = weights(model)
    updates = {}
    for ranks, budget, num_micro_batches in ((1, 10_000, 1), (1, 64, 4), (2, 64, 2)):
        job_id = f"{loss}-{ranks}-{budget}"
        services[ranks].load(job_id, a_job(model, loss=loss, micro_batch_tokens=budget))
        result = services[ranks].step(job_id, 1, examples)
        assert result.metrics["num_micro_batches"] == num_micro_batches
        after = weights(services[ranks].publish(job_id, 1).path)
        updates[job_id] = ({name: after[name] - before[name] for name in before}, result)
    expected, expected_loss, expected_norm = reference_update(model, examples, loss)
    (whole, result), *others = updates.values()
    assert result.loss == pytest.approx(expected_loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected_norm, rel=1e-5)  # before clipping, which would hide a wrong factor
    assert relative(whole, expected) < 2e-6
    for update, other in others:
        sys.stdout.write(f"relative difference of the update: {relative(update, whole):.2g}\n")
        assert relative(update, whole) < 1e-6
        assert other.grad_norm == pytest.approx(result.grad_norm, rel=1e-6)
        for name in result.metrics.keys() - {"padding_fraction", "num_micro_batches"}:
            assert other.metrics[name] == pytest.approx(result.metrics[name], rel=1e-5), name


def test_two_ranks_with_one_example_between_them_agree_with_one(services, model):
    (example, *_) = some_examples(model, 1)
    digests = []
    for ranks in (1, 2):
        services[ranks].load("single", a_job(model))
        services[ranks].step("single", 1, [example])
        digests.append(weights(services[ranks].publish("single", 1).path))
    before = weights(model)
    one, two = ({name: value[name] - before[name] for name in before} for value in digests)
    assert relative(two, one) < 1e-6


def test_the_same_steps_give_the_same_bytes(services, model):
    examples = some_examples(model)
    digests = []
    for life in ("first", "second"):
        services[2].load(life, a_job(model, learning_rate=1e-3, max_grad_norm=1.0, micro_batch_tokens=64))
        for step in (1, 2, 3):
            services[2].step(life, step, examples)
        digests.append(services[2].publish(life, 3).digest)
    assert digests[0] == digests[1]


def test_a_retried_step_moves_weights_once(services, model):
    service, examples = services[1], some_examples(model)
    service.load("retry", a_job(model, learning_rate=1e-3))
    first = service.step("retry", 1, examples)
    digest = service.publish("retry", 1).digest
    assert service.step("retry", 1, examples) == first
    assert service.publish("retry", 1).digest == digest
    with pytest.raises(Conflict, match="got step 3, expected 2"):
        service.step("retry", 3, examples)
    with pytest.raises(Conflict, match="already applied, with another body"):
        service.step("retry", 1, examples[:1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_whose_gradient_is_not_finite_is_refused_as_if_it_had_never_come(services, tmp_path, ranks):
    import torch

    model = make_tiny_model(tmp_path / "broken", tie_word_embeddings=False)
    policy = load(model)
    with torch.no_grad():
        policy.get_input_embeddings().weight[63] = math.nan
    policy.save_pretrained(model)
    good = tuple(
        Example(prompt_token_ids=(1, 2, index), token_ids=(3, 4), old_logprobs=(-4.0, -4.0), advantage=index - 5.0)
        for index in range(10)
    )
    bad = (*good, Example(prompt_token_ids=(63,), token_ids=(3,), old_logprobs=(-4.0,), advantage=1.0))
    service, digests = services[ranks], []
    for job_id in ("clean", "refused"):
        service.load(job_id, a_job(model, learning_rate=1e-3, max_grad_norm=1.0, micro_batch_tokens=20))
        service.step(job_id, 1, good)
        if job_id == "refused":
            with pytest.raises(Failed, match="its gradient is not finite"):
                service.step(job_id, 2, bad)
            assert service.call("GET", "/state", None, TrainerState).step == 1
        service.step(job_id, 2, good)
        digests.append(service.publish(job_id, 2).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_bfloat16_is_what_transformers_loads_and_what_is_published(services, tmp_path, tied):
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    service, job_id = services[2], f"bf16-{tied}".lower()
    state = service.load(job_id, a_job(model, dtype="bfloat16", learning_rate=1e-2, max_grad_norm=1.0))
    assert (state.dtype, state.num_ranks) == ("bfloat16", 2)
    service.step(job_id, 1, some_examples(model))
    published = weights(service.publish(job_id, 1).path)
    checkpoint = service.call("POST", "/checkpoints", CheckpointRequest(job_id=job_id, step=1), Checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    assert ("lm_head.weight" in published) is not tied
    original = weights(model)
    for name, value in published.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(loaded.state_dict()[name].to(torch.bfloat16), value, rtol=0, atol=0)
    assert any(not torch.equal(published[name].float(), original[name].bfloat16().float()) for name in published)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (Path(checkpoint.path) / name).read_bytes() == (model / name).read_bytes()
    assert PreTrainedTokenizerFast.from_pretrained(checkpoint.path)("w5 w9")["input_ids"] == [5, 9]


def test_a_model_that_is_none_is_a_sentence_and_the_loaded_job_stays(services, model, tmp_path):
    service = services[2]
    service.load("stays", a_job(model))
    (tmp_path / "empty").mkdir()
    for path, sentence in (
        (tmp_path / "nowhere", "there is no folder '.*nowhere'; expected a folder with config.json and weights"),
        (tmp_path / "empty", "the folder '.*empty' holds no model; expected a folder with config.json"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            service.load("other", a_job(path))
    assert service.call("GET", "/state", None, TrainerState).job_id == "stays"


def test_sigterm_ends_every_process_and_leaves_nothing(tmp_path, model):
    with running(tmp_path / "two", 2) as service:
        service.load("a", a_job(model))
        service.publish("a", 0)
        assert (service.shm / "a" / "v0").is_dir()
        processes = service.processes()
        assert len(processes) == 4, "launcher, torchrun and two ranks"
        for process in processes:
            for connection in process.net_connections(kind="inet"):
                assert connection.laddr.ip in ("127.0.0.1", "::1"), f"{process.name()} uses {connection}"
        service.process.terminate()
        assert service.process.wait(15) == 0
        assert gone(processes)
        assert not (service.shm / "a").exists()
        assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["log"]
        assert "Traceback" not in service.log.read_text()


LIGHT_RANKS = '''"""Ranks without DeepSpeed start sooner. Rank 1's update fails while rank 0 waits for it in a collective."""
import torch, torch.distributed as dist
from services.trainer import ranks
from services.trainer.trainer import Trainer

class Engine:
    dtype, device, num_parameters, weights_bytes = "float32", "cpu", 1, 1
    def __init__(self, job): pass
    def close(self): pass
    def update(self, examples, learning_rate):
        if dist.get_rank() == 1:
            raise MemoryError("17 bytes short")
        dist.all_reduce(torch.zeros(1))

if __name__ == "__main__":
    ranks.make_trainer = lambda settings, device: Trainer(
        settings, dist.get_rank(), dist.get_world_size(), check_job=lambda job: None, start_engine=Engine
    )
    ranks.main()
'''
LIGHT_LAUNCHER = """
from services.trainer import __main__ as launcher
command = launcher.torchrun_command
launcher.torchrun_command = lambda *a: [w.replace("services.trainer.ranks", "light_ranks") for w in command(*a)]
launcher.main()
"""


@pytest.fixture
def light(tmp_path, monkeypatch) -> str:
    """The module name of a launcher of `LIGHT_RANKS`."""
    (tmp_path / "light_ranks.py").write_text(LIGHT_RANKS)
    (tmp_path / "light_launcher.py").write_text(LIGHT_LAUNCHER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return "light_launcher"


@pytest.mark.parametrize("victim", ["launcher", "torchrun", "rank 0", "rank 1"])
def test_a_killed_process_ends_all(tmp_path, light, victim):
    with running(tmp_path / "two", 2, light) as service:
        service.call("GET", "/state", None, TrainerState)
        processes = service.processes()
        chosen = dict(zip(("launcher", "torchrun", "rank 0", "rank 1"), processes, strict=True))[victim]
        chosen.kill()
        assert service.process.wait(20) != 0
        assert gone(processes)
        assert sorted(path.name for path in (tmp_path / "two").iterdir() if path.is_dir()) == []


def test_a_rank_that_fails_while_others_wait_for_it_is_an_error_and_not_a_hang(tmp_path, light):
    with running(tmp_path / "two", 2, light) as service:
        service.load("a", a_job(tmp_path))
        example = Example(prompt_token_ids=(1,), token_ids=(2,), old_logprobs=(-1.0,), advantage=1.0)
        started = time.monotonic()
        with pytest.raises(HoneError, match="train_step failed on rank 1: MemoryError: 17 bytes short; the trainer service ends"):
            service.step("a", 1, [example])
        assert time.monotonic() - started < 30
        assert service.process.wait(20) != 0


def gone(processes: list[psutil.Process], within_s: float = 15) -> bool:
    """Whether all have ended in time; zombies that nobody reaped count as ended."""
    running: Callable[[psutil.Process], bool] = lambda p: p.is_running() and p.status() != psutil.STATUS_ZOMBIE  # noqa: E731
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(running(process) for process in processes):
                return True
        time.sleep(0.1)
    return False
