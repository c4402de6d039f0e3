"""Packages that import what they have when it is used, and what is said where others are missing:
it names what pyproject.toml has."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hone import stack
from hone.stack import ENGINES, check_installed
from shared import job, wire
from shared.errors import BadRequest, how_to_install

ROOT = Path(__file__).parents[3]


def test_an_extra_is_installed_beside_the_hone_that_is_there() -> None:
    assert how_to_install("otel") == (
        "`make setup` in Hone's repository installs it into .venv, `pip install 'hone-rl[otel]'` "
        "into another environment that has Hone"
    )


def test_each_extra_that_somebody_is_told_to_install_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(ENGINES)
    for part in ("hone", "shared", "services", "deploy"):
        for file in (ROOT / part).rglob("*.py"):
            told = r"(?:how_to_install|check_installed)\(['\"](\w+)['\"]"
            named |= set(re.findall(told, file.read_text()))
    assert named == {
        *("laptop", "modal", "orchestrator", "otel", "plot", "reward", "rollout", "simple"),
        "trainer",
    }
    assert named <= project["optional-dependencies"].keys()


def test_services_without_their_packages_are_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_installed("laptop", *ENGINES)
    absent = {"rollout": ("no-such-package",), "reward": ("no-such-package", "pip")}
    monkeypatch.setattr(stack, "ENGINES", ENGINES | absent)
    with pytest.raises(BadRequest, match=r"^the packages of rollout are not installed: .*laptop"):
        check_installed("laptop", *ENGINES)


def modules_after(code: str) -> set[str]:
    """Returns the modules that a fresh Python has imported once it ran the code."""
    code = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize("package", [wire, job])
def test_a_package_has_all_that_it_names(package: object) -> None:
    for name in dir(package):
        assert getattr(package, name) is not None or name == "__file__", name


def test_a_body_is_imported_without_those_of_other_services() -> None:
    found = modules_after("from shared.wire import WaitRequest")
    assert "shared.wire.base" in found
    assert not {"shared.wire.rollouts", "shared.wire.jobs", "shared.job.job"} & found


def test_what_a_package_lacks_is_an_import_error() -> None:
    code = "try:\n from shared.wire import Nothing\nexcept ImportError as error:\n print(error)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot import name 'Nothing' from 'shared.wire'" in ended.stdout
