"""`hone grade`: tries rewards on one completion, or on a file of them. It uses the running reward
service, or starts one for the call."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table

from hone.reward_service import PING_DEADLINE_S, reward_service
from hone.shell import REWARDS_ONLY, Output, OutputOption, command, show
from shared.errors import BadRequest, Unavailable
from shared.http.client import Client
from shared.job import RewardSpec
from shared.job.file import load_job, read_source
from shared.wire import Score, ScoreItem, ScoreRequest, ScoreResult, VersionInfo

SCORE_DEADLINE_S = 900.0

AT_ONCE = 1024
"""Completions of one request to the reward service."""

ITEM = ("completion", "prompt", "num_tokens")

SILENT_S = 5.0
"""Seconds of grading until a message says that it is still running."""

STILL_GRADING = (
    f"still grading after {SILENT_S:g} s: the reward's code is being imported, or runs; Ctrl-C "
    "ends the wait"
)

AWAY = (
    "the reward service at {url} no longer answers; it is asked again until it does; Ctrl-C ends "
    "the wait"
)


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
        typer.Option(help="JSON lines, each a row with its `completion`; in place of the three"),
    ] = None,
    row: Annotated[str, typer.Option(help="the dataset's row as JSON")] = "{}",
    prompt: Annotated[str, typer.Option(help="what the model was asked")] = "",
    num_tokens: Annotated[
        int | None, typer.Option(help="the completion's length in tokens")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the grader, may be repeated")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="your own rewards, with --function")] = None,
    function: Annotated[str, typer.Option(help="the function or class in --file")] = "reward",
    reward: Annotated[
        Path | None, typer.Option(help="a TOML with [[rewards]]; a job file will do")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Try a grader, or rewards of your own, on one completion or on a file of them.

    Exits 1 if a completion has no reward."""
    if sum(source is not None for source in (grader, file, reward)) != 1:
        raise BadRequest(
            "name one of: a grader, --file with your own function, --reward with a TOML of rewards"
        )
    if reward is not None and param:
        raise BadRequest(
            "--param goes with a grader or --file; the rewards of --reward have their params in "
            "the TOML"
        )
    if reward is not None:
        rewards = load_job(reward, REWARDS_ONLY).rewards
    else:
        own = own_reward(file, function, param or []) if file else None
        rewards = (own or RewardSpec(grader=grader or "", params=_params(param or [])),)
    if completions is not None:
        graded = FileScores.of(score(items_in(completions), rewards))
        show(output, graded, lambda: list_of(graded))
        missing = graded.num_missing
    else:
        text = sys.stdin.read() if completion == "-" else completion
        (result,) = score([item(text, prompt, row, num_tokens)], rewards)
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


def own_reward(file: Path, function: str, params: Sequence[str]) -> RewardSpec:
    """Returns the reward for `function` in `file`. Raises BadRequest if the file cannot be read."""
    source = read_source(file)
    return RewardSpec(file=str(file), function=function, source=source, params=_params(params))


def item(completion: str, prompt: str, row: str, num_tokens: int | None) -> ScoreItem:
    """Returns the completion to grade. `row` is a JSON object. Raises BadRequest if it is not."""
    try:
        columns: Any = json.loads(row)
    except json.JSONDecodeError as error:
        raise BadRequest(f"--row {row!r:.80} is not JSON: {error}") from error
    if not isinstance(columns, dict):
        raise BadRequest(
            f'--row is {row!r:.80}; expected a JSON object, for example \'{{"answer": "42"}}\''
        )
    return ScoreItem(
        prompt=prompt,
        completion=completion,
        num_tokens=num_tokens,
        row=cast(dict[str, Any], columns),
    )


def items_in(file: Path) -> list[ScoreItem]:
    """Returns the completions in a file of JSON lines. A line's `completion`, `prompt` and
    `num_tokens` are the item's, all its columns its row's. Raises BadRequest for a line without a
    completion."""
    found: list[ScoreItem] = []
    for number, line in enumerate(read_source(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            columns: Any = json.loads(line)
            given = {name: columns[name] for name in ITEM if columns.get(name) is not None}
            own = {name: value for name, value in columns.items() if name != "completion"}
            found.append(ScoreItem.model_validate({"prompt": ""} | given | {"row": own}))
        except (ValueError, AttributeError) as error:
            raise BadRequest(
                f"{file}, line {number} is {line!r:.80}; expected a JSON object with `completion`, "
                "a text, beside the row's columns"
            ) from error
    if not found:
        raise BadRequest(f"{str(file)!r} has no line; expected JSON lines with `completion`")
    return found


def score(items: Sequence[ScoreItem], rewards: Sequence[RewardSpec]) -> list[Score]:
    """Returns the reward service's scores. Raises its HoneError."""
    with reward_service() as (url, token):
        requests = [
            ScoreRequest(items=tuple(items[start : start + AT_ONCE]), rewards=tuple(rewards))
            for start in range(0, len(items), AT_ONCE)
        ]
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


def _params(params: Sequence[str]) -> dict[str, Any]:
    """Returns the params of "key=value", each value as TOML or text."""
    found: dict[str, Any] = {}
    for param in params:
        key, separator, text = param.partition("=")
        if not separator or not key:
            raise BadRequest(
                f"--param {param!r}: expected KEY=VALUE, for example --param column=answer"
            )
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


async def _score(url: str, token: str | None, request: ScoreRequest) -> tuple[Score, ...]:
    async with Client("reward", url, token=token) as client:
        call = client.call("POST", "/score", request, ScoreResult, deadline_s=SCORE_DEADLINE_S)
        grading = asyncio.ensure_future(call)
        if not (await asyncio.wait({grading}, timeout=SILENT_S))[0]:
            typer.echo(await _why_silent(client, url), err=True)
        return (await grading).scores


async def _why_silent(client: Client, url: str) -> str:
    try:
        await client.get("/version", VersionInfo, deadline_s=PING_DEADLINE_S)
    except Unavailable:
        return AWAY.format(url=url)
    return STILL_GRADING
