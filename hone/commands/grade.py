"""`hone grade`: tries rewards on one completion or on a file of them, by the running reward service
or by one that is started for the call; or on the stored rollouts of a job."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table

from hone import reports
from hone.reward_service import reward_service
from hone.shell import (
    REWARDS_ONLY,
    Output,
    OutputOption,
    command,
    connect,
    job_names,
    report_progress,
    show,
)
from shared.errors import BadRequest
from shared.http.client import Client
from shared.job import RewardSpec
from shared.job.file import load_job, make_job, read_source
from shared.wire import Score, ScoreItem, ScoreRequest, ScoreResult

SCORE_DEADLINE_S = 900.0

AT_ONCE = 1024
"""Completions of one request to the reward service."""

ITEM = ("completion", "prompt", "num_tokens")
"""Columns of a row that are fields of the item to grade."""


@command
def grade(
    grader: Annotated[
        str | None, typer.Argument(help="a grader's name, for example exact_match")
    ] = None,
    completion: Annotated[
        str, typer.Option(help="what the model said; - reads it from stdin")
    ] = "-",
    completions: Annotated[
        Path | None,
        typer.Option(help="JSON lines, each a row with its `completion`; in place of both"),
    ] = None,
    row: Annotated[
        str,
        typer.Option(
            help="the dataset's row as JSON, with what was asked as `prompt`, and the completion's "
            "length as `num_tokens`, for graders that look at these"
        ),
    ] = "{}",
    param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the grader, may be repeated")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="your own rewards, with --function")] = None,
    function: Annotated[str, typer.Option(help="the function or class in --file")] = "reward",
    reward: Annotated[
        Path | None, typer.Option(help="a TOML with [[rewards]]; a job file will do")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="a job, whose stored rollouts of --step are graded again; the job is unchanged",
            autocompletion=job_names,
        ),
    ] = None,
    step: Annotated[str, typer.Option(help="which steps of --job: 7, or 3:9 for 3 to 9")] = "",
    limit: Annotated[
        int, typer.Option("-n", help="how many of --job's rollouts that differ most to show")
    ] = 10,
    output: OutputOption = Output.table,
) -> None:
    """Try rewards on a completion, on a file of them, or on a job's rollouts.

    Exits 1 if a completion has no reward. Of a job it shows how many rewards would change, and how
    many advantages their sign."""
    steps = None if job is None else steps_of(step)
    rewards = rewards_of(grader, file, function, reward, param or [])
    if job is not None and steps is not None:
        with connect() as client, report_progress("grading"):
            report = client.regrade(job, *steps, rewards, limit)
        show(output, report, lambda: reports.regrade_table(report))
        return
    if completions is not None:
        graded = FileScores.of(score(items_in(completions), rewards))
        show(output, graded, lambda: list_of(graded))
        missing = graded.num_missing
    else:
        text = sys.stdin.read() if completion == "-" else completion
        (result,) = score([item(row, "--row", completion=text)], rewards)
        show(output, result, lambda: table(result))
        missing = result.value is None
    if missing:
        raise typer.Exit(1)


class FileScores(BaseModel):
    """The scores of a file's completions in its order. `mean` leaves missing rewards out."""

    mean: float | None
    num_missing: int
    scores: tuple[Score, ...]

    @classmethod
    def of(cls, scores: Sequence[Score]) -> FileScores:
        values = [score.value for score in scores if score.value is not None]
        mean = statistics.fmean(values) if values else None
        return cls(mean=mean, num_missing=len(scores) - len(values), scores=tuple(scores))


def rewards_of(
    grader: str | None,
    file: Path | None,
    function: str,
    reward: Path | None,
    params: Sequence[str],
) -> tuple[RewardSpec, ...]:
    """Returns the rewards to try: of a grader's name, of `function` in `file`, or of the TOML file
    `reward`. Raises BadRequest unless there is one of the three."""
    if sum(source is not None for source in (grader, file, reward)) != 1:
        raise BadRequest(
            "name one of: a grader, --file with your own function, --reward with a TOML of rewards"
        )
    if reward is not None:
        if params:
            raise BadRequest("the TOML of --reward has the params; expected no --param with it")
        return load_job(reward, REWARDS_ONLY).rewards
    if wrong := [param for param in params if "=" not in param[1:]]:
        raise BadRequest(f"--param {wrong[0]!r}: expected KEY=VALUE, such as column=answer")
    own = {"grader": grader} if file is None else {"file": str(file), "function": function}
    given = [f"rewards.0.params.{param}" for param in params]
    return make_job({"rewards": [own]}, [*REWARDS_ONLY, *given], "hone grade").rewards


