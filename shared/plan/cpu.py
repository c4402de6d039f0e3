"""This machine's processor for plans: its rates, measured once by a process of a second or two.

    python -m shared.plan.cpu

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

from shared.plan.gpus import Gpu, GpuGroup

BFLOAT16_FACTORS = {"amx_bf16": 8.0, "avx512_bf16": 2.0, "avx512f": 0.4, "": 0.2}
"""Products of bfloat16 to those of float32, by the first of these flags in /proc/cpuinfo.

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
    return f"{why}. Run `python -m shared.plan.cpu` to see it fail, {measured}"


def with_rates(
    gpu: Gpu, found: CoreRates, num_cores: int | None = None, flags: str | None = None
) -> Gpu:
    """Returns the CPU with a machine's rates: those of this machine's cores and flags, unless
    given."""
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
        [sys.executable, "-m", "shared.plan.cpu"],
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
        self._found: CoreRates | None = None
        self._failed_at = -math.inf
        self._failure = ""

    def pools(self, pools: tuple[GpuGroup, ...]) -> tuple[GpuGroup, ...]:
        """Returns the pools, a CPU with the rates of this machine; without rates, but with the
        reason, if they cannot be measured. Blocks for as long as the measurement takes."""
        if not pools[0].gpu.is_cpu:
            return pools
        with self._lock:
            if self._found is None and time.monotonic() >= self._failed_at + RETRY_S:
                try:
                    self._found = self._measure()
                except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
                    self._failed_at, self._failure = time.monotonic(), _reason(error)
            found, failure = self._found, self._failure
        return tuple(
            replace(
                pool,
                gpu=with_rates(pool.gpu, found)
                if found
                else replace(pool.gpu, no_rates_because=failure),
            )
            for pool in pools
        )


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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(vars(measure())))
