"""GPUs for plans: how much memory each has, and how fast it is.

Memory is as CUDA reports it, which is less than the name says. Products per second are dense, from
NVIDIA's data sheets.

A CPU has the rates that a process of a second or two measures once:

    python -m shared.plan.gpus

prints the rates of one core and of the memory as JSON. One thread multiplies float32 matrices, and
the fastest of many products counts. Each takes a third of a millisecond, so some run undisturbed
even on a busy machine, where a product on all cores would measure the load and not the processor.
The rate of the machine is the rate of one core times the cores: an upper bound, because clocks are
lower with all cores at work.

NumPy has no bfloat16, so its rate is the float32 rate times `BFLOAT16_FACTORS`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shared.errors import BadRequest
from shared.explain import closest

GIVEN = re.compile(r"(?:(\d{1,4})\s*[xX]\s*)?([A-Za-z][\w.+-]*)")
EXPECTED = 'expected a count and a name, such as 1xA100-80GB, "1xH100,2xA10G" or cpu'
MAX_GPUS = 1024
CPU = "cpu"

MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, by versions 2 and 1 of cgroups."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: memory in GiB, matrix products in bfloat16 and float32 in 10^12 floating-point
    operations per second, memory bandwidth in GB/s, and whether it multiplies bfloat16 in hardware.
    A speed of 0 is unknown; `no_rates_because` is why a measurement failed."""

    name: str
    memory_gib: float
    bfloat16_tflops: float = 0.0
    float32_tflops: float = 0.0
    bandwidth_gb_s: float = 0.0
    has_bfloat16: bool = True
    no_rates_because: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        return "cpu" if self.is_cpu else "gpu"

    @property
    def max_sequences(self) -> int:
        """Returns how many sequences a sampler computes at once without the setting: vLLM's default
        for this GPU, and 256 on a CPU."""
        is_large = self.memory_gib >= 70 and "A100" not in self.name and not self.is_cpu
        return 1024 if is_large else 256

    @property
    def has_rates(self) -> bool:
        return self.bandwidth_gb_s > 0

    def tflops(self, itemsize: int) -> float:
        """Returns the 10^12 operations per second on elements of `itemsize` bytes; the float32 rate
        if none is known of shorter elements."""
        return (self.bfloat16_tflops if itemsize == 2 else 0.0) or self.float32_tflops


@dataclass(frozen=True)
class GpuGroup:
    """A number of GPUs of one kind."""

    count: int
    gpu: Gpu

    def __str__(self) -> str:
        return CPU if self.gpu.is_cpu else f"{self.count}x{self.gpu.name}"


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

NAMED_MEMORY = {
    **{"T4": 16, "L4": 24, "A10": 24, "A10G": 24, "L40S": 48, "H100": 80, "H200": 141},
    **{"B200": 180, "RTX-3090": 24, "RTX-4090": 24, "RTX-PRO-6000": 96},
}
"""The GB in names such as A10G-24GB, for GPUs that come in one size only."""


def parse_gpus(text: str, where: str = "--gpus") -> tuple[GpuGroup, ...]:
    """Returns the pools that "1xA100-80GB" or "1xA100-80GB,2xA10G" names: the first of two is the
    trainer's, the second the samplers'. "cpu" is this host without GPUs. Raises BadRequest with
    what was expected and the nearest name; `where` is the option or setting with the text."""
    given = f"{where} {text!r}"
    parts = [part.strip() for part in text.split(",")]
    if text.strip().lower() == CPU:
        return (GpuGroup(1, cpu()),)
    if not 1 <= len(parts) <= 2:
        raise BadRequest(
            f"{given} has {len(parts)} kinds; expected one, or two with the trainer's first"
        )
    return tuple(_pool(part, given) for part in parts)


def _pool(part: str, given: str) -> GpuGroup:
    found = GIVEN.fullmatch(part)
    if found is None:
        raise BadRequest(f"{given}: {part!r} is no GPU; {EXPECTED}")
    if found[2].lower() == CPU:
        raise BadRequest(
            f"{given}: {CPU!r} is this machine without GPUs; expected it alone, without a count"
        )
    count = int(found[1] or 1)
    if not 1 <= count <= MAX_GPUS:
        raise BadRequest(f"{given}: {count} GPUs; expected from 1 to {MAX_GPUS}")
    return GpuGroup(count, named_gpu(found[2], given))


