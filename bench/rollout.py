"""Tokens per second through `POST /generate`, beside vLLM called directly.

    python -m bench.rollout [--quick] [--repeats 5]

Both sides use the same engine, in one process: the service's requests reach it over HTTP from this
process, by the client that the orchestrator has; the direct ones are made beside it, with the text
that vLLM makes. Each repeat measures both, in turns the one first and the other, and what counts is
the median of the repeats' ratios: a busy machine slows both. The CPU seconds of the service's
process, without the engine's, are told of both too. The model of `make demo-tiny`, untrained: with
so small a model the service's own work is the largest share that it can be. Groups are of 8
completions of 64 or 256 tokens, all groups asked for at once.

Wire bytes count all bodies as sent, requests and polls included, per sampled token. Before
compression 8 of them are the token's id and log-prob, the others its text (about 1 for each token
of this model, whose tokens are characters) and what is around it. Ids of 64 tokens become smaller
than ids of a real vocabulary, so the bytes of a made-up answer are shown too: ids of 151,936
tokens, as frequent as words are by Zipf's law, and four characters of text for each."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx2 as httpx

from bench.report import Figure, count, finish, ratios, repeated
from bench.rollout_side import PROMPT, write_model
from bench.side import quiet, start, told
from shared.http import codec, rendering
from shared.http.client import Client
from shared.wire import GenerateRequest, Logprobs, Rollout, RolloutGroup, Sampling, Span, TokenIds

LOADS = {64: (1, 8, 64), 256: (1, 8)}
"""Numbers of groups, by the tokens of each completion."""

LEAST_TOKENS = 4096
"""So many are sampled for each measurement, in as many rounds as that takes."""

MOST_BYTES = 9.0
VOCABULARY = 151_936


@dataclass(frozen=True)
class Measured:
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


class Counted(httpx.AsyncHTTPTransport):
    """Counts the bytes of bodies, both ways."""

    num_bytes = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        for headers in (request.headers, response.headers):
            self.num_bytes += int(headers.get("content-length", 0))
        return response


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two repeats")
    parser.add_argument("--repeats", type=count, default=5, help="default: 5")
    args = parser.parse_args()
    repeats = 2 if args.quick else args.repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        side = start("bench.rollout_side", str(folder))
        try:
            figures = asyncio.run(measure(side, repeats))
        finally:
            side.terminate()
            side.wait()
    return finish("rollout", figures, repeats=repeats, loads=LOADS)


async def measure(side: subprocess.Popen[str], repeats: int) -> list[Figure]:
    url = await _told(side)
    transport = Counted()
    figures: list[Figure] = []
    async with Client("rollout", url, binary=True, transport=transport) as client:
        await over_http(client, 8, 64)  # the first requests of an engine are slow
        for num_tokens, counts in LOADS.items():
            for num_groups in counts:
                transport.num_bytes = 0
                found = await compare(side, client, num_groups, num_tokens, repeats)
                tokens = sum(one.num_tokens for one in found["/generate"])
                label = f"{num_groups} group{'s' * (num_groups > 1)} of 8 x {num_tokens} tokens"
                figures += figures_of(label, found, transport.num_bytes / tokens)
    return [*figures, *made_up()]


async def compare(
    side: subprocess.Popen[str], client: Client, num_groups: int, num_tokens: int, repeats: int
) -> dict[str, list[Measured]]:
    """Returns what was measured of both, by name, once per repeat."""
    ways = {
        "/generate": lambda: over_http(client, num_groups, num_tokens),
        "vLLM": lambda: directly(side, num_groups, num_tokens),
    }
    rounds = max(LEAST_TOKENS // (num_groups * 8 * num_tokens), 1)
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in sorted(ways, reverse=repeat % 2 == 1):
            cpu_before = cpu_s(side.pid)
            counts = [await ways[name]() for _ in range(rounds)]
            tokens, seconds = map(sum, zip(*counts, strict=True))
            found[name].append(Measured(int(tokens), seconds, cpu_s(side.pid) - cpu_before))
    return found


def figures_of(label: str, found: dict[str, list[Measured]], wire_bytes: float) -> list[Figure]:
    rates = {name: [one.rate for one in of] for name, of in found.items()}
    to_vllm = ratios(rates["/generate"], rates["vLLM"])
    return [
        repeated(f"{label}: tokens per second, to vLLM", to_vllm, "x", 0.95),
        Figure(f"{label}: wire bytes per token", wire_bytes, "B", MOST_BYTES, "max"),
        *[repeated(f"{label}: {name}", of, "/s") for name, of in rates.items()],
        *[
            repeated(f"{label}: {name}, CPU time per token", [one.cpu_us for one in of], "us")
            for name, of in found.items()
        ],
    ]


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def made_up() -> list[Figure]:
    """Returns the bytes per token of an answer with a large vocabulary, before and after
    compression."""
    rng = random.Random(0)
    words = ["".join(rng.choices(ascii_lowercase, k=3)) + " " for _ in range(VOCABULARY)]
    shares = [1 / rank for rank in range(1, VOCABULARY + 1)]

    def rollout() -> Rollout:
        ids = rng.choices(range(VOCABULARY), shares, k=512)
        return Rollout(
            text="".join(words[id] for id in ids),
            token_ids=TokenIds(ids),
            logprobs=Logprobs(-rng.expovariate(1.0) for _ in ids),
            finish_reason="length",
            spans=(Span(version=1, start=0),),
        )

    rollouts = tuple(rollout() for _ in range(8))
    group = RolloutGroup(prompt_token_ids=TokenIds(PROMPT), rollouts=rollouts)
    plain = codec.encode(group, codec.MSGPACK)
    tokens, label = 8 * 512, "made up, 8 x 512 tokens"
    packed_bytes = len(rendering.compressed(plain))
    return [
        Figure(f"{label}: bytes per token", len(plain) / tokens, "B"),
        Figure(f"{label}: as sent", packed_bytes / tokens, "B", MOST_BYTES, "max"),
    ]


async def over_http(client: Client, num_groups: int, num_tokens: int) -> tuple[int, float]:
    """Returns the tokens and seconds of all groups, asked for at once."""

    async def group(number: int) -> RolloutGroup:
        prompt = TokenIds([*PROMPT, 4 + number % 8])
        body = GenerateRequest(prompt_token_ids=prompt, sampling=sampling(num_tokens))
        return await client.call("POST", "/generate", body, RolloutGroup, deadline_s=600, wait_s=0)

    began = time.perf_counter()
    groups = await asyncio.gather(*map(group, range(num_groups)))
    seconds = time.perf_counter() - began
    return sum(len(r.token_ids) for group in groups for r in group.rollouts), seconds


def sampling(num_tokens: int) -> Sampling:
    return Sampling(n=8, max_tokens=num_tokens)


async def directly(
    side: subprocess.Popen[str], num_groups: int, num_tokens: int
) -> tuple[int, float]:
    """Returns the same of vLLM alone."""
    assert side.stdin
    asked = {"num_groups": num_groups, "sampling": sampling(num_tokens).model_dump()}
    side.stdin.write(json.dumps(asked) + "\n")
    side.stdin.flush()
    measured: dict[str, Any] = await _told(side)
    return measured["tokens"], measured["seconds"]


async def _told(side: subprocess.Popen[str]) -> Any:
    if (found := await asyncio.to_thread(told, side)) is None:
        raise RuntimeError(f"the sampler's process ended with {side.wait()}")
    return found


if __name__ == "__main__":
    quiet()
    sys.exit(main())
