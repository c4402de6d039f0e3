"""GPUs for plans: how much memory each has, and how fast it is; and the memory of a host without.

Memory is as CUDA reports it, which is less than the name says. Products per second are dense, from
NVIDIA's data sheets.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shared.errors import BadRequest
from shared.explain import nearest

GIVEN = re.compile(r"(?:([1-9]\d{0,3})\s*[xX]\s*)?([A-Za-z][\w.+-]*)")
CPU = "cpu"

MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, by versions 2 and 1 of cgroups."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: memory in GiB, matrix products in bfloat16 and float32 in 10^12 floating-point
    operations per second, memory bandwidth in GB/s, and whether it multiplies bfloat16 in hardware.
    A speed of 0 is unknown. `count`: how many there are."""

    name: str
    memory_gib: float
    bfloat16_tflops: float = 0.0
    float32_tflops: float = 0.0
    bandwidth_gb_s: float = 0.0
    has_bfloat16: bool = True
    count: int = 1
    device: Literal["gpu", "cpu"] = "gpu"

    def __str__(self) -> str:
        return CPU if self.device == CPU else f"{self.count}x{self.name}"

    @property
    def max_sequences(self) -> int:
        """Returns how many sequences a sampler computes at once without the setting: vLLM's default
        for this GPU, and 256 on a CPU."""
        is_large = self.memory_gib >= 70 and "A100" not in self.name and self.device == "gpu"
        return 1024 if is_large else 256

    def tflops(self, itemsize: int) -> float:
        """Returns the 10^12 operations per second on elements of `itemsize` bytes; the float32 rate
        if none is known of shorter elements."""
        return (self.bfloat16_tflops if itemsize == 2 else 0.0) or self.float32_tflops


TABLE = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 14.6, 0, 8.1, 300, has_bfloat16=False),
        Gpu("L4", 22.0, 121, 30.3, 300),
        Gpu("A10", 22.0, 125, 31.2, 600),
        Gpu("A10G", 22.0, 70, 31.5, 600),
        Gpu("L40S", 44.4, 362, 91.6, 864),
        Gpu("A100-40GB", 39.4, 312, 19.5, 1555),
        Gpu("A100-80GB", 79.1, 312, 19.5, 2039),
        Gpu("H100", 79.1, 989, 67, 3350),
        Gpu("H200", 139.8, 989, 67, 4800),
        Gpu("B200", 178.3, 2250, 75, 8000),
        Gpu("RTX-3090", 23.5, 71, 35.6, 936),
        Gpu("RTX-4090", 23.5, 165, 82.6, 1008),
        Gpu("RTX-PRO-6000", 94.9, 503, 125, 1792),
    )
}
"""The GPUs that `--gpus` names."""


def parse_gpus(text: str, where: str = "--gpus") -> Gpu:
    """Returns the GPUs that "1xA100-80GB" names, in upper or lower case; "cpu" is this host without
    GPUs. Raises BadRequest with what was expected and the nearest name; `where` is the option or
    setting with the text."""
    if text.strip().lower() == CPU:
        return cpu()
    found = GIVEN.fullmatch(text.strip())
    count, name = (found[1] or 1, found[2].upper()) if found else (1, text)
    gpu = TABLE.get(name) or TABLE.get(re.sub(r"-\d+GB$", "", name))  # A10G-24GB is an A10G
    if gpu is None:
        hint = nearest(name, [each for each in TABLE if name in each] or [*TABLE], "the GPUs")
        expected = "expected a count and a name, such as 8xA100-80GB, or cpu"
        raise BadRequest(f"{where} is {text!r}; {expected}; {hint}")
    return replace(gpu, count=int(count))


def visible_gpus() -> Gpu:
    """Returns the GPUs of this machine that nvidia-smi lists; the CPU if none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return cpu()
    return gpus_of(listed.stdout)


def gpus_of(listed: str) -> Gpu:
    """Returns the GPUs for lines of "name, MiB": as many as are like the first. A GPU that is not
    in the table has its memory, and no speed."""
    rows = re.findall(r"^(.+), *(\d+)$", listed, re.MULTILINE)
    if not rows:
        return cpu()
    name, memory_gib = rows[0][0], int(rows[0][1]) / 1024
    words = set(re.split(r"[\s-]+", name.upper()))  # of "NVIDIA A100-SXM4-80GB"
    known = [
        gpu
        for gpu in TABLE.values()
        if {part for part in gpu.name.split("-") if not part.endswith("GB")} <= words
        and 0.9 < memory_gib / gpu.memory_gib < 1.1
    ]
    gpu = known[0] if known else Gpu(re.sub(r"\s+", "-", name), memory_gib)
    return replace(gpu, count=sum(each == name for each, _ in rows))


def cpu(memory_bytes: int | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> Gpu:
    """Returns this host as if it were a GPU of unknown speed: its memory (default:
    `host_memory_bytes`), and whether it multiplies bfloat16."""
    size = host_memory_bytes() if memory_bytes is None else memory_bytes
    flags = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    multiplies = re.search(r"\b(avx512_bf16|amx_tile)\b", flags) is not None
    return Gpu(CPU, size / (1 << 30), has_bfloat16=multiplies, device=CPU)


def host_memory_bytes(limits: tuple[Path, ...] = MEMORY_LIMITS) -> int:
    """Returns the memory of this host, or this container's limit if that is lower."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [file.read_text(encoding="utf-8").strip() for file in limits if file.is_file()]
    return min([host, *(int(limit) for limit in found if limit.isdigit())])
