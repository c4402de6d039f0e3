"""Conversations with an environment, beside their sampling alone.

    python -m bench.agents [--quick] [--repeats 3]

64 conversations of 6 turns: an answer is 36 to 99 tokens that end with a call of a tool, and the
tool takes 50 ms. They are played as a job's are: the turns go to the sampler over HTTP, the calls
to the job's own class in the sandbox, all conversations at once. A real vLLM samples.

Beside it stands the time that sampling alone would take with everything in cache: each
conversation's answers are sampled again after the same tokens, one after the other, all
conversations at once, without environment and without rendering. A first replay, which is not
counted, fills the prefix cache. A ratio is taken within a repeat.

What `sampling.keep_prefixes` saves stands beside it: the seconds to the next token of all
conversations at once, with their cache and without it, as after a sync.

The model is as small as `deploy.tool_model` makes it, so everything beside the model's own work has
the largest share that it can have. An answer follows from its first token, but for a few; so a
replay begins after that token and has about the same length. Seconds are per sampled token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Figure, count, finish, ratios, repeated
from deploy import local, tool_model
from deploy.machine import on_free_ports
from services.orchestrator.app import run_extensions
from services.orchestrator.extensions.agents.sessions import Sessions
from services.orchestrator.extensions.agents.worker_episodes import Episodes
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.grpo.groups import sample_group
from services.orchestrator.samplers.services import Services
from services.orchestrator.tasks import all_of
from shared.job import EvaluatedModel, Job
from shared.settings import Settings
from shared.wire import (
    CacheReset,
    GenerateRequest,
    NoBody,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampling,
)
from shared.wire.packed import TokenIds

GROUPS, GROUP_SIZE, TURNS = 8, 8, 6
NUM_STARTS = 64
"""An answer begins at one of so many characters and continues through the alphabet to its call."""

SAME = 0.95
"""Share of the tokens that a replay has at least."""

STEP_S = 0.05
MOST_RATIO = 1.15
MAX_LENGTH = 4096

ENVIRONMENT = f"""
import time

class Slow:
    def reset(self, **row):
        return None

    def guess(self, number: int) -> str:
        \"\"\"Takes its time.

        Args:
            number: Any.
        \"\"\"
        time.sleep({STEP_S})
        return "higher"

    def get_reward(self) -> float:
        return 0.0
