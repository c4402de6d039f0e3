"""The rollout service over HTTP: the real app and client, an engine that fails on demand at the
`Engine` seam."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from services.rollout.app import NoBody, create_service
from services.rollout.sampler import Sampler
from shared.client import Client
from shared.config import Settings
from shared.digest import digest_of
from shared.errors import BadRequest, Conflict, Failed, StateLost, Unavailable
from shared.wire import (
    EngineSpec,
    FolderWeights,
    GenerateRequest,
    Message,
    ModelRequest,
    PauseState,
    Rollout,
    RolloutGroup,
    Sampling,
    ServingWeights,
    Span,
)

SPEC = ModelRequest(model="tiny")
OTHER = ModelRequest(model="other")


@dataclass
class FakeEngine:
    """Answers each prompt with its own last token. `calls` records what the service asked for, in
    order."""

    folder: Path
    max_model_len: int = 16
    vocab_size: int = 10
    openai: ASGIApp = field(default_factory=lambda: JSONResponse({"from": "the engine"}))
    calls: list[Any] = field(default_factory=list)
    version: int | None = None
    dead: bool = False
    fail_load: BaseException | None = None
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    samples: int = 0

    def __post_init__(self) -> None:
        self.frozen.set()

    def encode(self, prompt: str | tuple[Message, ...]) -> list[int]:
        return [len(prompt)] if prompt else []

    async def sample(
        self, prompt_token_ids: list[int], sampling: Sampling, salt: str
    ) -> tuple[Rollout, ...]:
        self.samples += 1
        await self.frozen.wait()
        spans = () if self.version is None else (Span(version=self.version, start=0),)
        one = Rollout(
            text=salt,
            token_ids=(prompt_token_ids[-1],),
            logprobs=(-0.5,),
            finish_reason="stop",
            spans=spans,
        )
        return (one,) * sampling.n

    async def pause(self, *, abort: bool = False) -> None:
        self.calls.append("abort" if abort else "pause")
        self.frozen.clear()
        if abort:
            self.frozen.set()

    async def resume(self) -> None:
        self.calls.append("resume")
        self.frozen.set()

    async def load_files(self, folder: Path) -> None:
        self.calls.append(folder.name)
        if self.fail_load:
            raise self.fail_load

    async def set_version(self, version: int) -> None:
        self.calls.append(version)
        self.version = version

    async def failure(self) -> str | None:
        return "the engine process died" if self.dead else None

    def num_running(self) -> int:
        return 3

    async def stop(self) -> None:
        self.calls.append("stop")


class Bench:
    """The service with everything a test reaches for."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        self.runs = folder / "runs"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
        save_file(
            {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)},
            self.model / "model.safetensors",
        )
        self.engines: list[FakeEngine] = []
        self.start_error: BaseException | None = None
        self.sampler = Sampler(self.find_model, self.start_engine, (self.runs,))
        self.service = create_service(Settings(runs_dir=self.runs), self.sampler)
        self.transport = httpx.ASGITransport(app=self.service.app)
        self.client = Client("rollout", "http://localhost", binary=True, transport=self.transport)

    async def find_model(self, spec: EngineSpec) -> Path:
        if spec.model == "missing":
            raise BadRequest("'model': got 'missing', which is no folder here")
        return self.model

    async def start_engine(self, spec: EngineSpec, folder: Path) -> FakeEngine:
        await asyncio.sleep(0)
        if self.start_error:
            raise self.start_error
        self.engines.append(FakeEngine(folder))
        return self.engines[-1]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def publish(self, version: int, job: str = "job", **tensors: np.ndarray) -> FolderWeights:
        folder = self.runs / job / f"v{version}"
        folder.mkdir(parents=True, exist_ok=True)
        values = tensors or {
            "w": np.full((2, 2), version, np.float32),
            "b": np.zeros(2, np.float32),
        }
        save_file(values, folder / "model.safetensors")
        return FolderWeights(
            job_id=job,
            version=version,
            method="disk",
            path=str(folder),
            digest=digest_of(folder),
            size_bytes=0,
        )

    async def put(self, spec: ModelRequest = SPEC) -> ServingWeights:
        return await self.client.call("PUT", "/model", spec, ServingWeights, deadline_s=5)

    async def reload(self, ref: FolderWeights) -> ServingWeights:
        return await self.client.call("POST", "/reload_weights", ref, ServingWeights, deadline_s=2)

    async def generate(
        self, deadline_s: float = 0.3, key: str | None = None, **request: Any
    ) -> RolloutGroup:
        body = GenerateRequest(
            **{"prompt_token_ids": (1, 2), "sampling": Sampling(max_tokens=4), **request}
        )
        return await self.client.call(
            "POST", "/generate", body, RolloutGroup, deadline_s=deadline_s, key=key
        )

    async def raw(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=self.transport, base_url="http://localhost") as http:
            return await http.request(method, path, **options)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    async with bench.client:
        yield bench


