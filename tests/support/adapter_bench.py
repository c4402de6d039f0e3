"""A sampler of adapters on the real engine, served over HTTP in this process; and jobs that publish
adapters to it, Hugging Face models that change at random. torch is imported where it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.orchestrator.samplers import syncing
from services.rollout.app import create_service
from services.rollout.engine import Adapter
from services.rollout.on_vllm.processes import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies, Fetcher
from services.trainer.publishing import Publisher
from shared.job import LoraSpec, SyncMethod
from shared.settings import Settings
from shared.weights.folders import stored_tensors, tensor_digests
from shared.wire import (
    Canary,
    Logprobs,
    ModelRequest,
    PublishRequest,
    ServingWeights,
    TokenIds,
    WeightsRef,
)
from tests.support.running import served
from tests.support.tiny_models import VOCAB_SIZE
from tests.system.test_rollout_engine import make_model

SEQUENCES = np.random.default_rng(0).integers(3, VOCAB_SIZE, (64, 16)).tolist()
CANARY_IDS = TokenIds([(7 * position + 11) % VOCAB_SIZE for position in range(48)])
RANK = LoraSpec(rank=3, alpha=5.0)
"""Neither a rank that vLLM pads to, nor a scale that is exact in binary."""


@dataclass
class Trainer:
    """A job's model with an adapter that changes, and the real publisher of both."""

    job_id: str
    network: Any
    wrapped: Any
    publisher: Publisher
    epoch: int
    version: int = 0

    def step(self, size: float = 0.05) -> None:
        import torch

        self.version += 1
        generator = torch.Generator().manual_seed(100 * self.epoch + self.version)
        with torch.no_grad():
            for name, parameter in self.wrapped.named_parameters():
                if ".lora_" in name:
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    def logprobs(self, ids: list[int]) -> list[float]:
        import torch

        with torch.no_grad():
            logprobs_TV = torch.log_softmax(self.wrapped(torch.tensor([ids])).logits[0], -1)
        return [logprobs_TV[t - 1, ids[t]].item() for t in range(1, len(ids))]

    def save_adapter(self, folder: Path) -> dict[str, str]:
        from services.trainer.zero import lora

        weights = {
            name: value
            for name, value in self.network.state_dict().items()
            if lora.is_adapters(name)
        }
        lora.save_adapter(self.wrapped, weights, folder)
        return {}

    def save_merged(self, folder: Path) -> dict[str, str]:
        from services.trainer.zero import lora

        plain = lora.merged(self.network, dict(self.network.state_dict()))
        self.network.save_pretrained(folder, state_dict=plain)
        return tensor_digests(stored_tensors(folder))

    def publish(self, method: SyncMethod) -> WeightsRef:
        save = self.save_adapter if method == "lora" else self.save_merged
        request = PublishRequest(
            job_id=self.job_id, epoch=self.epoch, version=self.version, method=method
        )
        ours = Canary(token_ids=CANARY_IDS, logprobs=Logprobs(self.logprobs(list(CANARY_IDS))))
        ref = self.publisher.publish(request, 1, save)
        return WeightsRef(ref.model_copy(update={"canary": ours}))


@dataclass
class Bench:
    folder: Path
    model: Path
    settings: Settings
    sampler: Sampler
    url: str
    epoch: int = 0

    def trainer(self, job_id: str) -> Trainer:
        """Returns a job that begins now, and alone may load weights."""
        from transformers import AutoModelForCausalLM

        from services.trainer.zero import lora

        self.epoch += 1
        network = AutoModelForCausalLM.from_pretrained(self.model, dtype="float32")
        wrapped = lora.attach(network, RANK).eval()
        return Trainer(job_id, network, wrapped, Publisher(self.settings, job_id), self.epoch)

    async def sync(self, trainer: Trainer, method: SyncMethod = "lora") -> ServingWeights:
        serving = await self.sampler.reload_weights(ref := trainer.publish(method))
        assert (serving.version, serving.digest) == (trainer.version, ref.root.digest)
        assert ref.root.canary and syncing.fault(ref.root.canary, serving) is None
        return serving

    def adapter(self, job_id: str | None = None) -> Adapter | None:
        assert self.sampler.running is not None
        return self.sampler.running.adapters.find(job_id)

    def adapter_names(self) -> dict[str, Adapter]:
        assert self.sampler.running is not None
        return self.sampler.running.adapters.names()

    async def largest_gap(self, trainer: Trainer) -> float:
        """Returns by how much a log-prob of 64 sequences, by the job's weights, differs at most
        from the trainer's."""
        engine = await self.sampler.ready_engine()
        adapter = self.adapter(trainer.job_id)
        gaps = [
            np.abs(np.subtract(trainer.logprobs(ids), await engine.logprobs(ids, adapter))).max()
            for ids in SEQUENCES
        ]
        return float(max(gaps))


@contextlib.asynccontextmanager
async def a_bench(folder: Path, **more: Any) -> AsyncIterator[Bench]:
    """Yields a sampler of adapters with further settings."""
    make_model(model := folder / "model", 0, tied=True)
    settings = Settings(
        shm_dir=folder / "shm", runs_dir=folder / "runs", rollout_adapters=2, **more
    )
    environment = dict(os.environ)
    copies = Copies(folder / "copies", Fetcher("http://127.0.0.1:9"))
    roots = (settings.shm_dir, settings.runs_dir)
    sampler = Sampler(VllmStarter(settings), roots, copies, max_adapters=2)
    try:
        async with served(create_service(settings, sampler).server(0)) as url:
            spec = ModelRequest(model=str(model), dtype="float32", max_lora_rank=RANK.rank)
            await sampler.put_model(spec)
            yield Bench(folder, model, settings, sampler, url)
    finally:
        os.environ.clear()
        os.environ.update(environment)
