"""What tests/gpu asks and measures of the sampler, with model and device as parameters, so that it
also runs tiny on a CPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from services.rollout.engine import Engine
from services.rollout.on_vllm.processes import VllmStarter
from shared.job import SyncMethod
from shared.settings import Settings
from shared.wire import EngineSpec, Example, Rollout, Sampling
from tests.support.tiny_models import save_tokenizer
from tests.support.trainer_on_device import Shape, random_examples, random_model
from tests.system.test_sync_methods import Pair


def save_random_model(shape: Shape, folder: Path) -> Path:
    """Writes a model of random weights in bfloat16, with the tokenizer of the tiny ones."""
    random_model(shape, torch.bfloat16, torch.device("cpu")).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@contextlib.asynccontextmanager
async def an_engine(
    model: Path, dtype: Literal["bfloat16", "float32"] = "bfloat16", **settings: object
) -> AsyncIterator[Engine]:
    environment = dict(os.environ)
    starter = VllmStarter(Settings(**settings))  # pyright: ignore[reportArgumentType]
    try:
        engine = await starter.start(EngineSpec(model=str(model), dtype=dtype), model)
        yield engine
        await engine.stop()
    finally:
        starter.close()
        os.environ.clear()
        os.environ.update(environment)


async def sampled(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Rollout]:
    """Returns a completion of each prompt, sampled side by side."""
    groups = await asyncio.gather(
        *(engine.sample([*prompt], sampling, owner="", salt="") for prompt in prompts)
    )
    return [rollout for (rollout,) in groups]


def greedy_by_transformers(model: Path, prompt: Sequence[int], num: int) -> list[int]:
    """Returns the completion of the whole prompt, computed again for each token, in float32."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(num):
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@dataclass(frozen=True)
class Gap:
    """How far log-probs of the same tokens are apart, in nats: on average and at most; and how much
    they vary, which says how hard the comparison is."""

    mean: float
    largest: float
    spread: float


async def gap_to_trainer(
    engine: Engine, model: Path, shape: Shape, device: torch.device, tokens: int
) -> Gap:
    """Returns how far the sampler's log-probs of what it sampled are from the trainer's in
    bfloat16."""
    from transformers import AutoModelForCausalLM

    from services.trainer.learning.batch import collate
    from services.trainer.learning.policy import Policy

    prompts = [example.prompt_token_ids for example in random_examples(shape, 8, 16, 4)]
    rollouts = await sampled(engine, prompts, Sampling(max_tokens=tokens))
    examples = [
        Example(
            prompt_token_ids=prompt,
            token_ids=rollout.token_ids,
            old_logprobs=rollout.logprobs,
            advantage=1.0,
        )
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    network = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").to(device).eval()
    batch = collate(examples).to(device)
    with torch.no_grad():
        logprobs_N, _ = Policy(network, 1.0)(batch)
    difference_N = (logprobs_N - batch.sampler_logprobs_N).abs()
    spread = float(batch.sampler_logprobs_N.std())
    return Gap(float(difference_N.mean()), float(difference_N.max()), spread)


@dataclass(frozen=True)
class SyncTime:
    """What a sync took in seconds: the trainer's publishing, and of the sampler's load all of it
    and the part in which it did not sample."""

    publish_s: float
    load_s: float
    paused_s: float

    def __str__(self) -> str:
        return (
            f"published in {self.publish_s:.3f} s, loaded in {self.load_s:.3f}, "
            f"paused for {self.paused_s:.3f}"
        )


async def sync_time(pair: Pair, method: SyncMethod, repeats: int = 2) -> SyncTime:
    """Returns the fastest of several syncs, for the first by a method makes what later ones use.
    Every tensor is read back."""
    times = []
    for _ in range(repeats):
        pair.trainer.step()
        _, serving = await pair.sync(method)
        times.append(SyncTime(pair.trainer.publish_s, serving.load_s, serving.paused_s))
    checked = await pair.sampler.check_weights()
    assert (checked.differing, checked.version) == ((), pair.trainer.version)
    return min(times, key=lambda one: one.publish_s + one.load_s)


async def tokens_per_s(engine: Engine, shape: Shape, num: int, prompt: int, tokens: int) -> float:
    """Returns how many tokens a second are sampled for `num` prompts at once, once warm."""
    prompts = [example.prompt_token_ids for example in random_examples(shape, num, prompt, 4)]
    sampling = Sampling(max_tokens=tokens)
    await sampled(engine, prompts[: num // 4], sampling)
    started = time.perf_counter()
    rollouts = await sampled(engine, prompts, sampling)
    seconds = time.perf_counter() - started
    return sum(len(rollout.token_ids) for rollout in rollouts) / seconds
