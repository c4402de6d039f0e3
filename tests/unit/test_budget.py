"""Sizes that may not grow silently. A change that exceeds a budget removes something, or raises the
budget and says why in its commit message."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import pages

ROOT = Path(__file__).parents[2]
PIPELINE = "services.orchestrator.grpo.pipeline"

LINES = {
    "hone": 10_000,
    "shared": 13_610,
    "services/orchestrator/api": 1_620,
    "services/orchestrator/data": 2_760,
    "services/orchestrator/extensions": 10_450,
    "services/orchestrator/grpo": 2_920,
    "services/orchestrator/jobs": 3_050,
    "services/orchestrator/samplers": 2_840,
    "services/orchestrator/store": 3_100,
    "services/reward": 14_470,
    "services/rollout": 5_710,
    "services/trainer": 10_370,
    "bench": 4_150,
    "deploy": 4_540,
}
"""Most lines of Python by room."""

BETWEEN_EXTENSIONS = {
    ("agents", "environments"),  # both record conversations
    ("openai", "agents"),  # calls with a session's key are turns of the session
    ("page", "diagnosis"),  # `hone view` shows findings
}
"""Which extension may import which other."""


BETWEEN_CORE_ROOMS = {
    ("api", "jobs"),  # checks a job, and grades what is stored
    ("api", "data"),  # uploaded files, and a model's tokenizer
    ("api", "store"),
    ("jobs", "grpo"),
    ("jobs", "samplers"),
    ("jobs", "data"),
    ("jobs", "store"),
    ("grpo", "samplers"),
    ("grpo", "data"),
    ("grpo", "store"),  # batches, and groups as they are finished
}
"""Which room of the orchestrator's core may import which other: at most ten arrows between six."""


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def path_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", LINES)
def test_a_room_is_within_its_budget(room: str) -> None:
    assert num_lines(files(room)) <= LINES[room]


def test_the_pipeline_is_read_with_at_most_50_files_of_9000_lines() -> None:
    start = path_of(PIPELINE)
    assert start is not None
    found, waiting = set[Path](), [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [other for name in imported(path) if (other := path_of(name))]
    assert len(found) <= 50 and num_lines([*found]) <= 9_000


def test_a_core_room_imports_no_other_but_those_that_are_named() -> None:
    used = set[tuple[str, str]]()
    for path, room in pages.imports():
        own = path.relative_to(pages.ORCHESTRATOR).parts[0]
        if own != "extensions":
            assert (own, room) in BETWEEN_CORE_ROOMS, f"{path} imports {room}"
            used.add((own, room))
    assert used == BETWEEN_CORE_ROOMS, "remove the pairs that no longer import each other"


def test_an_extension_imports_no_other_but_those_that_are_named() -> None:
    package = "services.orchestrator.extensions."
    used = set[tuple[str, str]]()
    for path in files("services/orchestrator/extensions"):
        own = path.relative_to(ROOT / "services/orchestrator/extensions").parts[0]
        own = own.removesuffix(".py")
        for name in imported(path):
            other = name.removeprefix(package).partition(".")[0]
            if name.startswith(package) and other != own:
                assert (own, other) in BETWEEN_EXTENSIONS, f"{path} imports {name}"
                used.add((own, other))
    assert used == BETWEEN_EXTENSIONS, "remove the pairs that no longer import each other"
