"""Tokens per second through `POST /generate`, beside vLLM called directly.

    python -m bench.rollout [--real] [--repeats 5]

Both sides use the same engine, in one process: the service's requests reach it over HTTP from this
process, by the orchestrator's client; the direct ones are made beside it, with the text that vLLM
makes. A figure is the median of the repeats' ratios: a busy machine slows both. The CPU seconds of
the service's process, without the engine's, are reported too. The model is `bench.loop`'s of 0.6
million parameters: the smaller it is, the larger the share of the service's own work. Groups are of
8 completions of 64 or 256 tokens, all requested at once.

Wire bytes count all bodies as sent, requests and polls included, per sampled token. Before
compression 8 of them are the token's id and log-prob, the others its text (1 for each token of this
model) and its envelope. The ids of so small a vocabulary compress better than a real one's.

With `--real` the model is SmolLM2-135M-Instruct in float32, which samples 24 groups of 8
completions of 8 tokens behind prompts of 37 tokens. Both are compared with the products of these
tokens with the weights alone, at the rate of one such product.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from bench.loop import TASKS, product_rate, write_task
from bench.report import Figure, finish, in_turns, options, ratios, repeated
from bench.side import Side, quiet, running
from deploy.real_model import NUM_PARAMETERS, fetch
from shared.http.client import Client
from shared.wire import GenerateRequest, RolloutGroup, Sampling, TokenIds

LOADS = {64: (1, 8, 64), 256: (1, 8)}
REAL_LOADS = {8: (24,)}
"""Numbers of groups, by the tokens of each completion."""

FIRST_TOKEN = 4
"""Those below it are special in the random model's vocabulary."""

LEAST_TOKENS = 4096
"""The least number of tokens that are sampled for each measurement, in as many rounds as needed."""

MOST_BYTES = 9.0


