"""NVIDIA's cards and their driver, as the kernel shows them, and the rule: the CPU computes only
where no card is seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.errors import Failed

LEAST_DRIVER = 580
"""The oldest driver for the wheels of CUDA 13 in requirements/cuda.txt."""

DEVICES, DRIVER = Path("/dev"), Path("/proc/driver/nvidia/version")

VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES with which CUDA sees no card."""

PROBE = (sys.executable, "-c", "import torch; torch.cuda.init()")
PROBE_S = 180.0
"""Deadline of the probe, in seconds: its import of torch may read gigabytes from a cold disk. A
driver that hangs takes longer."""


def num_cards(devices: Path = DEVICES) -> int:
    """Returns how many cards this process may open."""
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def num_seen() -> int:
    """Returns how many cards a process started now can use: none where CUDA_VISIBLE_DEVICES hides
    them."""
    return 0 if os.environ.get(VISIBLE) in HIDDEN else num_cards()


def hide_from_cpu_build() -> int:
    """Makes this process and its children compute on the CPU if torch is the CPU build, as `make
    setup` installs it. Returns how many cards stay unused."""
    try:
        is_cpu_build = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        is_cpu_build = False
    if not is_cpu_build:
        return 0
    num = num_seen()
    os.environ[VISIBLE] = "-1"
    return num


def driver(file: Path = DRIVER) -> str | None:
    """Returns the driver's version, such as "580.95.05"; None without a driver."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", file.read_text())
    except OSError:
        return None
    return found and found[1]


def is_too_old(number: str) -> bool:
    return int(number.partition(".")[0]) < LEAST_DRIVER


def compilers() -> dict[str, str]:
    """Returns the environment variables that locate the compilers from wheels, which build kernels
    at run time: ninja, and the CUDA compiler unless one is named or the wheels' cannot link
    (requirements/link_cuda.sh)."""
    found = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}
    cuda = Path(sysconfig.get_path("purelib"), "nvidia/cu13")
    is_whole = (cuda / "bin/nvcc").exists() and (cuda / "lib64").exists()
    if is_whole and not {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys():
        found["CUDA_HOME"] = str(cuda)
    return found


def why_unusable() -> str | None:
    """Returns torch's reason why it cannot compute on the cards; None if it can. A separate process
    asks, so that no GPU memory stays taken."""
    try:
        probe = subprocess.run(PROBE, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return f"CUDA did not start within {PROBE_S:g} s"
    said = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
    return said[-1] if probe.returncode else None


def refusal(num: int, reason: str) -> Failed:
    return Failed(
        f"there are {num} GPU(s) and torch cannot compute on them: {reason} (driver "
        f"{driver() or 'unknown'}; CUDA 13 needs {LEAST_DRIVER} or newer, and `make cuda` installs "
        f"the packages that have CUDA). To compute on the CPU all the same, set {VISIBLE} to -1"
    )


def check() -> None:
    """Raises Failed if there are cards on which torch cannot compute. Without this error the CPU
    would silently do their work."""
    if (num := num_seen()) and (reason := why_unusable()):
        raise refusal(num, reason)
