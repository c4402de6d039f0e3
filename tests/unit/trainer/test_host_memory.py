"""Copies of weights and optimizer in host memory are what was copied, and lie where the ones before
lay. What is freed in large blocks goes back to the system, and for which micro-batches that is
asked for."""

from __future__ import annotations

import subprocess
import sys
from textwrap import indent
from typing import Any

import pytest
import torch

from services.trainer.zero import host_memory
from services.trainer.zero.memory import MemoryPlan, is_worth_giving_back
from shared.plan.memory import Ranks
from tests.support.engine_ranks import a_job, an_engine
from tests.support.plan_models import job as plan_job
from tests.support.plan_models import model as plan_model

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

def asked(measure, asks):  # in a process of its own, of which the imports are done
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


def printed(**cases: tuple[str, str]) -> dict[str, int]:
    """Returns what each program prints after its functions have been called."""
    program = HEAD + "".join(
        f"\ndef {name}():\n{indent(measure, '    ')}\nasked({name}, [{asks}])\n"
        for name, (measure, asks) in cases.items()
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(cases, map(int, done.stdout.split()), strict=True))


def test_large_freed_blocks_are_given_back_or_used_again() -> None:
    found = printed(
        usual=(ALLOCATE, ""),
        given_back=(ALLOCATE, "give_back_large_blocks"),
        kept_before=(ALLOCATE, "keep_freed_blocks, give_back_large_blocks"),
        usual_again=(ALLOCATE_ONE, ""),
        kept=(ALLOCATE_ONE, "keep_freed_blocks"),
        given_back_before=(ALLOCATE_ONE, "give_back_large_blocks, keep_freed_blocks"),
        after_lack=(
            ALLOCATE_ONE,
            "keep_freed_blocks, lambda: run_out() or not keep_freed_blocks()",
        ),
    )
    # What a process keeps of 64 MiB that it has freed, in blocks between which there are small ones
    assert found["usual"] >= 50 and found["given_back"] <= 5 and found["kept_before"] <= 5
    # The second block of 64 MiB has 16,384 pages, which the kernel zeroes where they are new.
    assert found["usual_again"] > 16_000 and found["after_lack"] > 16_000
    assert found["kept"] < 100 and found["given_back_before"] < 100


def test_large_micro_batches_are_given_back_where_memory_is_short() -> None:
    planned = MemoryPlan(plan_model("Qwen2.5-0.5B"), Ranks(1, 4, "cpu"))
    lora = plan_job(lora={"rank": 16})
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
        given = plan_job(memory={"gradient_checkpointing": recomputes}, **more)
        return is_worth_giving_back(pass_bytes, planned_gib * gib, room_gib * gib, given)

    assert given_back(251_904_000, 4, 19, True)
    assert not given_back(251_904_000, 4, 20, True), "2.5 x 4 are half of it"
    assert given_back(251_904_000, 4, 11, False)
    assert not given_back(251_904_000, 4, 12, False), "1.5 x 4 are half of it"
    assert given_back(251_904_000, 4, 19, False, lora={"rank": 16}), "activations, all but a little"
    assert not given_back(500 * 251_904, 4, 8, True)
    assert given_back(128 * 2**20, 4, 8, True)
    assert planned.pass_bytes(lora, 10) == 8 * 10 * 151_936 + 10 * (86_016 + 10_752)


# --- copies -------------------------------------------------------------------------------------


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(37, generator=generator),
        torch.randn(5, 9, generator=generator).to(torch.bfloat16),
        torch.tensor(7.0),
        torch.zeros(0),
        torch.randn(300, generator=generator, dtype=torch.float64),
    ]


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_a_copy_gives_back_what_was_copied_over_any_blocks(monkeypatch, block_bytes: int):
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", block_bytes)
    tensors = some_tensors()
    expected = [tensor.clone() for tensor in tensors]
    copies = host_memory.HostCopies(pinned=False)
    kept = [copies.copy(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for copy, tensor in zip(kept, tensors, strict=True):
        copy.restore(tensor)
    assert all(tensor.equal(was) for tensor, was in zip(tensors, expected, strict=True))
    # 148 + 90 + 4 + 0 + 2,400 bytes, each begun at a multiple of 16: 160 + 96 + 16 + 2,400
    assert copies.size_bytes == -(-2672 // block_bytes) * block_bytes


def test_the_next_copies_lie_where_the_ones_before_lay(monkeypatch):
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 256)
    copies = host_memory.HostCopies(pinned=False)
    places = []
    for _ in range(3):
        copies.begin()
        made = [copies.copy(tensor) for tensor in some_tensors()]
        places.append([piece.data_ptr() for copy in made for piece in copy.pieces])
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(places[0])


def places_of_three_steps(job, examples) -> list[list[int]]:
    """Where the blocks of an engine's copies lie after each of three training steps."""
    engine = an_engine(job)
    found = []
    for _ in range(3):
        engine.update(examples, 1e-3)
        blocks = engine._parts.updater.copies._blocks
        found.append([block.data_ptr() for block in blocks])
    engine.close()
    return found


@pytest.mark.engine
@pytest.mark.parametrize(("minibatches", "num_blocks"), [(2, 1), (1, 0)])
def test_a_step_of_several_allocates_nothing_that_the_one_before_had_not(
    rank, model, examples, minibatches: int, num_blocks: int
):
    job = a_job(model, training={"minibatches": minibatches}, memory={"zero_stage": 2})
    places = rank.call(places_of_three_steps, job, examples)
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == num_blocks
