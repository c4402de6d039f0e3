"""Tokens per second through `POST /generate`, beside vLLM called directly.

    python -m bench.rollout [--quick] [--repeats 5]

Both sides use the same engine, in one process: the service's requests reach it over HTTP from
this process, by the client that the orchestrator has; the direct ones are made beside it. They
alternate, so a busy machine slows both. The demo's model, untrained: with so small a model the
service's own work is the largest share that it can be. Groups are of 8 completions of up to 128
tokens, all groups asked for at once.

Wire bytes are those of all bodies, requests and polls included, per sampled token: 8 of them are
the token's id and log-prob, the others its text (about 1 for each token of this model, whose tokens
are characters) and what is around it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx

from bench.report import Figure, finish
from bench.rollout_side import PROMPT, write_model
from shared.client import Client
from shared.packed import TokenIds
from shared.wire import GenerateRequest, RolloutGroup, Sampling

GROUPS = (1, 8, 64)
SAMPLING = Sampling(n=8, max_tokens=128)


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
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    args = parser.parse_args()
    repeats = 2 if args.quick else args.repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        command = [sys.executable, "-m", "bench.rollout_side", str(folder)]
        side = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        try:
            figures = asyncio.run(measure(side, repeats))
        finally:
            side.terminate()
            side.wait()
    return finish("rollout", figures, repeats=repeats, sampling=SAMPLING.model_dump())


async def measure(side: subprocess.Popen[str], repeats: int) -> list[Figure]:
    url = json.loads(await _line(side))
    transport = Counted()
    figures: list[Figure] = []
    async with Client("rollout", url, binary=True, transport=transport) as client:
        await over_http(client, 8)  # the first requests of an engine are slow
        for num_groups in GROUPS:
            rates: dict[str, list[float]] = {"/generate": [], "vLLM": []}
            transport.num_bytes = tokens = 0
            for _ in range(repeats):
                count, seconds = await over_http(client, num_groups)
                rates["/generate"].append(count / seconds)
                tokens += count
                rates["vLLM"].append(await directly(side, num_groups))
            ratios = [
                ours / theirs
                for ours, theirs in zip(rates["/generate"], rates["vLLM"], strict=True)
            ]
            label = f"{num_groups} group{'s' * (num_groups > 1)}"
            figures.append(_figure(f"{label}: tokens per second, to vLLM", ratios, "x", 0.95))
            bytes_ = Figure(
                f"{label}: wire bytes per token", transport.num_bytes / tokens, "B", 9.0, "max"
            )
            figures.append(bytes_)
            figures += [_figure(f"{label}: {name}", found, "/s") for name, found in rates.items()]
    return figures


async def over_http(client: Client, num_groups: int) -> tuple[int, float]:
    """Returns the tokens and seconds of all groups, asked for at once."""

    async def group(number: int) -> RolloutGroup:
        prompt = TokenIds([*PROMPT, 4 + number % 8])
        body = GenerateRequest(prompt_token_ids=prompt, sampling=SAMPLING)
        return await client.call("POST", "/generate", body, RolloutGroup, deadline_s=600, wait_s=0)

    began = time.perf_counter()
    groups = await asyncio.gather(*map(group, range(num_groups)))
    seconds = time.perf_counter() - began
    return sum(len(r.token_ids) for group in groups for r in group.rollouts), seconds


async def directly(side: subprocess.Popen[str], num_groups: int) -> float:
    """Returns tokens per second of vLLM alone."""
    assert side.stdin
    asked = {"num_groups": num_groups, "sampling": SAMPLING.model_dump()}
    side.stdin.write(json.dumps(asked) + "\n")
    side.stdin.flush()
    told: dict[str, Any] = json.loads(await _line(side))
    return told["tokens"] / told["seconds"]


async def _line(side: subprocess.Popen[str]) -> str:
    """Returns the side's next line of JSON; vLLM may print others."""
    assert side.stdout
    while line := await asyncio.to_thread(side.stdout.readline):
        if line.startswith(("{", '"')):
            return line
    raise RuntimeError(f"the sampler's process ended with {side.wait()}")


def _figure(name: str, values: list[float], unit: str, goal: float | None = None) -> Figure:
    return Figure(name, median(values), unit, goal, spread=(min(values), max(values)))


if __name__ == "__main__":
    sys.exit(main())
