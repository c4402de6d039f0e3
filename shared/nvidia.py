"""NVIDIA's cards and their driver, as the kernel shows them: no process, no library."""

from __future__ import annotations

import re
from pathlib import Path

LEAST_DRIVER = 580
"""What the wheels of CUDA 13 want: requirements/cuda.txt."""

DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")


def num_cards(devices: Path = DEVICES) -> int:
    """Returns how many cards this process may open."""
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def driver(file: Path = DRIVER) -> str | None:
    """Returns the driver's version, such as "580.95.05"; None: there is no driver."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", file.read_text())
    except OSError:
        return None
    return found and found[1]


def is_too_old(version: str) -> bool:
    return int(version.partition(".")[0]) < LEAST_DRIVER