@dataclass(frozen=True)
class Measurement:
    """Tokens, the seconds they took, and the CPU seconds of the service's process among them."""

    num_tokens: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self.num_tokens * 1e6


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts the bytes of bodies, both ways."""

    num_bytes = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        for headers in (request.headers, response.headers):
            self.num_bytes += int(headers.get("content-length", 0))
        return response


@dataclass(frozen=True)
class Prompts:
    """Prompts of random tokens, each of which is new: nothing of them is in a cache."""

    num_tokens: int
    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def take(self, count: int) -> list[list[int]]:
        return [
            [self.rng.randrange(FIRST_TOKEN, self.vocab_size) for _ in range(self.num_tokens)]
            for _ in range(count)
        ]


PROMPTS, REAL_PROMPTS = Prompts(9, vocab_size=12), Prompts(37, vocab_size=49_000)


def main() -> int:
    parser = options(__doc__, repeats=5)
    parser.add_argument("--real", action="store_true", help="the real model instead")
    args = parser.parse_args()
    loads, prompts = (REAL_LOADS, REAL_PROMPTS) if args.real else (LOADS, PROMPTS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.real:
            write_task(folder, TASKS["0.6M"])
        model = fetch() if args.real else folder / "model"
        with running("bench.rollout_side", str(folder), str(model)) as side:
            figures = asyncio.run(measure(side, loads, prompts, args.repeats))
    return finish("rollout", figures, repeats=args.repeats, loads=loads)


async def measure(
    side: Side, loads: Mapping[int, Sequence[int]], prompts: Prompts, repeats: int
) -> list[Figure]:
    url = await asyncio.to_thread(side.told)
    transport = CountingTransport()
    figures: list[Figure] = []
    async with Client("rollout", url, binary=True, transport=transport) as client:
        await over_http(client, prompts.take(8), 64)  # the first requests of an engine are slow
        for num_tokens, counts in loads.items():
            for num_groups in counts:
                transport.num_bytes = 0
                found = await compare(side, client, prompts, num_groups, num_tokens, repeats)
                tokens = sum(one.num_tokens for one in found["/generate"])
                label = f"{num_groups} group{'s' * (num_groups > 1)} of 8 x {num_tokens} tokens"
                if prompts is REAL_PROMPTS:
                    figures += products(label, found, prompts.num_tokens / 8 / num_tokens)
                else:
                    wire_bytes = transport.num_bytes / tokens
                    name = f"{label}: wire bytes per token"
                    figures.append(Figure(name, wire_bytes, "B", MOST_BYTES, "max"))
                figures += figures_of(label, found)
    return figures


async def compare(
    side: Side,
    client: Client,
    prompts: Prompts,
    num_groups: int,
    num_tokens: int,
    repeats: int,
) -> dict[str, list[Measurement]]:
    """Returns the measurements of both sides, by name, one per repeat."""
    ways = {
        "/generate": lambda: over_http(client, prompts.take(num_groups), num_tokens),
        "vLLM": lambda: directly(side, prompts.take(num_groups), num_tokens),
    }
    rounds = max(LEAST_TOKENS // (num_groups * 8 * num_tokens), 1)
    found: dict[str, list[Measurement]] = {name: [] for name in ways}
    for name in in_turns(ways, repeats):
        cpu_before = cpu_s(side.process.pid)
        counts = [await ways[name]() for _ in range(rounds)]
        tokens, seconds = map(sum, zip(*counts, strict=True))
        found[name].append(Measurement(int(tokens), seconds, cpu_s(side.process.pid) - cpu_before))
    return found


def products(label: str, found: dict[str, list[Measurement]], prompts_share: float) -> list[Figure]:
    """Returns the share of sampling time that the products alone would take: of the real model's
    weights with each completion's tokens and its share of the prompt, at 2 operations per token and
    weight."""
    rate = product_rate(192, hidden_size=576, intermediate_size=1536)
    least = 2 * NUM_PARAMETERS * (1 + prompts_share) / rate
    return [
        repeated(f"{label}: products alone, to {name}", [least * one.rate for one in of], "")
        for name, of in found.items()
    ]


def figures_of(label: str, found: dict[str, list[Measurement]]) -> list[Figure]:
    rates = {name: [one.rate for one in of] for name, of in found.items()}
    to_vllm = ratios(rates["/generate"], rates["vLLM"])
    return [
        repeated(f"{label}: tokens per second, to vLLM", to_vllm, "x", 0.95),
        *[repeated(f"{label}: {name}", of, "/s") for name, of in rates.items()],
        *[
            repeated(f"{label}: {name}, CPU time per token", [one.cpu_us for one in of], "us")
            for name, of in found.items()
        ],
    ]


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used, without its children's."""
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


async def over_http(client: Client, prompts: list[list[int]], num_tokens: int) -> tuple[int, float]:
    """Returns the tokens and seconds of all groups, asked for at once."""

    async def group(prompt: list[int]) -> RolloutGroup:
        body = GenerateRequest(prompt_token_ids=TokenIds(prompt), sampling=sampling(num_tokens))
        return await client.call("POST", "/generate", body, RolloutGroup, deadline_s=600, wait_s=0)

    began = time.perf_counter()
    groups = await asyncio.gather(*map(group, prompts))
    seconds = time.perf_counter() - began
    return sum(len(r.token_ids) for group in groups for r in group.rollouts), seconds


def sampling(num_tokens: int) -> Sampling:
    return Sampling(n=8, max_tokens=num_tokens)


async def directly(side: Side, prompts: list[list[int]], num_tokens: int) -> tuple[int, float]:
    """Returns the same of vLLM alone."""
    asked = {"prompts": prompts, "sampling": sampling(num_tokens).model_dump()}
    measured: dict[str, Any] = await asyncio.to_thread(side.ask, asked)
    return measured["tokens"], measured["seconds"]


if __name__ == "__main__":
    quiet()
    sys.exit(main())