def named_gpu(name: str, given: str) -> Gpu:
    """Returns the GPU called `name`, in upper or lower case, with or without its memory
    (A10G-24GB). Raises BadRequest."""
    known = TABLE | {f"{each}-{gb}GB": TABLE[each] for each, gb in NAMED_MEMORY.items()}
    for each, gpu in known.items():
        if each.lower() == name.lower():
            return gpu
    of_several = [each for each in TABLE if each.lower().startswith(f"{name.lower()}-")]
    if len(of_several) > 1:
        raise BadRequest(f"{given}: expected one of {', '.join(sorted(of_several))}")
    near = closest(name.upper(), [*known])
    hint = f"did you mean {near!r}?" if near else f"the known ones are {', '.join(sorted(TABLE))}"
    raise BadRequest(f"{given}: there is no GPU {name!r} in the table; {hint}")


def visible_gpus() -> tuple[GpuGroup, ...]:
    """Returns the GPUs of this machine that nvidia-smi lists: the CPU if none, the first kind if
    several. A GPU that is not in the table has its memory, and no speed."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return (GpuGroup(1, cpu()),)
    return pools_of(said.stdout)


def pools_of(listed: str) -> tuple[GpuGroup, ...]:
    """Returns the pool for lines of "name, MiB": as many GPUs as are like the first."""
    rows = [line.rpartition(",") for line in listed.splitlines() if line.strip()]
    found = [(name.strip(), mib.strip()) for name, _, mib in rows if mib.strip().isdecimal()]
    if not found:
        return (GpuGroup(1, cpu()),)
    name, mib = found[0]
    return (GpuGroup(sum(each == name for each, _ in found), _called(name, int(mib) / 1024)),)


def _called(name: str, memory_gib: float) -> Gpu:
    """Returns the GPU for NVIDIA's name ("NVIDIA A100-SXM4-80GB"): the longest name in the table
    with all its parts in NVIDIA's name, and similar memory."""
    words = set(re.split(r"[\s-]+", name.upper()))
    for key, gpu in sorted(TABLE.items(), key=lambda entry: -len(entry[0])):
        parts = {part for part in key.upper().split("-") if not part.endswith("GB")}
        if parts <= words and 0.9 < memory_gib / gpu.memory_gib < 1.1:
            return gpu
    return Gpu(re.sub(r"\s+", "-", name), memory_gib)


def cpu(memory_bytes: int | None = None, cpuinfo: Path = Path("/proc/cpuinfo")) -> Gpu:
    """Returns this host as if it were a GPU: its memory (default: `host_memory_bytes`), and whether
    it multiplies bfloat16."""
    size = host_memory_bytes() if memory_bytes is None else memory_bytes
    multiplies = re.search(r"\b(avx512_bf16|amx_tile)\b", _text(cpuinfo)) is not None
    return Gpu(CPU, size / (1 << 30), has_bfloat16=multiplies)


def host_memory_bytes(limits: tuple[Path, ...] = MEMORY_LIMITS) -> int:
    """Returns the memory of this host, or this container's limit if that is lower."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [_text(file).strip() for file in limits]
    return min([host, *(int(limit) for limit in found if limit.isdigit())])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


BFLOAT16_FACTORS = {"amx_bf16": 8.0, "avx512_bf16": 2.0, "avx512f": 0.4, "": 0.2}
"""Speed of products in bfloat16 to float32, by the first of these flags in /proc/cpuinfo.

amx_bf16: a tile product is 16 times AVX-512's float32 (Intel's optimization manual, chapter 20);
half of that is assumed. avx512_bf16: VDPBF16PS multiplies twice as many pairs; 2.1 measured by
torch 2.13 on an AMD Zen 4, one thread. Without either oneDNN converts to float32: measured on the
same machine with ONEDNN_MAX_CPU_ISA=AVX512_CORE (36 to 85 GFLOP/s) and =AVX2 (19 to 86)."""

SIZE = 256
"""Rows and columns of the matrices: 256 KiB each, which fit a core's cache. Enough for a core's
full rate, and few enough that a product is over before another process gets the core."""

PRODUCTS_S = 0.7
COPIES_S = 0.7
COPIED_BYTES, SLICE_BYTES = 16 << 20, 2 << 20
"""Of each thread, which copies slice by slice: source and copy together are more than its share of
a processor's caches."""

MAX_THREADS = 16

LIMIT_S = 20.0
"""Limit of the measurement, for a machine that is too busy for it."""

RETRY_S = 600.0
"""Seconds after a failed measurement without another one. Plans wait for a measurement, and what
failed, such as a missing NumPy, will probably fail again."""

SHOWN_CHARS = 200

CPUINFO = Path("/proc/cpuinfo")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class CoreRates:
    """Of one core: 10^12 float32 operations per second in a matrix product. Of all: GB/s that are
    read and written in a copy."""

    float32_tflops: float
    bandwidth_gb_s: float


