"""What is said where packages are missing names what pyproject.toml has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hone import stack
from hone.stack import ENGINES, check_installed
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