@pytest.fixture
async def serving(bench: Bench) -> Bench:
    await bench.put()
    return bench


# --- the model -----------------------------------------------------------------------------------


async def test_without_a_model_the_service_is_ready_and_generate_says_what_to_do(
    bench: Bench,
) -> None:
    ready = await bench.raw("GET", "/readyz")
    assert (ready.status_code, ready.json()["dependencies"]["engine"]["ok"]) == (200, True)
    with pytest.raises(StateLost, match="no model is loaded; PUT /model loads one"):
        await bench.generate()
    refused = await bench.raw("POST", "/reload_weights", json=bench.publish(1).model_dump())
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "no model is loaded; PUT /model loads one",
    )


async def test_a_model_put_twice_starts_once(bench: Bench) -> None:
    first, second = await asyncio.gather(bench.put(), bench.put())
    assert first == second == await bench.put()
    assert (first.model, first.version, len(bench.engines)) == ("tiny", None, 1)


async def test_another_model_stops_the_first_engine_and_its_version(serving: Bench) -> None:
    await serving.reload(serving.publish(4))
    assert (await serving.put(OTHER)).model == "other"
    assert serving.engines[0].calls[-1] == "stop"
    assert (await serving.client.get("/weights", ServingWeights)).version is None


async def test_going_back_to_a_model_starts_it_again(serving: Bench) -> None:
    await serving.put(OTHER)
    assert (await serving.put(SPEC)).model == "tiny"
    assert len(serving.engines) == 3


async def test_a_model_that_does_not_exist_leaves_the_old_one_serving(serving: Bench) -> None:
    with pytest.raises(BadRequest, match="got 'missing'"):
        await serving.put(ModelRequest(model="missing"))
    assert (await serving.generate()).rollouts[0].finish_reason == "stop"


async def test_a_failed_start_is_answered_and_the_next_one_works(bench: Bench) -> None:
    bench.start_error = Failed("the engine for 'tiny' did not start: OSError: disk full")
    with pytest.raises(Failed, match="disk full"):
        await bench.put()
    assert (await bench.raw("GET", "/readyz")).status_code == 200
    bench.start_error = None
    assert (await bench.put()).model == "tiny"


async def test_after_a_failed_start_nothing_is_said_to_serve(serving: Bench) -> None:
    await serving.reload(serving.publish(4))
    serving.start_error = Failed("disk full")
    with pytest.raises(Failed):
        await serving.put(OTHER)
    served = await serving.client.get("/weights", ServingWeights)
    assert (served.model, served.version) == (None, None)


async def test_a_dead_engine_makes_the_service_unready_and_the_same_model_starts_anew(
    serving: Bench,
) -> None:
    serving.engine.dead = True
    ready = await serving.raw("GET", "/readyz")
    assert (ready.status_code, ready.json()["dependencies"]["engine"]["detail"]) == (
        503,
        "the engine process died",
    )
    with pytest.raises(Unavailable, match="the engine process died"):
        await serving.generate()
    await serving.put()
    assert (await serving.generate()).prompt_token_ids == (1, 2)


# --- generate ------------------------------------------------------------------------------------


async def test_generate_returns_a_group(serving: Bench) -> None:
    group = await serving.generate(sampling=Sampling(n=3, max_tokens=4))
    assert (group.prompt_token_ids, len(group.rollouts)) == ((1, 2), 3)
    assert (group.rollouts[0].token_ids, group.rollouts[0].logprobs) == ((2,), (-0.5,))