def _reason(error: Exception) -> str:
    """Returns why the measurement failed, and the next action."""
    measured = "or plan with --measured RUN"
    if isinstance(error, subprocess.TimeoutExpired):
        return (
            f"it took longer than {error.timeout:.0f} s. Plan again in {RETRY_S / 60:.0f} minutes, "
            f"when the machine has less to do, {measured}"
        )
    stderr = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    said = (str(stderr or "").strip() or str(error)).splitlines()[-1]
    if "No module named 'numpy'" in said:
        return f"NumPy is missing. Install NumPy, {measured}"
    why = said[:SHOWN_CHARS].rstrip(".")
    return f"{why}. Run `python -m shared.plan.gpus` to see it fail, {measured}"


def with_rates(
    gpu: Gpu, found: CoreRates, num_cores: int | None = None, flags: str | None = None
) -> Gpu:
    """Returns the CPU with a machine's rates: by default of this machine's cores and
    flags."""
    float32 = found.float32_tflops * (num_cores or count_cores())
    known = set((_text(CPUINFO) if flags is None else flags).split())
    factor = next(value for flag, value in BFLOAT16_FACTORS.items() if not flag or flag in known)
    return replace(
        gpu,
        float32_tflops=float32,
        bfloat16_tflops=factor * float32,
        bandwidth_gb_s=found.bandwidth_gb_s,
    )


def count_cores(cpuinfo: Path = CPUINFO, quota: Path = QUOTA) -> float:
    """Returns how many physical cores this process may use, as torch counts them: hyperthreads of a
    core are one, and a container has its quota."""
    usable = os.sched_getaffinity(0)
    cores = set[tuple[str, str]]()
    for block in _text(cpuinfo).split("\n\n"):
        values = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", block, re.MULTILINE))
        number = values.get("processor", "")
        if number.isdecimal() and int(number) in usable:
            cores.add((values.get("physical id", ""), values.get("core id", number)))
    most = re.match(r"(\d+) (\d+)", _text(quota))
    allowed = int(most[1]) / int(most[2]) if most else math.inf
    return min(len(cores) or len(usable), allowed)


def measure_in_process() -> CoreRates:
    """Returns the rates that a process of its own measures: NumPy's number of threads is fixed when
    it is imported. Raises subprocess.SubprocessError if it fails, as without NumPy."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-m", "shared.plan.gpus"],
        env=os.environ | threads,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return CoreRates(**json.loads(done.stdout))


class CpuRates:
    """Measures this machine, one measurement at a time, and remembers the result; a failure for
    `RETRY_S`."""

    def __init__(self, measure: Callable[[], CoreRates] = measure_in_process) -> None:
        self._measure = measure
        self._lock = threading.Lock()
        self._found: CoreRates | str = ""  # or why it failed
        self._failed_at = -math.inf

    def pools(self, pools: tuple[GpuGroup, ...]) -> tuple[GpuGroup, ...]:
        """Returns the pools, a CPU with the rates of this machine; without rates, but with the
        reason, if they cannot be measured. Blocks for as long as the measurement takes."""
        gpu = pools[0].gpu
        if not gpu.is_cpu:
            return pools
        with self._lock:
            if isinstance(self._found, str) and time.monotonic() >= self._failed_at + RETRY_S:
                try:
                    self._found = self._measure()
                except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
                    self._failed_at, self._found = time.monotonic(), _reason(error)
            found = self._found
        if isinstance(found, str):
            return (replace(pools[0], gpu=replace(gpu, no_rates_because=found)),)
        return (replace(pools[0], gpu=with_rates(gpu, found)),)


def measure() -> CoreRates:
    """Returns the rates as this process finds them, which must have one thread for NumPy."""
    import numpy as np

    a, out = np.ones((SIZE, SIZE), np.float32), np.empty((SIZE, SIZE), np.float32)
    product_s = min(_seconds(lambda: np.matmul(a, a, out=out), PRODUCTS_S))
    num = max(1, min(math.ceil(count_cores()), MAX_THREADS))

    def copied_per_s(_: int) -> float:
        source = np.ones((COPIED_BYTES // SLICE_BYTES, SLICE_BYTES), np.uint8)
        copy, rows = np.zeros_like(source), itertools.cycle(range(len(source)))

        def copy_slice() -> None:
            row = next(rows)
            np.copyto(copy[row], source[row])

        # The fastest slice was in a cache; the median is rarely interrupted, being so short.
        return 2 * SLICE_BYTES / statistics.median(_seconds(copy_slice, COPIES_S))

    with ThreadPoolExecutor(num) as pool:
        bandwidth = sum(pool.map(copied_per_s, range(num)))
    return CoreRates(2 * SIZE**3 / product_s / 1e12, bandwidth / 1e9)


def _seconds(work: Callable[[], object], limit_s: float) -> list[float]:
    """Returns the seconds of each run of the work, repeated for `limit_s`."""
    end, found = time.perf_counter() + limit_s, list[float]()
    while len(found) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(vars(measure())))
