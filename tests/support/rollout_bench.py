"""The rollout service in this process: the real app and client, and an engine that fails on demand
at the `Engine` seam."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2 as httpx
import numpy as np
from safetensors.numpy import save_file
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from services.rollout.app import create_service
from services.rollout.engine import Adapter, BadPrompt, Constraint, PauseMode
from services.rollout.running import label, spans
from services.rollout.sampler import Sampler
from services.rollout.weights.adapters import LoadedAdapters
from services.rollout.weights.copies import Copies, Fetcher
from shared.errors import BadRequest, StateLost
from shared.http.client import Client
from shared.settings import Settings
from shared.weights.folders import (
    CONFIG,
    WEIGHTS,
    adapter_digests,
    digest,
    digest_of,
    stored_tensors,
    tensor_digests,
)
from shared.wire import (
    Aborted,
    AbortRequest,
    AdapterWeights,
    BroadcastWeights,
    EngineSpec,
    FolderWeights,
    GenerateRequest,
    Logprobs,
    Message,
    ModelRequest,
    Published,
    Rollout,
    RolloutGroup,
    Sampling,
    ServingWeights,
    SharedWeights,
    Span,
    TokenIds,
)
from tests.support.fake_chat import FakeChat

SPEC = ModelRequest(model="tiny")
OTHER = ModelRequest(model="other")


@dataclass
class FakeEngine:
    """Answers each prompt with its own last token, or with `outcome`. `calls` records what the
    service asked for, in order."""

    folder: Path
    max_model_len: int = 16
    max_lora_rank: int = 0
    keeps_cache: bool = False
    dtype: str = "float32"
    gpus: tuple[str, ...] = ()
    vocab_size: int = 10
    max_num_seqs: int = 16
    kv_cache_tokens: int = 4096
    openai: ASGIApp = field(default_factory=lambda: JSONResponse({"from": "the engine"}))
    calls: list[Any] = field(default_factory=list)
    label: str = "default"
    dead: bool = False
    fail_meeting: BaseException | None = None
    fail_load: BaseException | None = None
    fail_sleep: BaseException | None = None
    outcome: tuple[Rollout, ...] = ()
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    meeting: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: dict[str, str] = field(default_factory=dict)
    num_read_back: int = 0
    adapters: dict[int, Adapter] = field(default_factory=dict)
    refuses_adapters: Exception | None = None
    offers: LoadedAdapters | None = None
    shift: float = 0.0
    samples: int = 0
    under_way: int = 0
    chat: FakeChat = field(init=False)

    def __post_init__(self) -> None:
        self.chat = FakeChat(self._spans)
        self.frozen.set()
        self.meeting.set()
        self.loading.set()

    def encode(
        self, prompt: str | tuple[Message, ...], template_args: Mapping[str, Any]
    ) -> list[int]:
        if "refuse" in template_args:
            raise BadPrompt("the model's chat template refused the messages")
        return [len(prompt) + len(template_args)] if prompt else []

    def encode_answer(
        self,
        prompt: str | tuple[Message, ...],
        answer: str | Message,
        template_args: Mapping[str, Any],
    ) -> list[int]:
        """Returns a token for each of its letters."""
        return [ord(letter) - ord("a") for letter in str(answer)]

    async def sample(
        self,
        prompt_token_ids: list[int],
        sampling: Sampling,
        *,
        owner: str,
        salt: str,
        deadline_s: float | None = None,
        adapter: Adapter | None = None,
        num_top: int = 0,
        constraint: Constraint | None = None,
    ) -> tuple[Rollout, ...]:
        one = Rollout(
            text=adapter.name if adapter else salt,
            token_ids=(prompt_token_ids[-1],),
            logprobs=(-0.5,),
            finish_reason="stop",
            spans=await self._spans(prompt_token_ids, owner, adapter),
        )
        return self.outcome or (one,) * sampling.n

    async def _spans(
        self, _: list[int], owner: str, adapter: Adapter | None = None
    ) -> tuple[Span, ...]:
        """Begins under the label of now, and ends under that of when it is not frozen; with an
        adapter it is that one's."""
        self.samples += 1
        self.under_way += 1
        labels = [(self.label, 0)]
        try:
            await self.frozen.wait()
        finally:
            self.under_way -= 1
        if self.label != labels[0][0]:
            labels.append((self.label, 1))
        if adapter:
            assert adapter.number in self.adapters, "it would be loaded from its folder again"
            return (Span(version=adapter.version, start=0),)
        return spans(labels, owner)

    async def logprobs(self, token_ids: list[int], adapter: Adapter | None = None) -> list[float]:
        self.calls.append([adapter.name, *token_ids] if adapter else token_ids)
        return [-float(id) - self.shift for id in token_ids[1:]]

    async def top_logprobs(
        self, token_ids: list[int], adapter: Adapter | None, num_top: int
    ) -> tuple[list[float], TokenIds, Logprobs]:
        return await self.logprobs(token_ids, adapter), TokenIds(), Logprobs()

    async def pause(self, mode: PauseMode = "keep") -> None:
        if self.dead:
            raise StateLost("the engine process died")
        self.calls.append("pause" if mode == "keep" else mode)
        self.frozen.clear()
        if mode != "keep":
            self.frozen.set()

    async def reset_cache(self) -> bool:
        self.calls.append("reset cache")
        return True

    async def resume(self) -> None:
        self.calls.append("resume")
        self.frozen.set()

    async def load_files(self, folder: Path) -> None:
        self.calls.append(folder.name)
        await self.loading.wait()
        if self.fail_load:
            raise self.fail_load

    async def load_adapter(self, adapter: Adapter) -> None:
        if self.refuses_adapters:
            raise self.refuses_adapters
        self.calls.append(adapter.name)
        self.adapters[adapter.number] = adapter

    async def unload_adapter(self, adapter: Adapter) -> None:
        del self.adapters[adapter.number]

    def offer(self, adapters: LoadedAdapters) -> None:
        self.offers = adapters

    async def adapter_digests(self, adapter: Adapter) -> dict[str, str]:
        return tensor_digests(stored_tensors(adapter.folder))

    async def sleep(self) -> None:
        self.calls.append("sleep")
        if self.fail_sleep:
            raise self.fail_sleep

    async def wake_weights(self) -> None:
        self.calls.append("wake weights")

    async def wake_cache(self) -> None:
        self.calls.append("wake cache")

    async def meet(self, ref: BroadcastWeights | SharedWeights) -> None:
        self.calls.append("meet")
        await self.meeting.wait()
        if self.fail_meeting:
            raise self.fail_meeting

    async def receive(self, ref: BroadcastWeights | SharedWeights) -> None:
        self.calls.append(ref.method)
        if self.fail_load:
            raise self.fail_load

    async def restart(self, folder: Path) -> None:
        self.calls.append("restart")
        await self.load_files(folder)

    async def digests(self, until: Set[str] | None = None) -> dict[str, str]:
        self.num_read_back += 1
        return self.loaded

    async def set_version(self, owner: str, version: int) -> None:
        self.calls.append(version)
        self.label = label(owner, version)

    async def failure(self) -> str | None:
        return "the engine process died" if self.dead else None

    def num_running_tokens(self) -> int:
        return 0

    def prompt_tokens(self) -> tuple[int, int]:
        return 20, 16

    def num_running(self) -> int:
        return 3

    async def stop(self) -> None:
        self.calls.append("stop")


