"""What is said where packages are missing names what pyproject.toml has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from hone.commands.doctor import ENGINES
from shared.errors import how_to_install

ROOT = Path(__file__).parents[3]


def test_an_extra_is_installed_from_the_repository() -> None:
    assert how_to_install("otel") == (
        "`make setup` in Hone's repository installs it into .venv, `pip install '.[otel]'` there "
        "into another environment"
    )


def test_each_extra_that_somebody_is_told_to_install_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(ENGINES)
    for part in ("hone", "shared", "services", "deploy"):
        for file in (ROOT / part).rglob("*.py"):
            named |= set(re.findall(r"how_to_install\(['\"](\w+)['\"]\)", file.read_text()))
    assert named == {"modal", "orchestrator", "otel", "rollout", "trainer"}
    assert named <= project["optional-dependencies"].keys()
