"""The trainer on other releases of torch, the sampler on another vLLM than the pinned one, and the
optional packages of problems and trackers, each in an environment of its own.

vLLM's newest release for CPUs is the pinned one. Later releases are tried as their Python code over
the compiled code of the pinned one, which is what can be known of them without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hone.stack import installed
from tests.compat.packages import ROOT, python_of_stack, vllm_over_pinned

pytestmark = [pytest.mark.compat, pytest.mark.engine, pytest.mark.timeout(3600)]

RanOn = Callable[[str, Mapping[str, str]], None]

PINNED = "pinned"
TORCH = ("2.11.0", "2.15.0")
VLLM = ("0.33.0",)

TRAINER = (
    "tests/unit/trainer/test_forest.py",
    "tests/unit/trainer/test_loss.py",
    "tests/unit/trainer/test_engine.py",
    "tests/unit/trainer/test_zero.py",
    "tests/system/test_trainer_ranks.py",
    "tests/system/test_trainer_resume.py",
)
SAMPLER = (
    "tests/unit/rollout/test_masks.py",
    "tests/unit/rollout/test_patched.py",
    "tests/system/test_rollout_engine.py",
    "tests/system/test_vllm_chat.py",
)


EXTRAS = {
    "reasoning-gym": (
        "tests/unit/orchestrator/test_generated_problems.py",
        "tests/unit/reward/test_reasoning_gym.py",
    ),
    "trackers": ("tests/unit/orchestrator/test_tracking.py",),
}


def run(python: Path, path: str, tests: tuple[str, ...], *options: str) -> None:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *options]
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("RECORD_TESTED", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("torch", [PINNED, *TORCH])
def test_the_trainer_on_releases_of_torch(torch: str, ran_on: RanOn) -> None:
    pinned = installed("trainer")
    assert pinned
    own = torch == PINNED
    ran_on("trainer", pinned if own else pinned | {"torch": torch})
    python = sys.executable if own else python_of_stack(f"torch-{torch}", f"torch=={torch}")
    run(Path(python), str(ROOT), TRAINER)


@pytest.mark.parametrize("vllm", [PINNED, *VLLM])
def test_the_sampler_on_releases_of_vllm(vllm: str, ran_on: RanOn) -> None:
    pinned = installed("sampler")
    assert pinned
    own = vllm == PINNED
    ran_on("sampler", pinned if own else {"vllm": vllm})
    path = str(ROOT) if own else f"{vllm_over_pinned(vllm)}:{ROOT}"
    run(Path(sys.executable), path, SAMPLER)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_optional_packages(extra: str, ran_on: RanOn) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = project["optional-dependencies"][extra]
    for pin in pins:
        name, _, version = pin.partition("==")
        ran_on("extra", {name: version})
    run(python_of_stack(extra, *pins), str(ROOT), EXTRAS[extra], "-m", "not soak")
