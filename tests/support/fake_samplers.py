"""Several samplers at the HTTP seam, each on a port of its own, to be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import uvicorn

from shared.errors import Conflict, StateLost
from shared.http.service import Service, request_key
from shared.settings import Settings
from shared.wire import (
    Aborted,
    AbortRequest,
    Fence,
    Fencing,
    GenerateRequest,
    Logprobs,
    ModelRequest,
    Rollout,
    RolloutGroup,
    ServingWeights,
    Span,
    TokenIds,
    WeightsRef,
)
from tests.support.running import serve


class FakeSampler:
    """One of them. `fault[route]` runs first in that route. `groups` are the keys of what it has
    sampled, `busy` how many completions it samples at the moment. Killed, it forgets all but these
    counts."""

    def __init__(
        self, settings: Settings, name: str, max_num_seqs: int = 0, kv_cache_tokens: int = 0
    ) -> None:
        self.name = name
        self.fault: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.calls: Counter[str] = Counter()
        self.groups: list[str | None] = []
        self.aborted: list[AbortRequest] = []
        self.seeds: dict[str | None, int | None] = {}
        self.fence: Fence = (0, 0)
        self.port = 0
        self.busy = 0
        self.most_busy = 0
        self._room = {"max_num_seqs": max_num_seqs, "kv_cache_tokens": kv_cache_tokens}
        self.serving = ServingWeights()
        self._settings = settings
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._service: Service | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serves, without a model, on the port it had before."""
        self.forget()
        self.busy = 0
        service = self._service = Service("rollout", self._settings, busy=lambda: self.busy)
        service.operation("PUT", "/model", self._put_model, key=lambda _: "")
        service.operation("POST", "/generate", self._generate)
        service.operation("POST", "/reload_weights", self._reload, key=lambda _: "")
        service.operation("POST", "/abort", self._abort, key=lambda _: "")
        service.query("/weights", self._weights)
        self._server = service.server(self.port)
        self._task = asyncio.create_task(serve(self._server))
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def forget(self) -> None:
        """Is what it would be if it had been killed and started again just now."""
        self.serving = ServingWeights(replica=self.name, **self._room)
        self.fence = (0, 0)

    async def kill(self) -> None:
        """Ends it as SIGKILL does: connections break, and what was under way is lost."""
        assert self._server and self._task and self._service
        for listener in self._server.servers:
            listener.close()
        for connection in [*self._server.server_state.connections]:
            connection.transport.abort()  # type: ignore[union-attr]
        self._server.should_exit = self._server.force_exit = True
        await self._service.operations.close()
        await self._task

    async def _note(self, route: str, body: Any) -> None:
        self.calls[route] += 1
        if route in self.fault:
            await self.fault[route](body)
        if isinstance(body, Fencing) and route in ("model", "reload"):
            self.fence = max(self.fence, body.fence)
        if isinstance(body, Fencing) and body.fence < self.fence:
            raise Conflict(f"got {body.fence}, superseded by {self.fence}", code="stale")

    async def _put_model(self, spec: ModelRequest) -> ServingWeights:
        await self._note("model", spec)
        if self.serving.model != spec.model:
            self.serving = ServingWeights(
                replica=self.name,
                model=spec.model,
                boot_id=secrets.token_hex(8),
                **self._room,
            )
        return self.serving

    async def _weights(self) -> ServingWeights:
        await self._note("weights", None)
        return self.serving

    async def _reload(self, request: WeightsRef) -> ServingWeights:
        ref = request.root
        if self.serving.model is None:
            raise StateLost("no model is loaded; PUT /model loads one")
        await self._note("reload", ref)
        what = ref.model_dump(include={"job_id", "attempt", "epoch", "version", "digest"})
        self.serving = self.serving.model_copy(update=what)
        return self.serving

    async def _generate(self, body: GenerateRequest) -> RolloutGroup:
        if self.serving.model is None:
            raise StateLost("no model is loaded; PUT /model loads one")
        key, count = request_key.get(), body.sampling.n
        self.busy += count
        self.most_busy = max(self.most_busy, self.busy)
        version = self.serving.version
        try:
            await self._note("generate", body)
        finally:
            self.busy -= count
        if version is None or version < (body.min_version or 0):
            raise Conflict(
                f"serving version {version}, asked for {body.min_version}", code="out_of_order"
            )
        self.groups.append(key)
        self.seeds[key] = body.sampling.seed
        rollouts = tuple(
            Rollout(
                text="right" if index % 2 else "wrong",
                token_ids=TokenIds((1, 2)),
                logprobs=Logprobs((-0.5, -0.5)),
                finish_reason="stop",
                spans=(Span(version=version, start=0),),
            )
            for index in range(count)
        )
        return RolloutGroup(
            prompt_token_ids=TokenIds((9,)), rollouts=rollouts, replica=f"{self.name} {key}"
        )

    async def _abort(self, body: AbortRequest) -> Aborted:
        self.aborted.append(body)
        return Aborted(num_requests=0)


@contextlib.asynccontextmanager
async def pool_of(
    count: int, settings: Settings, max_num_seqs: int = 0, kv_cache_tokens: int = 0
) -> AsyncGenerator[tuple[FakeSampler, ...]]:
    samplers = tuple(
        FakeSampler(settings, f"r{number}", max_num_seqs, kv_cache_tokens)
        for number in range(count)
    )
    for sampler in samplers:
        await sampler.start()
    try:
        yield samplers
    finally:
        for sampler in samplers:
            await sampler.kill()
