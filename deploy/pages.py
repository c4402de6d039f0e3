"""The parts of the documentation that `make docs` writes: docs/graders.md, from the texts of `hone
explain` for each grader; docs/migrating.md; the rooms of the orchestrator in docs/architecture.md,
with what each imports (`tests/unit/test_imports.py` holds their order); the parameters of
`hone.Trainer` in docs/trainer.md; the metrics of a step in docs/observability.md, from the file
that the page reads; docs/versions.md, from the entries of `make compat` in hone/tested.toml; and
llms.txt (https://llmstxt.org), the list of all pages."""

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
ARCHITECTURE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- rooms: `make docs` draws this -->\n", "<!-- end of rooms -->\n"

ROOMS = ("extensions", "api", "jobs", "grpo", "samplers", "data", "store")
"""The folders of the orchestrator from top to bottom: each imports only those below it."""

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


def draw_rooms(page: str) -> str:
    """Returns the page with a current picture of the rooms."""
    return _between(page, BEGIN, END, picture())


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def with_parameters(page: str) -> str:
    """Returns the Trainer's page with a current table of its parameters."""
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
    return _between(page, BEGIN_PARAMETERS, END_PARAMETERS, f"{head}{table}\n\n")


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def with_metrics(page: str) -> str:
    """Returns the page on observability with a current table of the metrics."""
    rows = ["| metric | is |", "|---|---|"]
    for one in json.loads(MEANINGS.read_text()):
        unit = f" ({one['unit']})" if "unit" in one else ""
        rows.append(f"| `{one['name']}` | {one['means'].removesuffix('.')}{unit} |")
    return _between(page, BEGIN_METRICS, END_METRICS, "\n".join(["", *rows, "", ""]))


# --- docs/migrating.md ---------------------------------------------------------------------------

MIGRATING = ROOT / "docs/migrating.md"
MIGRATING_BEGINNING = """# From another trainer

`hone import` makes a job of a configuration of TRL, OpenRLHF, verl or prime-rl, and lists what has
no counterpart. `make docs` writes this page from the tables that it uses.

    .venv/bin/hone import config.yaml --to job.toml  # YAML, TOML or JSON, of any of them
    .venv/bin/hone import -- trl grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name a/b
    .venv/bin/hone import -- python3 -m verl.trainer.main_ppo data.train_batch_size=256
    .venv/bin/hone import -o json config.yaml        # the job, and every key that has none, as data

Scripts are not read. Of a shell script, paste the command that starts the trainer after `--`, with
its variables replaced; a variable that is left is listed. A Python script that calls TRL runs with
`from hone import Trainer as GRPOTrainer` ([`trainer.md`](trainer.md)), or its arguments go after
`--`.

Comments before the job say which name each key had, and what differs. A value that the trainer
has by default, and a job has not, is written too. A key that every job needs and that the
configuration does not say is a comment, "fill in". A key that is in no table below is a comment,
"not translated", as is a value without a counterpart. The exit code is 0 as long as the
configuration can be read.

- **Batches.** TRL and prime-rl count completions, verl and a job count prompts, OpenRLHF's rollout
  batch counts prompts and its training batch completions. TRL's is multiplied by the processes:
  `--processes 8`, unless the command line says it. A step of a job is a batch of
  `prompts_per_step * group_size` completions, and `minibatches * epochs` optimizer steps.
- **Ranges.** `clip_low` and `clip_high` are distances from 1. A trainer with one range has both.
- **Averages.** A mean over tokens of an optimizer step is "dapo", with several minibatches "bnpo";
  a mean of sequences' means is "grpo"; a sum over a constant length is "dr_grpo".
- **KL in the reward** of OpenRLHF becomes a part of the loss, "k3_true". In the reward a token
  answers for the divergence of all later tokens too, in the loss for its own alone.
- **Rewards** that are code of another signature are yours to write: [`rewards.md`](rewards.md).
- **Where it runs** (GPUs, memory of samplers) is a setting of the stack: `hone import` says which.
"""

TRL_NAMES = """What surrounds a GRPOConfig. Its own names are
[the parameters of `hone.Trainer`](trainer.md#parameters)."""


def migrating_page() -> str:
    """Returns docs/migrating.md, made of the tables of hone/importing/."""
    return "\n".join(
        [MIGRATING_BEGINNING, *(_trainer_section(each) for each in FRAMEWORKS.values())]
    )


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

VERSIONS = ROOT / "docs/versions.md"
TESTED = ROOT / "hone/tested.toml"
VERSIONS_BEGINNING = """# Versions that were tested

`make compat` and `make clients` run each combination below and write the day into
`hone/tested.toml`, from which `make docs` makes this page. `hone doctor` says what is installed and
whether it is here. All of it ran on CPUs ([`what-was-run.md`](what-was-run.md)).

- **Trainer**: torch 2.11 to the newest, with the other packages as pinned; the tests of attention,
  losses, ZeRO, several ranks and resuming.
- **Sampler**: vLLM's builds for CPUs end with the pinned release. A later one was tried as its
  Python code over the compiled code of the pinned one: engine, log-probs, weight sync, masks and
  chat. Its compiled code was not run.
- **Clients**: unmodified packages against a stack, the newest of the index.
"""


def versions_page() -> str:
    """Returns docs/versions.md, made of hone/tested.toml."""
    lines = [VERSIONS_BEGINNING, "| part | packages | on |", "|---|---|---|"]
    for row in tomllib.loads(TESTED.read_text())["tested"]:
        packages = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
        lines.append(f"| {row['part']} | {packages} | {row['on']} |")
    return "\n".join([*lines, ""])


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


if __name__ == "__main__":
    GRADERS.write_text(page())
    MIGRATING.write_text(migrating_page())
    ARCHITECTURE.write_text(draw_rooms(ARCHITECTURE.read_text()))
    TRAINER.write_text(with_parameters(TRAINER.read_text()))
    OBSERVABILITY.write_text(with_metrics(OBSERVABILITY.read_text()))
    VERSIONS.write_text(versions_page())
    LLMS.write_text(llms_page())
