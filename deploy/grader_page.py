"""Makes docs/graders.md from the texts of `hone explain` for each grader; `make docs` runs it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hone.commands.explain import Explanation, find

PAGE = Path(__file__).parents[1] / "docs/graders.md"
WIDTH = 100
HEAD = ("| param | is | default | what it says |", "|---|---|---|---|")
ESCAPED = "\\|"
BEGINNING = """# Graders and their params

`make docs` writes this page from the graders' own docstrings. `hone explain llm_judge` shows the
same in the shell, for any grader, and `hone explain graders` all of them. What they are for, and
your own: [`rewards.md`](rewards.md).

A job names a grader, and its params beside it. A param without a default has to be there.

```toml
[[rewards]]
grader = "exact_match"
params = { column = "answer", ignore_case = true }
```
"""


def page() -> str:
    return "\n".join([BEGINNING, *map(_section, find("graders").fields)])


def _section(grader: Explanation) -> str:
    name = grader.key.partition(".")[2]
    rows = [_row(param.key.removeprefix(f"{grader.key}."), param) for param in _params(grader)]
    table = "\n".join([*HEAD, *rows]) + "\n" if rows else ""
    said = "\n".join(textwrap.fill(line, WIDTH) for line in grader.text.splitlines())
    return "\n".join([f"## {name}\n", f"{said}\n", *([table] if rows else [])])


def _params(section: Explanation) -> Iterator[Explanation]:
    for field in section.fields:
        yield field
        yield from _params(field)


def _row(name: str, param: Explanation) -> str:
    kind = ", ".join(fact for fact in (param.type, param.bounds) if fact)
    default = "none" if param.default is None else f"`{json.dumps(param.default)}`"
    cells = (f"`{name}`", kind, "" if param.required or param.fields else default, param.text)
    return f"| {' | '.join(' '.join(cell.split()).replace('|', ESCAPED) for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
