"""Files that texts name are in the project: docs, docstrings and comments send no one astray."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
).stdout.split()
FOLDERS = {"/".join(file.split("/")[:depth]) for file in FILES for depth in range(1, 6)}
PATHS, NAMES = FOLDERS | set(FILES), {Path(file).name for file in FILES}
TOP = "services|shared|hone|deploy|docs|tests|bench|docker|requirements|examples"
NAMED = re.compile(
    rf"(?<![\w/.<>-])((?:{TOP})/[\w./-]*\w|[\w-]+\.(?:py|md|svg))(?![\w*<{{-]|/\w|\.\w)"
)
ELSEWHERE = {"rewards.py", "your_rewards.py", "lengths.py", "near.py", "squares.py", "careful.py"}
ELSEWHERE |= {"grpo.py"}
"""Files of a user's own, in examples."""

PAGES = [file for file in FILES if file.endswith(".md")]
MODULES = [file for file in FILES if file.endswith(".py")]


def texts_of(source: str) -> Iterator[str]:
    """Yields the docstrings, those of fields too, and the comments; of a string that has a `#` what
    follows it too."""
    for node in statements(ast.parse(source).body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    yield from re.findall("#.*", source)


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yields the statements at every depth, and not what is in them: most of a tree."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, ()))


def missing(text: str, folder: str) -> set[str]:
    """Returns the paths in a text that are neither files nor folders: below the root or `folder`,
    or for a bare name anywhere."""
    return {
        name
        for name in set(NAMED.findall(text)) - ELSEWHERE - NAMES
        if not {name, f"{folder}/{name}"} & PATHS
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_path_in_a_page_exists(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert missing(text, str(Path(page).parent)) == set()


def test_every_path_in_a_docstring_or_comment_exists() -> None:
    found = {
        file: paths
        for file in MODULES
        if (ROOT / file).is_file()
        and (
            paths := {
                path
                for text in texts_of((ROOT / file).read_text())
                for path in missing(text, str(Path(file).parent))
            }
        )
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see services/trainer/trainer.py, and `hone/cli.py`.", set()),
        ("in `services/rollout/` and shared/http/client.py's order", set()),
        ("`beats.py` or services/rollout/reward.py", {"beats.py", "services/rollout/reward.py"}),
        ("deploy/jobs/*.toml and /dev/shm/hone-1, runs/demo", set()),
    ],
)
def test_what_counts_as_a_path(text: str, wrong: set[str]) -> None:
    assert missing(text, ".") == wrong


def test_docstrings_and_comments_at_every_depth_are_texts() -> None:
    source = '''"""Module."""
class A:
    """Class."""
    field: int = 0  # after
    """Field."""
    def method(self):
        try:
            "no name"
        except ValueError:
            match self:
                case 1:
                    """Case."""
        return "neither"
# last'''
    texts = ["Module.", "Class.", "Field.", "no name", "Case.", "# after", "# last"]
    assert list(texts_of(source)) == texts


def test_make_test_runs_every_test_file() -> None:
    """It names the folders of its two runs: workers import every file that they are given. The
    second run has all tests of its folders, and the first one those without a mark of the rest."""
    marked = re.compile(r"mark\.(system|engine)\b")
    recipe = (ROOT / "Makefile").read_text().partition("\nOF_ENGINES := ")[2]
    of_engines, _, rest = recipe.partition("\n")
    first, second = re.findall(r"^\t\t(.*tests/.*|.*OF_ENGINES.*)$", rest, re.MULTILINE)
    plain = first.removeprefix("$(OF_ENGINES:%=--ignore=%) ")
    assert second == '-m "not (gpu or clients or compat or soak)" $(OF_ENGINES)'
    apart = ("tests/compat/", "tests/gpu/")  # `make compat` and `make gpu` run these
    files = [file for file in MODULES if re.fullmatch(r"tests/.*/test_\w+\.py", file)]
    assert len(files) > 200
    for file in files:
        if not file.startswith(apart):
            has_mark = marked.search((ROOT / file).read_text())
            folders = of_engines.split() if has_mark else [*plain.split(), *of_engines.split()]
            assert any(file.startswith(f"{folder}/") for folder in folders), file
