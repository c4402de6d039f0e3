"""The parts of the documentation that `make docs` writes: docs/graders.md, from the texts of `hone
explain` for each grader; docs/migrating.md; the rooms of the orchestrator in docs/architecture.md,
with what each imports (`tests/unit/test_imports.py` holds their order); the parameters of
`hone.Trainer` in docs/trainer.md; and the metrics of a step in docs/observability.md, from the file
that the page reads."""

from __future__ import annotations

import ast
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from deploy import migrating
from hone.commands.explain import Explanation, find
from hone.trainer.joint import JOINT
from hone.trainer.single import CONVERTED, SAME
from hone.trainer.training_arguments import REFUSED, WITHOUT_EFFECT

ROOT = Path(__file__).parents[1]
ORCHESTRATOR = ROOT / "services/orchestrator"
ARCHITECTURE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: `make docs` draws this -->\n", "<!-- end of rooms -->\n"

ROOMS = ("extensions", "api", "jobs", "grpo", "samplers", "data", "store")
"""From top to bottom: a room imports only rooms below it."""

TRAINER = ROOT / "docs/trainer.md"
BEGIN_PARAMETERS = "<!-- parameters: `make docs` draws this -->\n"
END_PARAMETERS = "<!-- end of parameters -->\n"

MEANINGS = ORCHESTRATOR / "extensions/page/meanings.json"
OBSERVABILITY = ROOT / "docs/observability.md"
BEGIN_METRICS = "<!-- metrics: `make docs` writes this -->\n"
END_METRICS = "<!-- end of metrics -->\n"

GRADERS = ROOT / "docs/graders.md"
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
    rows = [row(param.key.removeprefix(f"{grader.key}."), param) for param in params(grader)]
    table = "\n".join([*HEAD, *rows]) + "\n" if rows else ""
    said = "\n".join(textwrap.fill(line, WIDTH) for line in grader.text.splitlines())
    return "\n".join([f"## {name}\n", f"{said}\n", *([table] if rows else [])])


def params(section: Explanation) -> Iterator[Explanation]:
    for field in section.fields:
        yield field
        yield from params(field)


def row(name: str, param: Explanation) -> str:
    kind = ", ".join(fact for fact in (param.type, param.bounds) if fact)
    default = "none" if param.default is None else f"`{json.dumps(param.default)}`"
    cells = (f"`{name}`", kind, "" if param.required or param.fields else default, param.text)
    return f"| {' | '.join(' '.join(cell.split()).replace('|', ESCAPED) for cell in cells)} |"


def imports(folder: Path = ORCHESTRATOR) -> Iterator[tuple[Path, str]]:
    """Yields each import of one room by another: the importing file, and the imported room. Files
    that lie in no room, such as `app.py`, put the rooms together or serve them all."""
    package = ".".join(folder.relative_to(ROOT).parts)
    for file in sorted(folder.glob("*/**/*.py")):
        own = file.relative_to(folder).parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                room = name.removeprefix(f"{package}.").partition(".")[0]
                if name.startswith(package) and room != own and (folder / room).is_dir():
                    yield file, room


def picture() -> str:
    """Returns a Mermaid diagram of the rooms, each arrow with its number of imports."""
    count = Counter((file.relative_to(ORCHESTRATOR).parts[0], room) for file, room in imports())
    arrows = [
        f"    {above} -->|{count[above, below]}| {below}"
        for above in ROOMS
        for below in ROOMS
        if count[above, below]
    ]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"]) + "\n"


def drawn(page: str) -> str:
    """Returns the page with the picture of the rooms as they are now."""
    return _between(page, BEGIN, END, picture())


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def with_parameters(page: str) -> str:
    """Returns the page of the Trainer with the table of its parameters as they are now."""
    keys: dict[str, list[str]] = {}
    for name, key in SAME.items():
        keys.setdefault(f"`{key}`", []).append(name)
    rows = [(_names(names), key, "") for key, names in keys.items()]
    rows += [(_names([name]), f"`{each.key}`", each.note) for name, each in CONVERTED.items()]
    rows += [(_names(names), text, "") for names, text in JOINT.values()]
    rows += [
        (_names([name]), "none", f"other values than {neutral[0]!r} are refused: {why}")
        for name, (neutral, why) in REFUSED.items()
    ]
    whys: dict[str, list[str]] = {}
    for name, why in WITHOUT_EFFECT.items():
        whys.setdefault(why, []).append(name)
    rows += [(_names(names), "none", f"ignored: {why}") for why, names in whys.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    head = "\n| parameter | the job's key | what differs |\n|---|---|---|\n"
    return _between(page, BEGIN_PARAMETERS, END_PARAMETERS, f"{head}{table}\n\n")


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def with_metrics(page: str) -> str:
    """Returns the page of what is observed with the table of the metrics as it is now."""
    rows = ["| metric | is |", "|---|---|"]
    for one in json.loads(MEANINGS.read_text()):
        unit = f" ({one['unit']})" if "unit" in one else ""
        rows.append(f"| `{one['name']}` | {one['means'].removesuffix('.')}{unit} |")
    return _between(page, BEGIN_METRICS, END_METRICS, "\n".join(["", *rows, "", ""]))


if __name__ == "__main__":
    GRADERS.write_text(page())
    migrating.PAGE.write_text(migrating.page())
    ARCHITECTURE.write_text(drawn(ARCHITECTURE.read_text()))
    TRAINER.write_text(with_parameters(TRAINER.read_text()))
    OBSERVABILITY.write_text(with_metrics(OBSERVABILITY.read_text()))