"""


def write_model(folder: Path) -> None:
    """Writes a model that thinks aloud before each call."""
    sure = 1 - 1e-6
    thoughts = tool_model.CHARACTERS.replace("7", "")
    tool_model.MAX_LENGTH = MAX_LENGTH
    tool_model.NEXT = {
        tool_model.ANSWER: dict.fromkeys(thoughts[:NUM_STARTS], sure / NUM_STARTS),
        **{one: {other: sure} for one, other in itertools.pairwise(thoughts)},
        thoughts[-1]: {tool_model.HEAD: sure},
        tool_model.HEAD: {"7": sure},
        "7": {tool_model.TAIL: sure},
        tool_model.TAIL: {tool_model.END: sure},
    }
    tool_model.make_tool_model(folder)


def job_of(model: Path) -> Job:
    return Job.model_validate(
        {
            "name": "agents",
            "model": str(model),
            "steps": 1,
            "data": {"train": "rows.jsonl"},
            "sampling": {
                "prompts_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "max_tokens": MAX_LENGTH - 64,
            },
            "training": {"dtype": "float32"},
            "environment": {"source": ENVIRONMENT, "name": "Slow", "max_turns": TURNS},
        }
    )


async def played(services: Services, job: Job, name: str) -> tuple[list[RolloutGroup], float]:
    """Returns the groups, and the seconds that they took."""
    prompts = [
        Prompt(index=index, content=f"{index}: find the number.", row={}) for index in range(GROUPS)
    ]
    began = time.perf_counter()
    groups = await all_of(
        sample_group(services, job, prompt, 0, key=f"{name}:{prompt.index}", seed=prompt.index)
        for prompt in prompts
    )
    return groups, time.perf_counter() - began


async def replayed(
    services: Services, groups: Sequence[RolloutGroup], name: str
) -> tuple[int, float]:
    """Samples the answers again after the same tokens; returns the number of tokens, and the
    seconds that they took."""
    began = time.perf_counter()
    counts = await all_of(
        _replayed(services, group, rollout, f"{name}:{at}:{number}")
        for at, group in enumerate(groups)
        for number, rollout in enumerate(group.rollouts)
    )
    return sum(counts), time.perf_counter() - began


async def _replayed(services: Services, group: RolloutGroup, rollout: Rollout, key: str) -> int:
    whole = [*group.prompt_token_ids, *rollout.token_ids]
    num_sampled = 0
    for start, end in answers(rollout):
        body = GenerateRequest(
            prompt_token_ids=TokenIds(whole[: len(group.prompt_token_ids) + start + 1]),
            sampling=Sampling(n=1, max_tokens=end - start - 1),
        )
        again = await services.pool.generate(body, f"{key}:{start}", conversation=key)
        num_sampled += again.rollouts[0].num_sampled
    return num_sampled


async def next_tokens(services: Services, groups: Sequence[RolloutGroup], name: str) -> float:
    """Returns the seconds that a token after each conversation takes."""
    began = time.perf_counter()
    await all_of(
        services.pool.generate(
            GenerateRequest(
                prompt_token_ids=TokenIds([*group.prompt_token_ids, *rollout.token_ids]),
                sampling=Sampling(n=1, max_tokens=1),
            ),
            f"{name}:{at}:{number}",
        )
        for at, group in enumerate(groups)
        for number, rollout in enumerate(group.rollouts)
    )
    return time.perf_counter() - began


async def forget(services: Services) -> None:
    await services.pool.one().call(
        "POST", "/reset_prefix_cache", NoBody(), CacheReset, deadline_s=60
    )


def answers(rollout: Rollout) -> list[tuple[int, int]]:
    """Returns where each answer begins and ends."""
    sampled = [0, *rollout.sampled, 0]
    edges = [at for at in range(1, len(sampled)) if sampled[at] != sampled[at - 1]]
    return [(start - 1, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


async def measure(urls: dict[str, str], folder: Path, repeats: int) -> list[Figure]:
    job = job_of(folder / "model")
    settings = Settings(
        rollout_url=urls["rollout"], reward_url=urls["reward"], runs_dir=folder / "runs"
    )
    extensions = run_extensions(Episodes(), Sessions(), SampleOrders())
    services = Services(job, settings, "agents", extensions=extensions)
    names = ("played", "sampling alone", "tokens", "next, cached", "next, anew")
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        await services.serve_own_weights(EvaluatedModel(model=job.model))
        for repeat in range(repeats + 1):
            groups, seconds = await played(services, job, f"played{repeat}")
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            check(rollouts)
            await replayed(services, groups, f"warm{repeat}")
            num_again, alone_s = await replayed(services, groups, f"alone{repeat}")
            num_tokens = sum(rollout.num_sampled for rollout in rollouts)
            if num_again < SAME * num_tokens:
                raise RuntimeError(f"{num_again} tokens were sampled again of {num_tokens}")
            cached_s = await next_tokens(services, groups, f"cached{repeat}")
            await forget(services)
            anew_s = await next_tokens(services, groups, f"anew{repeat}")
            if repeat:  # the first requests of an engine are slow
                found["next, cached"].append(cached_s)
                found["next, anew"].append(anew_s)
                found["played"].append(1e6 * seconds / num_tokens)
                found["sampling alone"].append(1e6 * alone_s / num_again)
                found["tokens"].append(num_tokens / seconds)
    finally:
        await services.close()
    times = ratios(found["played"], found["sampling alone"])
    return [
        repeated("64 conversations to their sampling alone", times, "x", MOST_RATIO, "max"),
        repeated("played", found["played"], "us/token"),
        repeated("sampling alone, all in cache", found["sampling alone"], "us/token"),
        repeated("tokens per second, played", found["tokens"], "/s"),
        repeated("next token of all, from the cache", found["next, cached"], "s"),
        repeated("next token of all, computed again", found["next, anew"], "s"),
        repeated(
            "computed again to the cache",
            ratios(found["next, anew"], found["next, cached"]),
            "x",
        ),
    ]


def check(rollouts: Sequence[Rollout]) -> None:
    """Raises RuntimeError if a conversation is not of 6 turns."""
    for rollout in rollouts:
        if rollout.info.get("turns") != TURNS or rollout.info.get("tool_errors"):
            raise RuntimeError(f"a conversation ended otherwise: {rollout.info} {rollout.error}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--repeats", type=count, default=3, help="default: 3")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        os.environ |= on_free_ports(samplers=1) | {
            "HONE_RUNS_DIR": str(folder / "runs"),
            "HONE_TOOL_PARSER": "hermes",
            "HONE_LOG_LEVEL": "warning",
        }
        try:
            state: Any = local.up(folder / "stack", quiet=True, services=("reward", "rollout"))
            figures = asyncio.run(measure(state["urls"], folder, repeats))
        finally:
            local.down(folder / "stack")
    return finish(
        "agents", figures, repeats=repeats, conversations=GROUPS * GROUP_SIZE, turns=TURNS
    )


if __name__ == "__main__":
    raise SystemExit(main())
