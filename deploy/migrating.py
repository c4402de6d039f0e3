"""docs/migrating.md, which `make docs` writes from the tables of hone/importing/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone.importing import trl
from hone.importing.importing import FRAMEWORKS
from hone.importing.table import Framework, Row

PAGE = Path(__file__).parents[1] / "docs/migrating.md"
HEAD = {
    2: ("| their key | here |", "|---|---|"),
    3: ("| their key | here | why |", "|---|---|---|"),
}

BEGINNING = """# From another trainer

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
has by default, and a job has not, is written too. What the user must say is a comment, "fill in":
rewards that are code of another signature, a number that depends on the data. A key that is in no
table below is listed as "not translated", as is a value without a counterpart. The exit code is 0
as long as the configuration can be read.

- **Batches.** TRL and prime-rl count completions, verl and a job count prompts, OpenRLHF's rollout
  batch counts prompts and its training batch completions. TRL's is multiplied by the processes:
  `--processes 8`, unless the command line says it. A step of a job is a batch of
  `prompts_per_step * group_size` completions, and `minibatches * epochs` optimizer steps.
- **Ranges.** `clip_low` and `clip_high` are distances from 1. A trainer with one range has both.
- **Averages.** A mean over tokens of an optimizer step is "dapo", with several minibatches "bnpo";
  a mean of sequences' means is "grpo"; a sum over a constant length is "dr_grpo".
- **KL in the reward** becomes a part of the loss, "k3_true". In the reward a token answers for the
  divergence of all later tokens too, in the loss for its own alone.
- **Where it runs** (GPUs, memory of samplers) is a setting of the stack: `hone import` says which.
"""

TRL_NAMES = """What surrounds a GRPOConfig. Its own names are
[the parameters of `hone.Trainer`](trainer.md#parameters)."""


def page() -> str:
    """Returns the page."""
    return "\n".join([BEGINNING, *(_section(each) for each in FRAMEWORKS.values())])


def _section(framework: Framework) -> str:
    parts = [f"## {framework.title}", *([TRL_NAMES] if framework is trl.TRL else [])]
    parts += [_table(2, _counterparts(framework.rows))]
    parts += ["No counterpart, unless the value changes nothing:", _table(3, _lacking(framework))]
    ignored = ", ".join(f"`{name}`" for name in framework.ignored)
    return "\n\n".join([*parts, f"Not needed here:\n\n| names |\n|---|\n| {ignored} |"]) + "\n"


def _table(width: int, rows: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(
        [*HEAD[width], *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _counterparts(rows: Mapping[str, Row]) -> Iterator[tuple[str, ...]]:
    for name, row in rows.items():
        if row.here:
            here = ", ".join(f"`{key}`" for key in row.here.split(","))
            yield f"`{name}`", here


def _lacking(framework: Framework) -> Iterator[tuple[str, ...]]:
    for name, row in framework.rows.items():
        if not row.here:
            yield f"`{name}`", _neutral(row.neutral), row.why


def _neutral(values: tuple[object, ...]) -> str:
    return f"none but {json.dumps(values[0])}" if values else "none"
