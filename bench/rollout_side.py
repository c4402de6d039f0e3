"""The sampler's side of `bench.rollout`: the real service around a real vLLM, which it also calls
directly, request by request as the service does, when a line on stdin asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.side import quiet, serving
from shared.settings import Settings
from shared.wire import ModelRequest, Sampling


async def direct(engine: Any, prompts: list[list[int]], sampling: Sampling) -> dict[str, float]:
    """Returns the tokens and seconds of vLLM's own `generate`, called for all prompts at once."""
    from vllm.inputs.engine import TokensInput

    from services.rollout.on_vllm.completions import sampling_params

    async def group(tokens: list[int]) -> int:
        params = sampling_params(sampling)
        prompt = TokensInput(type="token", prompt_token_ids=tokens)
        last: Any = None
        async for output in engine.generate(prompt, params, f"direct-{time.monotonic_ns()}"):
            last = output
        return sum(len(completion.token_ids) for completion in last.outputs)

    began = time.perf_counter()
    counts = await asyncio.gather(*map(group, prompts))
    return {"tokens": sum(counts), "seconds": time.perf_counter() - began}


async def serve(folder: Path, model: Path) -> None:
    from services.rollout.app import create_service
    from services.rollout.on_vllm.processes import VllmStarter
    from services.rollout.sampler import Sampler
    from services.rollout.weights.copies import Copies, Fetcher

    settings = Settings(
        runs_dir=folder / "runs", shm_dir=folder / "shm", log_level="error", max_num_seqs=512
    )
    fetcher = Fetcher(settings.trainer_url, token=None, patience_s=1.0)
    copies = Copies(settings.shm_dir / "sampler", fetcher)
    sampler = Sampler(VllmStarter(settings), (settings.runs_dir,), copies)
    service = create_service(settings, sampler)
    async with serving(service) as url:
        await sampler.put_model(ModelRequest(model=str(model), dtype="float32"))
        engine: Any = await sampler.ready_engine()
        print(json.dumps(url), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            sampling = Sampling.model_validate(asked["sampling"])
            told = await direct(engine._llm, asked["prompts"], sampling)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    quiet()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