class RolloutBench:
    """The service with everything a test reaches for. It is its own starter of engines."""

    base: Mapping[str, np.ndarray] = MappingProxyType(
        {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}
    )
    """The tensors of the model."""

    def __init__(self, folder: Path, *, replica: str = "here:1", **settings: Any) -> None:
        self.model = folder / "model"
        self.runs = settings.setdefault("runs_dir", folder / "runs")
        self.model.mkdir(parents=True)
        (self.model / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
        save_file(dict(self.base), self.model / "model.safetensors")
        self.engines: list[FakeEngine] = []
        self.start_error: BaseException | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.copies = folder / "copies"
        copies = Copies(self.copies, Fetcher("http://127.0.0.1:9"))
        self.sampler = Sampler(self, (self.runs,), copies, replica=replica, max_adapters=2)
        self.service = create_service(Settings(**settings), self.sampler)
        self.transport = httpx.ASGITransport(app=self.service.app)
        self.client = Client("rollout", "http://localhost", binary=True, transport=self.transport)

    async def preload(self) -> None:
        await asyncio.sleep(0)

    async def find_model(self, spec: EngineSpec) -> Path:
        if spec.model == "missing":
            raise BadRequest("'model': got 'missing', which is no folder here")
        return self.model

    async def start(self, spec: EngineSpec, folder: Path) -> FakeEngine:
        await asyncio.sleep(0)
        await self.may_start.wait()
        if self.start_error:
            raise self.start_error
        self.engines.append(FakeEngine(folder, max_lora_rank=spec.max_lora_rank or 0))
        return self.engines[-1]

    def stage(self) -> str | None:
        return "reading the weights"

    def close(self) -> None:
        pass

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def publish(
        self,
        version: int,
        job: str = "job",
        fence: tuple[int, int] = (0, 0),
        **tensors: np.ndarray,
    ) -> FolderWeights:
        folder = self.runs / job / f"v{version}"
        folder.mkdir(parents=True, exist_ok=True)
        values = tensors or {
            "w": np.full((2, 2), version, np.float32),
            "b": np.zeros(2, np.float32),
        }
        save_file(values, folder / "model.safetensors")
        return folder_weights(folder, version, job, fence)

    def publish_adapter(
        self,
        version: int,
        job: str = "job",
        fence: tuple[int, int] = (0, 0),
        config: str = '{"r": 1, "lora_alpha": 2, "target_modules": ["w"]}',
        **tensors: np.ndarray,
    ) -> AdapterWeights:
        """Of rank 1, of the one layer of the bench's model; B is full of the version."""
        folder = self.runs / job / f"a{version}-{fence[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(config)
        layer = "base_model.model.layer.w"
        values = tensors or {
            f"{layer}.lora_A.weight": np.ones((1, 2), np.float32),
            f"{layer}.lora_B.weight": np.full((3, 1), version, np.float32),
        }
        save_file(values, folder / WEIGHTS)
        tensors_ = adapter_digests(folder)
        return AdapterWeights(
            job_id=job,
            attempt=fence[0],
            epoch=fence[1],
            version=version,
            method="lora",
            path=str(folder),
            digest=digest(tensors_),
            tensors=tensors_,
            size_bytes=0,
            adapter=f"{job}/v{version}-{fence[0]}.{fence[1]}",
        )

    async def put(self, spec: ModelRequest = SPEC) -> ServingWeights:
        return await self.client.call("PUT", "/model", spec, ServingWeights, deadline_s=5)

    async def reload(self, ref: Published) -> ServingWeights:
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

    async def abort(self, job: str = "job", attempt: int = 0, epoch: int = 0) -> int:
        body = AbortRequest(job_id=job, attempt=attempt, epoch=epoch)
        return (await self.client.call("POST", "/abort", body, Aborted, deadline_s=2)).num_requests

    async def frozen_generate(self, **request: Any) -> asyncio.Task[RolloutGroup]:
        """Returns a request that is under way, and stays so until the engine resumes."""
        before = self.engine.under_way
        self.engine.frozen.clear()
        task = asyncio.create_task(self.generate(deadline_s=5, **request))
        while self.engine.under_way == before and not task.done():
            await asyncio.sleep(0.001)
        return task

    async def raw(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=self.transport, base_url="http://localhost") as http:
            return await http.request(method, path, **options)


def folder_weights(folder: Path, version: int, job: str, fence: tuple[int, int]) -> FolderWeights:
    """Returns what a trainer publishes of weights in a folder."""
    return FolderWeights(
        job_id=job,
        attempt=fence[0],
        epoch=fence[1],
        version=version,
        method="disk",
        path=str(folder),
        digest=digest_of(folder),
        size_bytes=0,
    )
