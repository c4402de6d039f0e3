"""What is freed in large blocks goes back to the system, and for which micro-batches that is asked
for."""

from __future__ import annotations

import subprocess
import sys
from textwrap import indent
from typing import Any

import pytest

from services.trainer.zero.memory import MemoryPlan, is_worth_giving_back
from shared.plan.memory import Ranks
from tests.support.plan_models import job, model

HEAD = """
import ctypes
import os
import resource
from pathlib import Path
from services.trainer.zero.host_memory import (
    give_back_large_blocks, keep_freed_blocks, run_out
)

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256

def blocks(count):
    found = [(libc.malloc(4 << 20), libc.malloc(200_000)) for _ in range(count)]
    for block, _ in found:
        libc.memset(block, 1, 4 << 20)
    return found

def asked(asks):  # in a process of its own, of which the imports are done
    if os.fork():
        return os.wait()
    for ask in asks:
        assert ask()
    measure()
    os._exit(0)
"""

ALLOCATE = """
for block, _ in blocks(1):  # from the first that is freed on, glibc has them in its heap
    libc.free(block)
before = resident_mib()
for block, _ in blocks(16):
    libc.free(block)
print(resident_mib() - before, flush=True)
"""

ALLOCATE_ONE = """
for _ in range(2):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, flush=True)
"""


def printed(program: str, *cases: str) -> list[int]:
    """Returns what the program prints after each case's functions have been called."""
    measure = f"def measure():\n{indent(program, '    ')}"
    calls = "".join(f"asked([{case}])\n" for case in cases)
    command = [sys.executable, "-c", f"{HEAD}\n{measure}\n{calls}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_large_blocks_that_are_freed_are_not_kept() -> None:
    # What a process keeps of 64 MiB that it has freed, in blocks between which there are small ones
    cases = ("", "give_back_large_blocks", "keep_freed_blocks, give_back_large_blocks")
    usual, given_back, kept_before = printed(ALLOCATE, *cases)
    assert usual >= 50 and given_back <= 5 and kept_before <= 5


def test_freed_blocks_of_any_size_are_used_again() -> None:
    # The second block of 64 MiB has 16,384 pages, which the kernel zeroes where they are new.
    usual, kept, given_back_before, after_lack = printed(
        ALLOCATE_ONE,
        "",
        "keep_freed_blocks",
        "give_back_large_blocks, keep_freed_blocks",
        "keep_freed_blocks, lambda: run_out() or not keep_freed_blocks()",
    )
    assert usual > 16_000 and after_lack > 16_000
    assert kept < 100 and given_back_before < 100


def test_large_micro_batches_are_given_back_where_memory_is_short() -> None:
    planned = MemoryPlan(model("Qwen2.5-0.5B"), Ranks(1, 4, "cpu"))
    lora = job(lora={"rank": 16})
    # a = 4 (4 x 4864 + 2 x 14 x 64 + 2 x 2 x 64 + 4 x 896) + 8 x 896 = 107,520; with 4 x 896 x 24
    # and 12 x 4864 a token takes 251,904 bytes in a layer. In the head it takes 4 x 896 x 24 and
    # 12 x 896 and, of few tokens, 8 for each of 151,936 logits
    assert planned.pass_bytes(lora, 1000) == 251_904_000
    assert planned.pass_bytes(lora, 500) == 500 * 251_904
    more = planned.peak_bytes(lora, 2000) - planned.peak_bytes(lora, 1000)
    assert more == pytest.approx(251_904_000, abs=2**21), "of the tokens that there are"
    gib = 2**30

    def given_back(
        pass_bytes: int, planned_gib: float, room_gib: float, recomputes: bool, **more: Any
    ) -> bool:
        given = job(memory={"gradient_checkpointing": recomputes}, **more)
        return is_worth_giving_back(pass_bytes, planned_gib * gib, room_gib * gib, given)

    assert given_back(251_904_000, 4, 19, True)
    assert not given_back(251_904_000, 4, 20, True), "2.5 x 4 are half of it"
    assert given_back(251_904_000, 4, 11, False)
    assert not given_back(251_904_000, 4, 12, False), "1.5 x 4 are half of it"
    assert given_back(251_904_000, 4, 19, False, lora={"rank": 16}), "activations, all but a little"
    assert not given_back(500 * 251_904, 4, 8, True)
    assert given_back(128 * 2**20, 4, 8, True)
    assert planned.pass_bytes(lora, 10) == 8 * 10 * 151_936 + 10 * (86_016 + 10_752)
