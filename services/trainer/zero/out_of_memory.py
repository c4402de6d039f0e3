"""Running out of memory, in words: what was tried, what there is, and which setting to turn, from
what to what."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from shared.job import MemorySpec

GIB = 1 << 30
MESSAGE = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Unable to mmap|Cannot allocate memory",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for a tensor. A collective that failed for memory is another
    matter: peers wait in it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and MESSAGE.search(str(error)) is not None
        and "NCCL" not in str(error)
    )


def usage(device: torch.device) -> str:
    """Returns how much memory is used and free, in words."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device)
        return (
            f"of {gib(total)} on {device}, {gib(free)} are free; this rank's tensors take "
            f"{gib(own)}"
        )
    host = _kib_of(Path("/proc/meminfo"), "MemTotal", "MemAvailable")
    process = _kib_of(Path("/proc/self/status"), "VmRSS")
    return (
        f"of {gib(host['MemTotal'])} of this host, {gib(host['MemAvailable'])} are free; this rank "
        f"takes {gib(process['VmRSS'])}"
    )


def half_budget(shape: tuple[int, int] | None) -> int | None:
    """Returns half the tokens of a micro-batch that did not fit, as the most for those to come;
    None for a single sequence, which cannot be divided. `shape`: its sequences and its tokens."""
    if shape is None or shape[0] == 1:
        return None
    return max(1, shape[1] // 2)


def knobs(memory: MemorySpec, num_ranks: int, shape: tuple[int, int] | None, *, lora: bool) -> str:
    """Returns the settings that would save memory, those that cost least first. `shape`: sequences
    and tokens, padding included, of the micro-batch that did not fit, if it was one."""
    turns: list[str] = []
    half = half_budget(shape)
    if half:
        turns.append(f"memory.micro_batch_tokens from {memory.micro_batch_tokens} to {half}")
    if memory.chunk_tokens > 1:
        turns.append(
            f"memory.chunk_tokens from {memory.chunk_tokens} to {memory.chunk_tokens // 2}"
        )
    if not memory.gradient_checkpointing:
        turns.append("memory.gradient_checkpointing from false to true")
    if num_ranks > 1 and memory.zero_stage < 3:
        turns.append(
            f"memory.zero_stage from {memory.zero_stage} to {max(2, memory.zero_stage + 1)}"
        )
    if not memory.offload_optimizer:
        turns.append(
            "memory.offload_optimizer from false to true"
            + ("" if memory.zero_stage else " (with memory.zero_stage 2)")
        )
    if not lora:
        turns.append("[lora], which trains adapters only")
    if shape and not half:
        turns.append(
            f"sampling.max_tokens: a micro-batch was one sequence of {shape[1]} tokens already"
        )
    return "; ".join(turns)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def first_line(error: BaseException) -> str:
    """Returns what the allocator said, without its advice."""
    lines = str(error).splitlines()
    return (
        f"{type(error).__name__}: {lines[0].split('. See documentation')[0]}"
        if lines
        else type(error).__name__
    )


def _kib_of(file: Path, *names: str) -> dict[str, int]:
    """Returns the named values of a file of "Name:  123 kB" lines, in bytes; 0 for those that it
    lacks."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(), re.MULTILINE))
    return {name: int(found.get(name, 0)) * 1024 for name in names}
