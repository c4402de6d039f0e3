"""Every attack in `sandbox_attacks.py` on the real sandbox. After each: the right verdict; no
process, file or open descriptor left, memory given back; and the next program in the same slot
right."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from services.reward.sandbox.host import Groups
from services.reward.sandbox.local import LocalSandbox
from shared.wire import ExecuteRequest
from tests.support import sandbox_attacks
from tests.support.reward_helpers import processes_of
from tests.support.sandbox_attacks import ATTACKS, KERNEL, Attack

SLOTS = 1

pytestmark = pytest.mark.slow

AFTER = ExecuteRequest(
    code="import json, math, os, random, sys, threading",
    expression="[json.dumps([math.factorial(10)]), random.random(), hash('a'), sorted({'a', "
    "'b', 'c'}), os.listdir('/tmp'), "
    "os.getcwd(), os.stat('/tmp').st_mode, sys.getrecursionlimit(), threading.active_count()]",
)
"""The next program, whose value says whether anything of the one before is left where it looks."""

ALLOWED_GROWTH_BYTES = 4 << 20


@dataclass(frozen=True)
class Rest:
    """What a sandbox of one slot is when nothing runs in it."""

    processes: int
    own_descriptors: int
    slot_descriptors: int
    slot_bytes: int
    group_bytes: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def at_first(sandbox: LocalSandbox) -> tuple[Rest, object]:
    value = (await sandbox.execute(AFTER)).value
    return await at_rest(), value


async def at_rest() -> Rest:
    """Waits until the slot has forked its next child."""
    async with asyncio.timeout(90):
        while len(processes_of(os.getpid())) != 3:
            await asyncio.sleep(0.01)
    slot = processes_of(os.getpid())[1]
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{slot}/status").read_text().splitlines()
    )
    return Rest(
        processes=3,
        own_descriptors=descriptors(os.getpid()),
        slot_descriptors=descriptors(slot),
        slot_bytes=int(fields["RssAnon"].split()[0]) << 10,
        group_bytes=group_bytes(),
    )


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def group_bytes() -> int:
    """Returns the memory of all slots' groups, but for files that the kernel keeps while there is
    room; 0 on a host where slots have none."""
    total = 0
    for parent in {Groups.find().parents.get("memory")} - {None}:
        for folder in parent.glob(f"hone-slot-{os.getpid()}-*"):
            told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            total += int(told["anon"] if "anon" in told else told["rss"]) + int(told["shmem"])
    return total


async def leaves_nothing(sandbox: LocalSandbox, at_first: tuple[Rest, object]) -> None:
    before, value = at_first
    deadline = time.monotonic() + 5
    after = await sandbox.execute(AFTER)
    assert (after.verdict, after.value) == ("ok", value)
    rest = await at_rest()
    while (
        rest.slot_descriptors > before.slot_descriptors and time.monotonic() < deadline
    ):  # it may still be forking
        rest = await at_rest()
    assert rest.own_descriptors == before.own_descriptors
    assert rest.slot_descriptors <= before.slot_descriptors  # it may have been forking then
    assert rest.slot_bytes < before.slot_bytes + ALLOWED_GROWTH_BYTES
    assert rest.group_bytes < before.group_bytes + ALLOWED_GROWTH_BYTES


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_gets_its_verdict_and_leaves_nothing(
    sandbox: LocalSandbox, at_first: tuple[Rest, object], attack: Attack
) -> None:
    ended = await sandbox.execute(
        ExecuteRequest(code=attack.code, expression=attack.expression, **attack.limits)
    )
    assert ended.verdict in ((attack.ends,) if isinstance(attack.ends, str) else attack.ends), ended
    if ended.verdict == "ok" and attack.expression is not None and attack.value is not None:
        assert ended.value == attack.value, ended
        assert type(ended.value) is type(attack.value)
    if ended.verdict != "ok":
        assert ended.value is None
    assert max(len(ended.stdout), len(ended.stderr)) < 100_000
    await leaves_nothing(sandbox, at_first)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="system calls are given by their numbers on x86_64"
)
@pytest.mark.parametrize(
    ("attack", "call"),
    list(zip(KERNEL, sandbox_attacks.CALLS.values(), strict=True)),
    ids=list(sandbox_attacks.CALLS),
)
async def test_a_system_call_is_refused_and_leaves_nothing(
    sandbox: LocalSandbox, at_first: tuple[Rest, object], attack: Attack, call: tuple[int, ...]
) -> None:
    ended = await sandbox.execute(
        ExecuteRequest(code=attack.code, expression=attack.expression, inputs={"call": list(call)})
    )
    assert (ended.verdict, ended.value) == ("ok", True), ended
    await leaves_nothing(sandbox, at_first)


async def test_there_are_enough_of_them() -> None:
    names = [attack.name for attack in (*ATTACKS, *KERNEL)]
    assert len(set(names)) == len(names) >= 200
