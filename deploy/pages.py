"""The documentation that `make docs` writes. Between two marks in a page: docs/graders.md, from the
texts of `hone explain` for each grader; docs/migrating.md; the rooms of the orchestrator in
docs/architecture.md, with what each imports (`tests/unit/test_imports.py` holds their order); the
parameters of `hone.Trainer` in docs/trainer.md; the metrics of a step in docs/observability.md,
from the file that the page reads; docs/versions.md, from the entries of `make compat` in
hone/tested.toml. As a whole file: llms.txt (https://llmstxt.org), the list of all pages."""

from __future__ import annotations

import ast
import json
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from hone.commands.explain import Explanation, find
from hone.importing import trl
from hone.importing.importing import FRAMEWORKS
from hone.importing.table import Framework, Row
from hone.trainer.parameters import JOINT
from hone.trainer.single import CONVERTED, IGNORED, REFUSED, SAME

ROOT = Path(__file__).parents[1]
ORCHESTRATOR = ROOT / "services/orchestrator"
ROOMS = ("extensions", "api", "jobs", "grpo", "samplers", "data", "store")
"""The folders of the orchestrator from top to bottom: each imports only those below it."""

MEANINGS = ORCHESTRATOR / "extensions/page/meanings.json"
WIDTH = 100
HEAD = ("| param | is | default | what it says |", "|---|---|---|---|")
ESCAPED = "\\|"


def graders() -> str:
    """Returns a section for each grader, with the table of its params."""
    return "\n".join(["", *map(_section, find("graders").fields), ""])


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
    that are in no room, such as `app.py`, compose the rooms or serve all of them."""
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


def rooms() -> str:
    """Returns a Mermaid diagram of the rooms, each arrow with its number of imports."""
    count = Counter((file.relative_to(ORCHESTRATOR).parts[0], room) for file, room in imports())
    arrows = [
        f"    {above} -->|{count[above, below]}| {below}"
        for above in ROOMS
        for below in ROOMS
        if count[above, below]
    ]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"]) + "\n"


def parameters() -> str:
    """Returns the table of the Trainer's parameters."""
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
    rows += [(_names(names.split()), "none", f"ignored: {why}") for why, names in IGNORED.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    head = "\n| parameter | the job's key | what differs |\n|---|---|---|\n"
    return f"{head}{table}\n\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def metrics() -> str:
    """Returns the table of the metrics of a step."""
    rows = ["| metric | is |", "|---|---|"]
    for one in json.loads(MEANINGS.read_text()):
        unit = f" ({one['unit']})" if "unit" in one else ""
        rows.append(f"| `{one['name']}` | {one['means'].removesuffix('.')}{unit} |")
    return "\n".join(["", *rows, "", ""])


# --- docs/migrating.md ---------------------------------------------------------------------------

TRL_NAMES = """What surrounds a GRPOConfig. Its own names are
[the parameters of `hone.Trainer`](trainer.md#parameters)."""


def migrating() -> str:
    """Returns the tables of hone/importing/."""
    return "\n".join(["", *map(_trainer_section, FRAMEWORKS.values()), ""])


def _trainer_section(framework: Framework) -> str:
    parts = [f"## {framework.title}", *([TRL_NAMES] if framework is trl.TRL else [])]
    rows = [f"| `{name}` | {_here(row)} | {row.note} |" for name, row in framework.rows.items()]
    parts += [
        "\n".join(["| their key | here | what differs, or why not |", "|---|---|---|", *rows])
    ]
    beside = framework.defaults.keys() - framework.rows.keys() - framework.others
    for title, names in (
        ("Read with these", sorted(beside)),
        ("Not needed here", framework.ignored),
    ):
        listed = ", ".join(f"`{name}`" for name in names)
        parts += [f"{title}:\n\n| names |\n|---|\n| {listed} |"]
    return "\n\n".join(parts) + "\n"


def _here(row: Row) -> str:
    if row.here:
        return ", ".join(f"`{key}`" for key in row.here.split(","))
    return f"none but {json.dumps(row.neutral[0])}" if row.neutral else "none"


# --- docs/versions.md ----------------------------------------------------------------------------

TESTED = ROOT / "hone/tested.toml"


def versions() -> str:
    """Returns the table of hone/tested.toml."""
    lines = ["", "| part | packages | on |", "|---|---|---|"]
    for row in tomllib.loads(TESTED.read_text())["tested"]:
        packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
        lines.append(f"| {row['part']} | {packages} | {row['on']} |")
    return "\n".join([*lines, "", ""])


# --- llms.txt ------------------------------------------------------------------------------------

LLMS = ROOT / "llms.txt"
CONTENTS = ROOT / "docs/site/contents.txt"


def llms_page() -> str:
    """Returns llms.txt: each page of the site that is a file here, with its first sentence."""
    summary = _first_sentence((ROOT / "README.md").read_text())
    skill = "To write and run a job, follow [the skill](skills/hone/SKILL.md)."
    lines = ["# Hone", "", f"> {summary}", "", skill]
    for line in CONTENTS.read_text().splitlines():
        page = ROOT / f"{line}.md"
        if line.startswith(":caption: "):
            lines += ["", f"## {line.removeprefix(':caption: ')}", ""]
        elif line and page.is_file():
            title = page.read_text().partition("\n")[0].removeprefix("# ")
            sentence = _first_sentence(page.read_text())
            lines.append(f"- [{title}]({line}.md)" + (f": {sentence}" if sentence else ""))
    return "\n".join([*lines, ""])


def _first_sentence(page: str) -> str:
    """Returns the first sentence below a page's title, without marks and links; "" if a list or a
    table begins the page."""
    below = page.partition("\n")[2].split("\n\n")
    begins = (part for part in below if re.match(r"\n?[\w`*\[]", part))
    text = " ".join(next(begins, "").split())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    return re.sub(":$", ".", re.split(r"(?<=[.:])\s+(?=[A-Z`])", text)[0])


# --- pages with a part that is written -----------------------------------------------------------

WRITTEN = {
    "graders": graders,
    "migrating": migrating,
    "architecture": rooms,
    "trainer": parameters,
    "observability": metrics,
    "versions": versions,
}
"""The text between the marks in a page of docs/, by the page's name."""

BEGIN, END = (
    "<!-- `make docs` writes this -->\n",
    "<!-- end of the part that `make docs` writes -->\n",
)


def page_of(name: str) -> Path:
    return ROOT / f"docs/{name}.md"


def current(name: str) -> str:
    """Returns the page with its written part as the code says now."""
    before, _, rest = page_of(name).read_text().partition(BEGIN)
    return f"{before}{BEGIN}{WRITTEN[name]()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in WRITTEN:
        page_of(name).write_text(current(name))
    LLMS.write_text(llms_page())
