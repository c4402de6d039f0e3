"""The trainer's routes over HTTP in process: success, each kind of error, called twice happened
once."""

from __future__ import annotations

import asyncio
import threading

import httpx2
import pytest

from services.trainer.app import create_service
from services.trainer.trainer import Trainer
from shared.errors import BadRequest
from shared.http.client import Client
from shared.job import LoraSpec
from shared.settings import Settings
from shared.wire import (
    Checkpoint,
    CheckpointList,
    CheckpointRequest,
    PublishRequest,
    StepResult,
    TrainerState,
    WeightsRef,
    Wire,
)
from tests.support.in_process import in_process
from tests.support.trainer_fakes import Engines, job_request, make_trainer, step_request


class OneRank:
    """Runs commands in a thread, one at a time, as a single rank does; `hold` keeps them
    waiting."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.hold = threading.Event()
        self.hold.set()
        self.lock = asyncio.Lock()

    async def run(self, name: str, body: Wire):
        async with self.lock:
            await asyncio.to_thread(self.hold.wait)
            return await asyncio.to_thread(getattr(self.trainer, name), body)


@pytest.fixture
def parts(tmp_path) -> tuple[Trainer, Engines]:
    return make_trainer(tmp_path)


@pytest.fixture
def rank(parts) -> OneRank:
    return OneRank(parts[0])


@pytest.fixture
async def client(rank):
    service = create_service(Settings(), rank.trainer, rank.run, {"ranks": 1, "torch": "2"})
    transport = httpx2.ASGITransport(app=service.app)
    async with Client("trainer", "http://localhost", binary=True, transport=transport) as client:
        yield client


async def call(client, method, path, body, result):
    return await client.call(method, path, body, result, deadline_s=60)


async def test_a_job_goes_from_loading_to_a_checkpoint(client):
    state = await call(client, "PUT", "/job", job_request(), TrainerState)
    assert (state.job_id, state.step, state.num_parameters) == ("a", 0, 10)
    result = await call(client, "POST", "/train_step", step_request(1), StepResult)
    assert (result.step, result.num_tokens) == (1, 3)
    ref = await call(
        client,
        "POST",
        "/publish_weights",
        PublishRequest(job_id="a", version=1, method="shm"),
        WeightsRef,
    )
    assert ref.root.path.endswith("shm/a/v1")
    checkpoint = await call(
        client, "POST", "/checkpoints", CheckpointRequest(job_id="a", step=1), Checkpoint
    )
    assert (await client.get("/checkpoints", CheckpointList)).checkpoints == (checkpoint,)
    assert (await client.get("/state", TrainerState)).step == 1


async def test_published_files_alone_can_be_fetched_whole_and_in_ranges(client, rank, tmp_path):
    settings = Settings(shm_dir=tmp_path / "shm")
    service = create_service(settings, rank.trainer, rank.run, {})
    await call(client, "PUT", "/job", job_request(), TrainerState)
    body = PublishRequest(job_id="a", version=0, method="http")
    (file,) = (await call(client, "POST", "/publish_weights", body, WeightsRef)).root.files
    assert file.path == "/weights/a/v0/model.safetensors"
    async with in_process(service.app) as http:
        whole = await http.get(file.path)
        assert (whole.status_code, len(whole.content)) == (200, file.size_bytes)
        rest = await http.get(file.path, headers={"range": "bytes=10-"})
        assert (rest.status_code, rest.content) == (206, whole.content[10:])
        (tmp_path / "shm/a/v0/secret").write_text("no")
        (tmp_path / "shm/a/v0/link.safetensors").symlink_to("/etc/passwd")
        for path in ("a/v0/secret", "a/v0/link.safetensors", "a/v9/model.safetensors"):
            assert (await http.get(f"/weights/{path}")).status_code == 404
        for path in ("a/%2e%2e/x.safetensors", "../a/v0/model.safetensors", "A/v0/m.safetensors"):
            assert (await http.get(f"/weights/{path}")).status_code == 404


async def test_both_files_of_an_adapter_can_be_fetched(client, rank, tmp_path):
    settings = Settings(shm_dir=tmp_path / "shm")
    service = create_service(settings, rank.trainer, rank.run, {})
    plain = job_request()
    job = plain.job.model_copy(update={"lora": LoraSpec(rank=4)})
    await call(client, "PUT", "/job", plain.model_copy(update={"job": job}), TrainerState)
    body = PublishRequest(job_id="a", version=0, method="lora")
    ref = (await call(client, "POST", "/publish_weights", body, WeightsRef)).root
    async with in_process(service.app) as http:
        config, weights = [await http.get(file.path) for file in ref.files]
        assert (await http.get("/weights/a/a0/other.json")).status_code == 404
    assert (config.status_code, config.text) == (200, '{"r": 4}')
    assert len(weights.content) == ref.files[1].size_bytes
    assert (ref.adapter, list(ref.canary.logprobs)) == ("a/v0-0.0", [-1.0, 0.0])


async def test_a_canary_comes_with_the_weights_and_is_computed_once_a_step(client, parts):
    await call(client, "PUT", "/job", job_request(), TrainerState)
    body = PublishRequest(job_id="a", version=0, method="shm")
    refs = [await call(client, "POST", "/publish_weights", body, WeightsRef) for _ in range(2)]
    assert [list(ref.root.canary.logprobs) for ref in refs] == [[-1.0, 0.0]] * 2
    assert parts[1][0].num_canaries == 1
    await call(client, "POST", "/train_step", step_request(1), StepResult)
    body = PublishRequest(job_id="a", version=1, method="shm")
    later = await call(client, "POST", "/publish_weights", body, WeightsRef)
    assert list(later.root.canary.logprobs) == pytest.approx([-1.0, -0.1])


async def test_every_call_twice_happens_once(client, parts):
    engines = parts[1]
    calls = [
        ("PUT", "/job", job_request(), TrainerState),
        ("POST", "/train_step", step_request(1), StepResult),
        (
            "POST",
            "/publish_weights",
            PublishRequest(job_id="a", version=1, method="shm"),
            WeightsRef,
        ),
        ("POST", "/checkpoints", CheckpointRequest(job_id="a", step=1), Checkpoint),
    ]
    for method, path, body, result in calls:
        first, second = await asyncio.gather(
            *(call(client, method, path, body, result) for _ in range(2))
        )
        assert first == second
    assert (len(engines), engines[0].num_updates) == (1, 1)


async def test_a_body_that_is_wrong_is_a_bad_request(client):
    with pytest.raises(BadRequest, match="'step': got 0"):
        await call(
            client,
            "POST",
            "/train_step",
            step_request(1).model_copy(update={"step": 0}),
            StepResult,
        )
    with pytest.raises(BadRequest, match="there is no folder 'missing'"):
        await call(client, "PUT", "/job", job_request(model="missing"), TrainerState)


async def test_a_job_that_comes_back_continues_from_its_checkpoint(client, parts):
    await call(client, "PUT", "/job", job_request("a"), TrainerState)
    first = await call(client, "POST", "/train_step", step_request(1), StepResult)
    await call(client, "POST", "/checkpoints", CheckpointRequest(job_id="a", step=1), Checkpoint)
    await call(client, "POST", "/train_step", step_request(2), StepResult)
    await call(client, "PUT", "/job", job_request("b"), TrainerState)
    state = await call(client, "PUT", "/job", job_request("a"), TrainerState)
    assert (state.step, state.resumed_step) == (1, 1)
    assert await call(client, "POST", "/train_step", step_request(1), StepResult) == first
    assert (await call(client, "POST", "/train_step", step_request(2), StepResult)).step == 2
    assert parts[1][2].num_updates == 2


async def test_health_and_state_answer_during_a_step(client, rank):
    await call(client, "PUT", "/job", job_request(), TrainerState)
    rank.hold.clear()
    step = asyncio.create_task(call(client, "POST", "/train_step", step_request(1), StepResult))
    await asyncio.sleep(0.05)
    assert (await client._http.get("/healthz")).status_code == 200
    assert (await client._http.get("/readyz")).json()["dependencies"]["ranks"]["ok"] is True
    assert (await client.get("/state", TrainerState)).step == 0
    assert not step.done()
    rank.hold.set()
    assert (await step).step == 1


async def test_versions_and_metrics_are_shown(client, parts):
    await call(client, "PUT", "/job", job_request(), TrainerState)
    await call(client, "POST", "/train_step", step_request(1), StepResult)
    assert (await client._http.get("/version")).json()["torch"] == "2"
    parts[1][0].skip = True
    await call(client, "POST", "/train_step", step_request(2), StepResult)
    metrics = (await client._http.get("/metrics")).text
    for line in (
        "hone_trainer_step 2.0",
        "hone_trainer_skipped_steps 1.0",
        "hone_trainer_restarts 0.0",
    ):
        assert line in metrics


async def test_the_trainer_is_not_ready_while_it_loads_a_job_again(rank):
    reason = ["job 'a' is being loaded again"]
    service = create_service(
        Settings(), rank.trainer, rank.run, {}, lambda job: None if job else reason[0]
    )
    async with Client(
        "trainer", "http://localhost", transport=httpx2.ASGITransport(app=service.app)
    ) as client:
        answer = await client._http.get("/readyz")
        assert (answer.status_code, answer.json()["dependencies"]["job"]["detail"]) == (
            503,
            reason[0],
        )
        assert (await client._http.get("/healthz")).status_code == 200
        await call(client, "PUT", "/job", job_request(), TrainerState)
        assert (await client._http.get("/readyz")).status_code == 200
