"""SmolLM2-135M-Instruct in the real vLLM and the real trainer, in bfloat16 and in float32: both
give the same tokens the same log-probs, an honest sync passes, and weights that changed a little do
not.

One engine start and one trainer for each dtype.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import pytest_asyncio

from services.orchestrator.samplers import syncing
from services.rollout.on_vllm.processes import VllmStarter
from services.rollout.sampler import Sampler
from services.rollout.weights.copies import Copies, Fetcher
from shared.job import Job
from shared.settings import Settings
from shared.wire import Canary, Example, GenerateRequest, ModelRequest, Sampling, WeightsRef
from tests.support.engine_ranks import Ranks, a_job
from tests.support.real_model import real_model
from tests.support.rollout_bench import folder_weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

Dtype = Literal["bfloat16", "float32"]
QUESTIONS = ("Write a short story about a lighthouse.", "What is 7 + 5?")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Limits:
    """The mean difference of log-probs in nats, and the KL divergence by k3, that rounding may come
    to; and the share of each weight by which a change of all is caught."""

    mean: float
    k3: float
    change: float


LIMITS = {
    # Rounding to 8 bits in 30 layers, at completions of 2.8 nats per token: measured 0.041 and
    # 1.8e-3. Where one answer is likely, both are a tenth of that. A change of 0.01 moves the
    # canary by 0.25 nats, and by the weights of that step 0.25 to 0.33 are allowed.
    "bfloat16": Limits(mean=0.08, k3=4e-3, change=0.02),
    # Measured 7.5e-6 and 4.4e-11. A temperature of 1.001 in place of 1 would be 1e-3.
    "float32": Limits(mean=5e-5, k3=5e-9, change=1e-4),
}


@dataclass(frozen=True)
class Trained:
    """What the trainer gave: its log-probs of the tokens that the sampler sampled, the metrics of a
    step on them, and the canary of the weights that the step made, which are in `folder`."""

    logprobs: list[float]
    metrics: dict[str, float]
    canary: Canary
    folder: Path


@dataclass(frozen=True)
class Pair:
    dtype: Dtype
    model: Path
    sampler: Sampler
    examples: tuple[Example, ...]
    trained: Trained

    @property
    def old_logprobs(self) -> list[float]:
        return [value for example in self.examples for value in example.old_logprobs]

    async def fault(self, weights: Path, version: int) -> str | None:
        """Returns why the sampler does not compute with the trainer's weights, once it has loaded
        those in the folder."""
        ours = self.trained.canary
        ref = folder_weights(weights, version, "job", (0, 0)).model_copy(update={"canary": ours})
        serving = await self.sampler.reload_weights(WeightsRef(ref))
        found, allowed = syncing.difference(ours, serving), syncing.tolerance(ours, serving)
        print(f"{self.dtype}, {weights.name}: canary differs by {found:.2g}, allowed {allowed:.2g}")
        return syncing.fault(ours, serving)


def train(job: Job, examples: Sequence[Example], folder: Path) -> Trained:
    """Runs in the trainer's process."""
    import torch

    from services.trainer.zero.deepspeed_engine import start_engine

    engine = start_engine(job, torch.device("cpu"))
    logprobs, _ = engine.forward(tuple(examples))
    update = engine.update(tuple(examples), LEARNING_RATE)
    folder.mkdir()
    engine.save_weights(folder)
    after = engine.canary()
    engine.close()
    assert after is not None
    return Trained(list(logprobs), dict(update.metrics), after, folder)


async def examples_of(sampler: Sampler) -> tuple[Example, ...]:
    examples = []
    for question in QUESTIONS:
        sampling = Sampling(n=2, max_tokens=16, seed=1)
        request = GenerateRequest(
            prompt=({"role": "user", "content": question},), sampling=sampling
        )
        group = await sampler.generate(request)
        examples += [
            Example(
                prompt_token_ids=group.prompt_token_ids,
                token_ids=rollout.token_ids,
                old_logprobs=rollout.logprobs,
                advantage=(-1.0) ** index,
            )
            for index, rollout in enumerate(group.rollouts)
        ]
    return tuple(examples)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["bfloat16", "float32"])
async def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    dtype, model, folder = request.param, real_model(), tmp_path_factory.mktemp(request.param)
    settings = Settings(runs_dir=folder / "runs", kv_cache_gib=1)
    settings.runs_dir.mkdir()
    environment = dict(os.environ)
    copies = Copies(folder / "copies", Fetcher("http://127.0.0.1:9"))
    sampler = Sampler(VllmStarter(settings), (settings.runs_dir,), copies)
    sampler.open(None)
    try:
        spec = ModelRequest(model=str(model), dtype=dtype, max_model_len=512)
        await sampler.put_model(spec)
        examples = await examples_of(sampler)
        job = a_job(
            model,
            training={"dtype": dtype},
            sampling={"temperature": 1.0, "max_tokens": 32},
            max_model_len=512,
        )
        # Begun after the engine and ended before it: an engine that stops ends all child processes.
        with Ranks(1, folder / "ranks") as ranks:
            trained = ranks.call(train, job, examples, settings.runs_dir / "v1")
        yield Pair(dtype, model, sampler, examples, trained)
    finally:
        await sampler.close()
        os.environ.clear()
        os.environ.update(environment)


def plain_logprobs(model: Path, examples: Sequence[Example]) -> list[float]:
    """Returns plain transformers' log-probs of the sampled tokens, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[float] = []
    for example in examples:
        prompt, ids = list(example.prompt_token_ids), list(example.token_ids)
        with torch.no_grad():
            logits_TV = network(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found += logits_TV.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return found


async def test_trainer_and_sampler_give_what_was_sampled_the_same_log_probs(pair: Pair) -> None:
    limits, plain = LIMITS[pair.dtype], plain_logprobs(pair.model, pair.examples)
    for name, first, second in (
        ("trainer and sampler", pair.trained.logprobs, pair.old_logprobs),
        ("trainer and plain float32", pair.trained.logprobs, plain),
        ("sampler and plain float32", pair.old_logprobs, plain),
    ):
        log_ratio_N = np.subtract(first, second)
        mean, largest = np.abs(log_ratio_N).mean(), np.abs(log_ratio_N).max()
        k3 = (np.exp(log_ratio_N) - 1 - log_ratio_N).mean()
        print(f"{pair.dtype}, {name}: mean {mean:.2g}, max {largest:.2g}, k3 {k3:.2g}")
        assert mean <= limits.mean and k3 <= limits.k3
        if second is pair.old_logprobs:
            assert pair.trained.metrics["mismatch/logprob_diff_mean"] == pytest.approx(mean)
            assert pair.trained.metrics["mismatch/k3_kl"] == pytest.approx(k3, rel=1e-3, abs=1e-9)


async def test_an_honest_sync_passes_and_weights_that_changed_a_little_do_not(pair: Pair) -> None:
    honest = pair.trained.folder
    assert await pair.fault(honest, 1) is None
    damaged = changed(honest, honest.parent / "damaged", LIMITS[pair.dtype].change)
    fault = await pair.fault(damaged, 2)
    assert fault is not None and "the log-probs of the canary differ by" in fault


def changed(model: Path, folder: Path, change: float) -> Path:
    """Writes the model with each weight w changed at random to w (1 + change * x), x from a normal
    distribution, into `folder` and returns it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor.mul_(1 + change * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
