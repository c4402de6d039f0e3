"""Which versions of other packages passed, in `hone/tested.toml`, which `hone doctor` and
docs/versions.md read. A module of tests names its package in `PACKAGE`, or a test says what it ran
on by the fixture `ran_on`. With RECORD_TESTED=1 what passed is written at the end of a run, with
the day's date; what failed in a test is left as it was."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import tomli_w

ROOT = Path(__file__).parents[2]
TESTED = ROOT / "hone/tested.toml"
HEAD = "# Versions of other packages that passed, and the day: `make compat` writes this file.\n\n"

Ran = tuple[str, tuple[tuple[str, str], ...]]
"""A part of Hone ("trainer", "sampler" or "client"), and names and versions of packages."""


ended: dict[Ran, bool] = {}
"""Whether all tests of this run that ran on these versions passed."""


def pinned(package: str) -> str:
    """Returns the version of a package in `requirements/compat`, or else the installed one."""
    text = "\n".join(path.read_text() for path in (ROOT / "requirements/compat").glob("*.txt"))
    found = re.search(rf"^{re.escape(package)}(?:\[.*\])?==(\S+)$", text, re.MULTILINE)
    return found.group(1) if found else importlib.metadata.version(package)


@pytest.fixture
def ran_on(
    record_property: Callable[[str, object], None],
) -> Callable[[str, Mapping[str, str]], None]:
    """A function that says which part of Hone runs on which versions of packages in the test."""

    def say(part: str, packages: Mapping[str, str]) -> None:
        record_property("ran_on", (part, tuple(packages.items())))

    return say


@pytest.fixture(autouse=True)
def module_ran_on(request: pytest.FixtureRequest) -> None:
    if package := getattr(request.module, "PACKAGE", None):
        say = request.getfixturevalue("ran_on")
        say("client", {package: pinned(package)})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "ran_on" and report.when == "call" and not report.skipped:
            part, packages = value  # from another process these are lists
            ran = part, tuple((package, version) for package, version in packages)
            ended[ran] = ended.get(ran, True) and report.passed


def pytest_sessionfinish(session: pytest.Session) -> None:
    passed = [ran for ran, all_passed in ended.items() if all_passed]
    if passed and os.environ.get("RECORD_TESTED") and not hasattr(session.config, "workerinput"):
        write(passed)


def merged(rows: list[dict[str, Any]], passed: list[Ran], today: date) -> list[dict[str, Any]]:
    """Returns the rows with what passed today, ordered by part, packages and versions."""
    by_ran = {(row["part"], tuple(row["packages"].items())): row["on"] for row in rows}
    by_ran |= dict.fromkeys(passed, today)
    order = sorted(by_ran, key=lambda ran: (ran[0], [(n, _numbers(v)) for n, v in ran[1]]))
    return [{"part": ran[0], "on": by_ran[ran], "packages": dict(ran[1])} for ran in order]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def write(passed: list[Ran], path: Path = TESTED) -> None:
    rows = tomllib.loads(path.read_text()).get("tested", []) if path.exists() else []
    path.write_text(HEAD + tomli_w.dumps({"tested": merged(rows, passed, date.today())}))