def steps_of(text: str) -> tuple[int, int]:
    """Returns the first and last step of `A:B`, or of `A` alone."""
    first, separator, last = text.partition(":")
    if not first.isdecimal() or (separator and not last.isdecimal()) or not int(first):
        raise BadRequest(
            f"--step {text!r}: expected a step such as 7, or a range of them such as 3:9; the "
            "first step is 1"
        )
    return int(first), int(last or first)


def item(row: str, where: str, **given: str) -> ScoreItem:
    """Returns the completion to grade, of a row as a JSON object: its columns in ITEM, and `given`
    ones, are the item's, all but the completion its row's. Raises BadRequest with `where` it is."""
    try:
        columns: dict[str, Any] = json.loads(row) | given
        own = {name: columns[name] for name in ITEM if columns.get(name) is not None}
        rest = {name: value for name, value in columns.items() if name != "completion"}
        return ScoreItem.model_validate({"prompt": ""} | own | {"row": rest})
    except (ValueError, TypeError) as error:
        raise BadRequest(
            f"{where} is {row!r:.80}; expected a JSON object of the row's columns, for example "
            '{"answer": "42"}, in a file with the text `completion`'
        ) from error


def items_in(file: Path) -> list[ScoreItem]:
    """Returns the completions in a file of JSON lines. Raises BadRequest for a line without a
    completion."""
    lines = enumerate(read_source(file).split("\n"), 1)
    found = [item(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if not found:
        raise BadRequest(f"{str(file)!r} has no line; expected JSON lines with `completion`")
    return found


def score(items: Sequence[ScoreItem], rewards: Sequence[RewardSpec]) -> list[Score]:
    """Returns the reward service's scores. Raises its HoneError."""
    requests = [
        ScoreRequest(items=tuple(items[start : start + AT_ONCE]), rewards=tuple(rewards))
        for start in range(0, len(items), AT_ONCE)
    ]
    with reward_service() as (url, token), report_progress("grading"):
        return [each for ask in requests for each in asyncio.run(_score(url, token, ask))]


def list_of(graded: FileScores) -> Table:
    """Returns one line per completion, each reward in a column, what its graders said, and the
    mean."""
    labels = list(graded.scores[0].parts)
    shown = Table("", *map(escape, labels), "sum", "why", box=None, pad_edge=False)
    for number, each in enumerate(graded.scores, 1):
        why = "; ".join(part.detail for part in each.parts.values() if part.detail)
        values = [_number(each.parts[label].value) for label in labels]
        shown.add_row(str(number), *values, _number(each.value), escape(why))
    shown.add_row("[bold]mean[/]", *[""] * len(labels), f"[bold]{_number(graded.mean)}[/]")
    return shown


def table(score: Score) -> Table:
    """Returns one line per reward, and the sum."""
    shown = Table("reward", "value", "verdict", "seconds", "why", box=None, pad_edge=False)
    for label, part in score.parts.items():
        why = ", ".join(text for text in (part.detail, *part.errors) if text)
        printed = f"\nit printed: {part.stdout.rstrip()}" if part.stdout.strip() else ""
        shown.add_row(
            escape(label),
            _number(part.value),
            part.verdict,
            f"{part.seconds:.3f}",
            escape(why + printed),
        )
    shown.add_row("[bold]sum[/]", f"[bold]{_number(score.value)}[/]")
    return shown


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


async def _score(url: str, token: str | None, request: ScoreRequest) -> tuple[Score, ...]:
    async with Client("reward", url, token=token) as client:
        result = await client.call(
            "POST", "/score", request, ScoreResult, deadline_s=SCORE_DEADLINE_S
        )
        return result.scores
