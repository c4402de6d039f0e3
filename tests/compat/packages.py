"""Python environments for packages whose pins conflict with the stack's, in `.compat`. Each is
made once, from its file in `requirements/compat`."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_with(name: str, *, alone: bool = False) -> Path:
    """Returns the interpreter of the environment with the packages of `NAME.txt`; `alone`: without
    what they depend on."""
    folder = ROOT / ".compat" / name
    python, made = folder / "bin" / "python", folder / "made_of"
    pins = ROOT / "requirements" / "compat" / f"{name}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists() and made.read_text() == pins.read_text():
            return python
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "--quiet", "--clear", str(folder)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(pins)]
        subprocess.run([*install, *(["--no-deps"] if alone else [])], check=True)
        made.write_text(pins.read_text())
    return python
