"""The wheel has what the repository has: a stack that runs from it misses no file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hone", "shared", "services", "deploy")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools would leave a folder in the repository, of which later wheels
    would take files that are no longer there."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in (*BESIDE, *files()):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, cwd=source)
    (path,) = out.iterdir()
    return zipfile.ZipFile(path)


def files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [file for file in listed.stdout.split() if (ROOT / file).is_file()]


def test_every_file_of_the_packages_is_in_the_wheel_and_no_other(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == set(files())
    assert {"hone/py.typed", "shared/py.typed", "deploy/jobs/demo.toml"} <= packed


def test_the_client_needs_no_server_and_no_engine(wheel: zipfile.ZipFile) -> None:
    (path,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    lines = wheel.read(path).decode().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Version: {project['version']}" in lines
    needed = {line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line}
    assert {line.split()[1].partition("<")[0].partition(">")[0] for line in needed} == {
        *("httpx2", "msgpack", "pydantic", "pyyaml", "rich", "structlog", "tomli-w", "typer"),
        "xxhash",
    }