async def test_text_and_messages_are_encoded_by_the_model(serving: Bench) -> None:
    assert (await serving.generate(prompt_token_ids=None, prompt="four")).prompt_token_ids == (4,)
    messages = ({"role": "user", "content": "hi"},)
    assert (await serving.generate(prompt_token_ids=None, prompt=messages)).prompt_token_ids == (1,)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": "both"}, "not both or neither"),
        ({"prompt_token_ids": None}, "not both or neither"),
        ({"prompt_token_ids": (3, 10)}, "got 10, expected 0 to 9"),
        ({"prompt_token_ids": ()}, "the prompt has no tokens"),
        (
            {"prompt_token_ids": (1,) * 13},
            "a prompt of 13 tokens with 'max_tokens' 4 makes 17; the model holds 16",
        ),
    ],
)
async def test_a_bad_prompt_is_refused_with_the_numbers(
    serving: Bench, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        await serving.generate(**request_)
    assert serving.engine.samples == 0


async def test_the_longest_prompt_that_fits_is_sampled(serving: Bench) -> None:
    assert len((await serving.generate(prompt_token_ids=(1,) * 12)).prompt_token_ids) == 12


async def test_the_same_key_samples_once(serving: Bench) -> None:
    await asyncio.gather(
        serving.generate(key="step-1-prompt-0"), serving.generate(key="step-1-prompt-0")
    )
    await serving.generate(key="step-1-prompt-0")
    assert serving.engine.samples == 1


async def test_the_same_key_with_another_prompt_is_a_conflict(serving: Bench) -> None:
    await serving.generate(key="k")
    with pytest.raises(Conflict):
        await serving.generate(key="k", prompt_token_ids=(5,))


async def test_weights_older_than_asked_for_do_not_sample(serving: Bench) -> None:
    with pytest.raises(Conflict, match="got 2, serving no version of a job"):
        await serving.generate(min_version=2)
    await serving.reload(serving.publish(1))
    with pytest.raises(Conflict, match="got 2, serving version 1 of 'job'"):
        await serving.generate(min_version=2)
    await serving.reload(serving.publish(2))
    assert (await serving.generate(min_version=2)).rollouts[0].versions == (2,)


async def test_cached_prefixes_are_salted_with_job_and_version(serving: Bench) -> None:
    await serving.reload(serving.publish(7))
    assert (await serving.generate()).rollouts[0].text == "job:(0, 0):7"


# --- weights -------------------------------------------------------------------------------------


async def test_a_reload_pauses_loads_labels_and_resumes(serving: Bench) -> None:
    ref = serving.publish(5)
    served = await serving.reload(ref)
    assert (served.job_id, served.version, served.digest, served.model) == (
        "job",
        5,
        ref.digest,
        "tiny",
    )
    assert served.load_s > 0
    assert serving.engine.calls == ["pause", "v5", 5, "resume"]
    assert await serving.client.get("/weights", ServingWeights) == served


async def test_a_version_reloaded_twice_is_loaded_once(serving: Bench) -> None:
    ref = serving.publish(5)
    answers = await asyncio.gather(serving.reload(ref), serving.reload(ref))
    assert answers[0] == answers[1] == await serving.reload(ref)
    assert serving.engine.calls.count("v5") == 1


async def test_a_version_is_loaded_again_into_a_new_engine(serving: Bench) -> None:
    ref = serving.publish(5)
    await serving.reload(ref)
    await serving.put(OTHER)
    await serving.reload(ref)
    assert serving.engine.calls == ["pause", "v5", 5, "resume"]


async def test_an_older_version_is_a_conflict(serving: Bench) -> None:
    await serving.reload(serving.publish(5))
    with pytest.raises(Conflict, match="got 3, serving 5"):
        await serving.reload(serving.publish(3))
    assert (await serving.generate()).rollouts[0].versions == (5,)


async def test_other_bytes_of_the_same_version_are_a_conflict(serving: Bench) -> None:
    await serving.reload(serving.publish(5))
    other = serving.publish(5, w=np.ones((2, 2), np.float32), b=np.ones(2, np.float32))
    with pytest.raises(Conflict, match="serves with digest"):
        await serving.reload(other)


async def test_a_reload_that_goes_back_replaces_a_newer_version_and_other_bytes_once(
    serving: Bench,
) -> None:
    await serving.reload(serving.publish(5))
    back = serving.publish(3).model_copy(update={"epoch": 1})
    assert (await serving.reload(back)).version == 3
    await serving.reload(back)
    assert (await serving.generate()).rollouts[0].versions == (3,)
    other = serving.publish(3, w=np.ones((2, 2), np.float32), b=np.ones(2, np.float32)).model_copy(
        update={"epoch": 2}
    )
    assert (await serving.reload(other)).digest == other.digest != back.digest
    assert serving.engine.calls == ["pause", "v5", 5, "resume"] + ["pause", "v3", 3, "resume"] * 2


async def test_another_job_starts_its_own_order(serving: Bench) -> None:
    await serving.reload(serving.publish(5))
    assert (await serving.reload(serving.publish(0, job="next"))).version == 0


async def test_bytes_that_changed_on_the_way_are_not_loaded(serving: Bench) -> None:
    await serving.reload(serving.publish(1))
    ref = serving.publish(2)
    file = Path(ref.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(Failed, match=f"expected {ref.digest}; it was not loaded"):
        await serving.reload(ref)
    assert (await serving.generate()).rollouts[0].versions == (1,)


async def test_a_version_without_a_tensor_is_not_loaded(serving: Bench) -> None:
    with pytest.raises(Failed, match="1 of 2 tensors are missing, the first is 'b'"):
        await serving.reload(serving.publish(1, w=np.zeros((2, 2), np.float32)))
    assert serving.engine.calls == []


async def test_weights_from_elsewhere_are_refused(serving: Bench, tmp_path: Path) -> None:
    ref = serving.publish(1).model_copy(update={"path": str(tmp_path / "model")})
    with pytest.raises(BadRequest, match="loaded only from below"):
        await serving.reload(ref)


async def test_after_a_load_that_failed_halfway_nothing_is_sampled_until_one_succeeds(
    serving: Bench,
) -> None:
    await serving.reload(serving.publish(1))
    serving.engine.fail_load = RuntimeError("bus error")
    with pytest.raises(Failed, match="bus error"):
        await serving.reload(serving.publish(2))
    assert serving.engine.calls[-1] == "abort"
    assert (await serving.raw("GET", "/readyz")).status_code == 503
    with pytest.raises(
        Unavailable,
        match=r"loading version 2 of job 'job' failed halfway \(RuntimeError: bus error\)",
    ):
        await serving.generate()
    assert (await serving.client.get("/weights", ServingWeights)).version is None
    serving.engine.fail_load = None
    await serving.reload(serving.publish(2))
    assert (await serving.generate()).rollouts[0].versions == (2,)


async def test_a_rollout_under_way_when_a_load_fails_is_not_returned(serving: Bench) -> None:
    await serving.engine.pause()
    waiting = asyncio.create_task(serving.generate())
    await asyncio.sleep(0.01)
    serving.engine.fail_load = RuntimeError("bus error")
    with pytest.raises(Failed):
        await serving.reload(serving.publish(2))
    with pytest.raises(Unavailable, match="failed halfway"):
        await waiting


async def test_the_same_model_put_after_a_failed_load_starts_anew(serving: Bench) -> None:
    serving.engine.fail_load = RuntimeError("bus error")
    with pytest.raises(Failed):
        await serving.reload(serving.publish(2))
    await serving.put()
    assert len(serving.engines) == 2
    assert (await serving.generate()).rollouts[0].versions == ()


# --- pause ---------------------------------------------------------------------------------------


async def test_while_paused_generate_waits(serving: Bench) -> None:
    paused = await serving.client.call("POST", "/pause", NoBody(), PauseState, deadline_s=1)
    waiting = asyncio.create_task(serving.generate(deadline_s=5))
    await asyncio.sleep(0.02)
    assert (paused.paused, waiting.done()) == (True, False)
    resumed = await serving.client.call("POST", "/resume", NoBody(), PauseState, deadline_s=1)
    assert (resumed.paused, (await waiting).prompt_token_ids) == (False, (1, 2))


async def test_a_reload_does_not_end_a_pause(serving: Bench) -> None:
    await serving.client.call("POST", "/pause", NoBody(), PauseState, deadline_s=1)
    await serving.reload(serving.publish(1))
    assert "resume" not in serving.engine.calls


# --- openai, metrics, versions -------------------------------------------------------------------


async def test_openai_routes_go_to_the_engine_or_answer_in_openais_shape(bench: Bench) -> None:
    refused = await bench.raw("GET", "/v1/models")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "no model is loaded; PUT /model loads one"
    await bench.put()
    assert (await bench.raw("GET", "/v1/models")).json() == {"from": "the engine"}


async def test_metrics_show_version_running_requests_and_tokens(serving: Bench) -> None:
    assert "hone_rollout_weight_version NaN" in (await serving.raw("GET", "/metrics")).text
    await serving.reload(serving.publish(6))
    await serving.generate(sampling=Sampling(n=5, max_tokens=4))
    text = (await serving.raw("GET", "/metrics")).text
    assert "hone_rollout_weight_version 6.0" in text
    assert "hone_rollout_running_requests 3.0" in text
    assert "hone_rollout_generated_tokens_total 5.0" in text


async def test_version_names_the_engines_packages(bench: Bench) -> None:
    assert (await bench.raw("GET", "/version")).json()["torch"].startswith("2.")


async def test_a_configured_model_is_started_behind_the_first_requests(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    service = create_service(Settings(runs_dir=bench.runs, rollout_model="tiny"), bench.sampler)
    async with service.app.router.lifespan_context(service.app):
        assert await bench.sampler.unready() == "starting the engine for 'tiny'"
        end = time.monotonic() + 5
        while await bench.sampler.unready() and time.monotonic() < end:
            await asyncio.sleep(0.001)
        assert bench.sampler.serving.model == "tiny"
    assert bench.engine.calls == ["stop"]


async def test_a_configured_model_that_cannot_start_keeps_the_service_unready_and_says_why(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    service = create_service(Settings(runs_dir=bench.runs, rollout_model="missing"), bench.sampler)
    async with service.app.router.lifespan_context(service.app):
        await asyncio.sleep(0.01)
        assert await bench.sampler.unready() == "'model': got 'missing', which is no folder here"
