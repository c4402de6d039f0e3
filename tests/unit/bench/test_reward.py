"""`bench.reward`: what it compares the sandbox with does the same work."""

from __future__ import annotations

import asyncio

from bench import reward


async def runs_with_a_fork_alone() -> None:
    fork = reward.ForkAlone(0, isolated=False)
    await fork.start()
    try:
        forks: asyncio.Queue[reward.ForkAlone] = asyncio.Queue()
        forks.put_nowait(fork)
        await reward.in_fork(forks)()
        await reward.in_fork(forks)()
    finally:
        await fork.close()


def test_a_fork_alone_gives_the_same_values_back() -> None:
    asyncio.run(runs_with_a_fork_alone())
