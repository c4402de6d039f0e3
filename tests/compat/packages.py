"""Python environments for packages whose pins conflict with the stack's, in `.compat`. Each is
made once, from its file in `requirements/compat`, without what its `.excluded.txt` names."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_with(name: str, *, torch: bool = False) -> Path:
    """Returns the interpreter of the environment with the packages of `NAME.txt`; `torch`: with the
    stack's build of torch, a CPU's as a rule, in place of PyPI's."""
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
        if (excluded := pins.with_suffix(".excluded.txt")).exists():
            install += ["--excludes", str(excluded)]
        if torch:
            _install_torch(uv, python)
        subprocess.run(install, check=True)
        made.write_text(pins.read_text())
    return python


def _install_torch(uv: str, python: Path) -> None:
    """Installs the stack's build of torch: from where pip found it, or from PyTorch's own index."""
    wanted = f"torch=={importlib.metadata.version('torch')}"
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), wanted]
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    given = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    if subprocess.run(install, env=given, capture_output=True).returncode:
        index = "https://download.pytorch.org/whl/cpu"
        subprocess.run([*install, "--index-url", index], env=given, check=True)
