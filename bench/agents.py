"""Conversations with an environment, beside their sampling alone.

    python -m bench.agents [--repeats 3]

64 conversations of 6 turns: an answer is 36 to 99 tokens that end with a call of a tool, and the
tool takes 50 ms. They are played as a job's are: the turns go to the sampler over HTTP, the calls
to the job's own class in the sandbox, all conversations at once. A real vLLM samples.

Sampling alone is each conversation's answers sampled again after the same tokens, one after the
other, all conversations at once, without environment and rendering. A first replay, which is not
counted, fills the prefix cache. What `sampling.keep_prefixes` saves is the seconds to the next
token of all conversations at once, with their cache and without it, as after a sync.

The smaller the model, the larger the share of everything beside its own work; this one is
`deploy.tool_model`'s. An answer follows from its first token, with few exceptions, so a replay
begins after that token and has about the same length. Seconds are per sampled token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.report import Figure, finish, options, ratios, repeated
from deploy import local, tool_model
from deploy.machine import on_free_ports
from services.orchestrator.app import run_extensions
from services.orchestrator.extensions.agents.sessions import Sessions
from services.orchestrator.extensions.agents.worker_episodes import Episodes
from services.orchestrator.extensions.tinker.driving import SampleOrders
from services.orchestrator.grpo.groups import sample_group
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.status import Caller
from services.orchestrator.tasks import gather_all
from services.rollout.rl_routes import CacheReset
from shared.job import EvaluatedModel, Job
from shared.settings import Settings
from shared.wire import GenerateRequest, NoBody, Prompt, Rollout, RolloutGroup, Sampling, TokenIds

Result = TypeVar("Result")
Spans = Sequence[tuple[int, int]]
"""Tokens of a rollout: the first of each span, and the end."""

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
            "sampling": {"group_size": GROUP_SIZE, "max_tokens": MAX_LENGTH - 64},
            "training": {"dtype": "float32"},
            "environment": {"source": ENVIRONMENT, "name": "Slow", "max_turns": TURNS},
        }
    )


async def timed(calls: Iterable[Coroutine[Any, Any, Result]]) -> tuple[list[Result], float]:
    """Returns the results of calls that are made at once, and the seconds that they took."""
    began = time.perf_counter()
    return await gather_all(calls), time.perf_counter() - began


def play_groups(
    services: Services, job: Job, name: str
) -> Iterator[Coroutine[Any, Any, RolloutGroup]]:
    for at in range(GROUPS):
        prompt = Prompt(index=at, content=f"{at}: find the number.", row={})
        yield sample_group(services, job, prompt, 0, key=f"{name}:{at}", seed=at)


def again(
    services: Services, groups: Sequence[RolloutGroup], name: str, spans: Callable[[Rollout], Spans]
) -> Iterator[Coroutine[Any, Any, int]]:
    """The conversations, of which the spans of tokens are sampled again."""
    for at, group in enumerate(groups):
        for number, rollout in enumerate(group.rollouts):
            key = f"{name}:{at}:{number}"
            yield sampled(services, group.prompt_token_ids, rollout, spans(rollout), key)


def next_token(rollout: Rollout) -> Spans:
    end = len(rollout.token_ids)
    return [(end, end + 1)]


async def sampled(
    services: Services, prompt: TokenIds, rollout: Rollout, spans: Spans, key: str
) -> int:
    """Samples the spans one after the other, each after the same tokens; returns the number of
    tokens."""
    whole, num_sampled = [*prompt, *rollout.token_ids], 0
    for start, end in spans:
        body = GenerateRequest(
            prompt_token_ids=TokenIds(whole[: len(prompt) + start]),
            sampling=Sampling(n=1, max_tokens=end - start),
        )
        group = await services.samplers.pool.generate(body, f"{key}:{start}", conversation=key)
        num_sampled += group.rollouts[0].num_sampled
    return num_sampled


async def forget(services: Services) -> None:
    await services.samplers.pool.one().call(
        "POST", "/reset_prefix_cache", NoBody(), CacheReset, deadline_s=60
    )


def answers(rollout: Rollout) -> Spans:
    """Returns the tokens of each answer without its first."""
    sampled = [0, *rollout.sampled, 0]
    edges = [at for at in range(1, len(sampled)) if sampled[at] != sampled[at - 1]]
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


async def measure(urls: dict[str, str], folder: Path, repeats: int) -> list[Figure]:
    job = job_of(folder / "model")
    settings = Settings(
        rollout_url=urls["rollout"], reward_url=urls["reward"], runs_dir=folder / "runs"
    )
    extensions = run_extensions(Episodes(), Sessions(), SampleOrders())
    services = Services.of(Caller(job, settings, "agents"), extensions=extensions)
    names = ("played", "sampling alone", "tokens", "next, cached", "next, anew")
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        await services.samplers.serve_own_weights(EvaluatedModel(model=job.model))
        for repeat in range(repeats + 1):
            groups, seconds = await timed(play_groups(services, job, f"played{repeat}"))
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            check(rollouts)
            await timed(again(services, groups, f"warm{repeat}", answers))
            counts, alone_s = await timed(again(services, groups, f"alone{repeat}", answers))
            num_tokens, num_again = sum(each.num_sampled for each in rollouts), sum(counts)
            if num_again < SAME * num_tokens:
                raise RuntimeError(f"{num_again} tokens were sampled again of {num_tokens}")
            _, cached_s = await timed(again(services, groups, f"cached{repeat}", next_token))
            await forget(services)
            _, anew_s = await timed(again(services, groups, f"anew{repeat}", next_token))
            if repeat:  # the first requests of an engine are slow
                found["next, cached"].append(cached_s)
                found["next, anew"].append(anew_s)
                found["played"].append(1e6 * seconds / num_tokens)
                found["sampling alone"].append(1e6 * alone_s / num_again)
                found["tokens"].append(num_tokens / seconds)
    finally:
        await services.close()
    times = ratios(found["played"], found["sampling alone"])
    anew_to_cached = ratios(found["next, anew"], found["next, cached"])
    return [
        repeated("64 conversations to their sampling alone", times, "x", MOST_RATIO, "max"),
        repeated("played", found["played"], "us/token"),
        repeated("sampling alone, all in cache", found["sampling alone"], "us/token"),
        repeated("tokens per second, played", found["tokens"], "/s"),
        repeated("next token of all, from the cache", found["next, cached"], "s"),
        repeated("next token of all, computed again", found["next, anew"], "s"),
        repeated("computed again to the cache", anew_to_cached, "x"),
    ]


def check(rollouts: Sequence[Rollout]) -> None:
    """Raises RuntimeError if a conversation is not of 6 turns."""
    for rollout in rollouts:
        if rollout.info.get("turns") != TURNS or rollout.info.get("tool_errors"):
            raise RuntimeError(f"a conversation ended otherwise: {rollout.info} {rollout.error}")


def main() -> int:
    repeats = options(__doc__, repeats=3).parse_args().repeats
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
