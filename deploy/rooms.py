"""The rooms of the orchestrator and what they import: the picture in docs/architecture.md. `make
docs` draws it, and `tests/unit/test_imports.py` holds the order of the rooms."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORCHESTRATOR = ROOT / "services/orchestrator"
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: `make docs` draws this -->\n", "<!-- end of rooms -->\n"

ROOMS = ("openai", "api", "run", "evals", "loop", "pool", "store", "data", "runs")
"""From top to bottom: a room imports only rooms below it."""


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
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{picture()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
