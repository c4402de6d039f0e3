"""`hone import`: a job from another trainer's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.shell import Output, OutputOption, as_json, command, out, say
from shared.errors import BadRequest

if TYPE_CHECKING:
    from hone.importing.table import ImportedJob


@command
def import_(
    source: Annotated[
        list[str],
        typer.Argument(help="a YAML, TOML or JSON file; or a command line, after --"),
    ],
    trainer: Annotated[
        str | None, typer.Option(help="trl, openrlhf, verl or prime-rl, if it is not recognized")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="how many processes multiply TRL's batches", min=1)
    ] = None,
    to: Annotated[Path | None, typer.Option(help="writes the job to this file")] = None,
    output: OutputOption = Output.table,
) -> None:
    """Make a job of a configuration of TRL, OpenRLHF, verl or prime-rl.

    The job goes to the shell's output or to --to. What has no counterpart is said beside it."""
    from hone.importing.importing import import_config

    found = import_config(source, trainer, processes)
    if to is not None:
        try:
            to.write_text(found.toml, encoding="utf-8")
        except OSError as error:
            raise BadRequest(f"{str(to)!r} cannot be written: {error.strerror}") from error
    if output is Output.json:
        as_json(found)
        return
    if to is None:
        out.print(found.toml, soft_wrap=True, markup=False, highlight=False, end="")
    for line in _said(found, to):
        say(line)


def _said(found: ImportedJob, to: Path | None) -> list[str]:
    """Returns what a person must know beside the job."""
    lines = [f"fill in {key}: {why}" for key, why in found.fill_in.items()]
    lines += [f"not translated: {name} = {why}" for name, why in found.lacking.items()]
    if found.ignored:
        lines.append(f"not needed here: {', '.join(found.ignored)}")
    if not found.fill_in:
        lines.append(f"next: hone submit --dry-run {to or 'job.toml'}")
    return lines
