"""GPUs for plans: how much memory each has, and how fast it is.

Memory is as CUDA reports it, which is less than the name says. Products per second are dense, from
NVIDIA's data sheets. A CPU has the rates that `cpu.py` measures.

The price of an hour is from a table in a file that users edit, or from the settings. The file is
TOML, a table for each provider: `currency`, `date` and `source` of the prices, and the price of an
hour by the name of the GPU. `prices.toml` beside this module is used unless HONE_PRICES names
another.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.errors import BadRequest
from shared.explain import closest, nearest
from shared.settings import Settings

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
    known = {each.lower(): gpu for each, gpu in TABLE.items()}
    known |= {f"{each}-{gb}GB".lower(): TABLE[each] for each, gb in NAMED_MEMORY.items()}
    if found := known.get(name.lower()):
        return found
    of_several = [each for each in TABLE if each.lower().startswith(f"{name.lower()}-")]
    if len(of_several) > 1:
        raise BadRequest(f"{given}: expected one of {', '.join(sorted(of_several))}")
    near = closest(name.upper(), [*TABLE, *(f"{each}-{gb}GB" for each, gb in NAMED_MEMORY.items())])
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


OWN = Path(__file__).with_name("prices.toml")
HEADS = ("currency", "date", "source")


@dataclass(frozen=True)
class Price:
    """The price of an hour of everything in `currency`, and its source as part of a sentence."""

    per_hour: float
    currency: str
    source: str


@dataclass(frozen=True)
class PriceList:
    """One provider's prices of an hour, by GPU."""

    provider: str
    currency: str
    date: datetime.date
    source: str
    per_hour: dict[str, float]

    def of(self, pools: tuple[GpuGroup, ...]) -> Price | None:
        """Returns the price of an hour of these GPUs; None if one of them has no price."""
        if any(pool.gpu.name not in self.per_hour for pool in pools):
            return None
        total = sum(pool.count * self.per_hour[pool.gpu.name] for pool in pools)
        where = f"prices of {self.provider} on {self.date.isoformat()} ({self.source})"
        return Price(round(total, 4), self.currency, where)


def price_per_hour(settings: Settings, pools: tuple[GpuGroup, ...]) -> Price | None:
    """Returns the price of an hour of `pools`: HONE_PRICE_PER_HOUR if it is set, else the sum of
    the table's prices; None if a GPU is not in the table. Raises BadRequest for a table that cannot
    be read."""
    if settings.price_per_hour is not None:
        return Price(settings.price_per_hour, settings.currency, "HONE_PRICE_PER_HOUR")
    return read_prices(settings).of(pools)


def price_of_jobs(settings: Settings) -> Price | None:
    """Returns the price of an hour of a running job by the settings alone: HONE_PRICE_PER_HOUR, or
    the table's prices of HONE_GPUS. None if neither is set."""
    if settings.price_per_hour is None and settings.gpus is None:
        return None
    pools = parse_gpus(settings.gpus, "HONE_GPUS") if settings.gpus else ()
    return price_per_hour(settings, pools)


def read_prices(settings: Settings) -> PriceList:
    """Returns the prices of HONE_PROVIDER in HONE_PRICES. Raises BadRequest with what is wrong and
    where."""
    path = settings.prices or OWN
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"HONE_PRICES {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"HONE_PRICES {str(path)!r} is not valid TOML: {error}") from error
    table = tables.get(settings.provider)
    if not isinstance(table, dict):
        hint = nearest(settings.provider, list(tables), "the providers there")
        raise BadRequest(f"{path} has no table [{settings.provider}] (HONE_PROVIDER); {hint}")
    return _price_list(settings.provider, cast(dict[str, Any], table), path)


def _price_list(provider: str, table: dict[str, Any], path: Path) -> PriceList:
    where = f"{path}: [{provider}]"
    currency, date, source = (table.get(head) for head in HEADS)
    if not isinstance(currency, str) or not isinstance(source, str):
        raise BadRequest(f'{where} needs currency = "..." and source = "..."; got {table!r:.200}')
    if not isinstance(date, datetime.date):
        raise BadRequest(f"{where} needs date = YYYY-MM-DD, the day of its prices; got {date!r}")
    prices: dict[str, float] = {}
    for name, price in table.items():
        if name in HEADS:
            continue
        if name not in TABLE:
            hint = nearest(name, list(TABLE), "the GPUs")
            raise BadRequest(f"{where} has a price of {name!r}, which is no GPU known here; {hint}")
        if isinstance(price, bool) or not isinstance(price, int | float) or price < 0:
            raise BadRequest(f"{where} {name} is {price!r}; expected a price per hour, 0 or more")
        prices[name] = float(price)
    return PriceList(provider, currency, date, source, prices)
