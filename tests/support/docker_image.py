"""Images of this machine's own Python and a few of its programs, made without a registry, for tests
on a real Docker daemon."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("sh", "cat", "chmod", "env", "grep", "mkdir", "rm", "sleep", "tail", "timeout")
WHEELS_NEED = {
    *("libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libnss_dns.so.2"),
    *("libnss_files.so.2", "libpthread.so.0", "libresolv.so.2", "librt.so.1", "libstdc++.so.6"),
    *("libutil.so.1", "libz.so.1"),
}
"""Libraries that every Linux has, of which wheels bring no copy."""

LEFT_OUT = {"__pycache__", "test", "tests", "idlelib", "ensurepip", "site-packages", "lib2to3"}


def skip_without_docker() -> None:
    """Skips the test on a machine without a Docker daemon, and says why."""
    if shutil.which("docker") is None:
        pytest.skip("there is no `docker` here")
    found = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no Docker daemon answers: {found.stderr.strip().splitlines()[-1]}")


def base_image(folder: Path) -> str:
    """Returns the name of an image with Python and PROGRAMS, which is made once."""
    name = f"hone-test-base:{sys.version_info.major}.{sys.version_info.minor}"
    if not is_there(name):
        _write(folder / "base.tar")
        path = f"{sys.base_prefix}/bin:/usr/bin:/bin"
        command = ["docker", "import", "--change", f"ENV PATH={path}", str(folder / "base.tar")]
        subprocess.run([*command, name], check=True, capture_output=True)
        (folder / "base.tar").unlink()
    return name


def is_there(image: str) -> bool:
    return not subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode


def build(name: str, folder: Path) -> str:
    """Builds the image of the folder's Dockerfile, and returns `name`."""
    done = subprocess.run(
        ["docker", "build", "--tag", name, str(folder)],
        env=os.environ | {"DOCKER_BUILDKIT": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return name


def _write(path: Path) -> None:
    """Writes the tar file of the image: each name with the content that it has here."""
    files = {Path(found) for program in PROGRAMS if (found := shutil.which(program))}
    files |= set(_python(Path(sys.base_prefix)))
    names = {str(file).lstrip("/"): file for file in files | _libraries(files)}
    names["bin/sh"] = Path(str(shutil.which("sh")))
    with tarfile.open(path, "w") as archive:
        for folder in ("tmp", "etc", "proc", "sys", "dev", "root"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for name, file in sorted(names.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = file.stat().st_size, file.stat().st_mode & 0o777
            with file.open("rb") as content:
                archive.addfile(entry, content)


def _python(prefix: Path) -> Iterator[Path]:
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    yield from (prefix / "bin" / name for name in ("python3", minor))
    yield from (prefix / "lib").glob("libpython*.so*")
    for file in (prefix / "lib" / minor).rglob("*"):
        if file.is_file() and not LEFT_OUT & {*file.parts}:
            yield file


def _libraries(files: set[Path]) -> set[Path]:
    """Returns the shared libraries that programs and libraries need, and those of WHEELS_NEED."""
    binaries = [str(file) for file in files if file.suffix == ".so" or "/bin/" in str(file)]
    told = subprocess.run(["ldd", *binaries], capture_output=True, text=True).stdout
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    told += "".join(line for line in known.splitlines(True) if line.split()[0] in WHEELS_NEED)
    return {Path(found) for found in re.findall(r"(?:=> |^\t)(/\S+)", told, re.MULTILINE)}
