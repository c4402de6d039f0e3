"""`hone init`: a first job, made of a model and a data file, with every key explained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from pydantic import BaseModel
from rich.text import Text

from hone.first_job.lengths import Lengths, fitted
from hone.first_job.looking import READERS, Reward, Row, Source, look
from hone.first_job.writing import Draft, content, job_text, own_text
from hone.shell import Output, OutputOption, command, say, show
from shared.errors import BadRequest
from shared.job import name_of
from shared.job.file import load_job

if TYPE_CHECKING:
    from shared.templates import PromptReader

REWARDS: tuple[Reward, ...] = get_args(Reward)

JUDGE_MODEL = "gpt-4.1-mini"

WHICH_MODEL = "Which model is trained: a folder, or a Hugging Face id?"
WHICH_DATA = "Which problems does it train on: a file, or a Hugging Face dataset id?"
WHAT_GRADES = f"What grades answers: {', '.join(REWARDS[:-1])} or {REWARDS[-1]}?"


class Written(BaseModel):
    """The files that `hone init` wrote, and its findings; `notes` are sentences for people."""

    job: str
    files: tuple[str, ...]
    reward: Reward
    prompt: str
    answer: str | None
    max_tokens: int
    max_model_len: int | None
    notes: tuple[str, ...]


@command
def init(
    file: Annotated[Path, typer.Argument(help="the job file to write")] = Path("job.toml"),
    model: Annotated[
        str | None, typer.Option(help="a folder in Hugging Face format, or a Hugging Face id")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="problems to train on: a file, or a Hugging Face dataset")
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option("--eval", help="held-out problems (default: test.* beside train.*)"),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help=f"what grades completions: {', '.join(REWARDS)}")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="the column with the prompt")] = None,
    answer: Annotated[str | None, typer.Option(help="the column with the right answer")] = None,
    judge_model: Annotated[str, typer.Option(help="which model judges")] = JUDGE_MODEL,
    name: Annotated[str | None, typer.Option(help="the job's name")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Write a first job for a model and a data file. Asks for what is not given."""
    model = model or _ask("--model", WHICH_MODEL, _a_model())
    data = data or _ask("--data", WHICH_DATA, _a_file())
    source = look(data, held_out, prompt, answer)
    reward = reward or _ask("--reward", WHAT_GRADES, source.layout.suggested, _found(source))
    if reward not in REWARDS:
        raise BadRequest(f"--reward {reward!r}: expected one of {', '.join(REWARDS)}")
    draft = Draft(
        name=name or _name(source, file),
        model=model,
        source=source,
        reward=reward,
        judge_model=judge_model,
        own_file="rewards.py",
    )
    _check_reward(draft)
    draft, notes = _measured(draft)
    written = _write(draft, file, notes, force=force)
    show(output, written, lambda: Text("\n".join([*written.notes, *_next(written)])))


def is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(flag: str, question: str, default: str | None, finding: str = "") -> str:
    """Shows the `finding` that helps to answer, asks the question, and returns the answer; without
    a terminal, returns the default."""
    if not is_terminal():
        if default:
            return default
        raise BadRequest(f"{flag} is not given, and there is no terminal to ask at")
    if finding:
        say(finding)
    return str(typer.prompt(question, default=default, prompt_suffix=" ", err=True))


def _a_model() -> str | None:
    """Returns the model folder in the working directory, if there is just one."""
    found = [path.parent for path in sorted(Path().glob("*/config.json"))]
    return str(found[0]) if len(found) == 1 else None


def _a_file() -> str | None:
    """Returns the data file in the working directory: train.*, or the only one."""
    found = [path for path in sorted(Path().iterdir()) if path.suffix in (*READERS, ".parquet")]
    named = [path for path in found if path.stem == "train"] or found
    return str(named[0]) if len(named) == 1 else None


def _name(source: Source, file: Path) -> str:
    """Returns a name that a job may have: of the data set, or of the folder that the job is in."""
    text = source.train if not source.rows else file.resolve().parent.name
    return name_of(Path(text).name, "first")


def _check_reward(draft: Draft) -> None:
    """Raises BadRequest for a reward that needs a column that the data lacks."""
    layout = draft.source.layout
    there = ", ".join(layout.columns)
    if draft.reward == "math" and layout.answer is None:
        raise BadRequest(
            f"the reward math needs a column with the right answer, and none of {there} is known "
            "as one; --answer names it"
        )
    if draft.reward == "code" and layout.tests is None:
        raise BadRequest(f"the reward code needs a column with tests, and none of {there} is one")


def _measured(draft: Draft) -> tuple[Draft, list[str]]:
    """Returns the draft with bounds that fit the model, and the findings as sentences."""
    # they load libraries that `hone --help` does not need
    from shared.templates import CannotCount, prompt_reader
    from shared.weights.model_folder import check_model_folder, model_folder, read_config, window_of

    source, layout = draft.source, draft.source.layout
    notes = [_found(source)]
    folder = model_folder(draft.model)
    if folder is None:
        return draft, [*notes, f"tokens are not counted: {draft.model!r} is not a folder here"]
    check_model_folder(folder)
    try:
        reader = prompt_reader(draft.model, folder)
    except CannotCount as error:
        return draft, [*notes, f"tokens are not counted: {error}"]
    draft = replace(draft, has_template=reader.template is not None)
    window = window_of(read_config(folder))
    if not source.rows:
        return draft, [*notes, f"tokens are not counted: {source.train!r} is not a file here"]
    if window is None:
        why = "the model's config.json does not say how many tokens it holds"
        return draft, [*notes, f"tokens are not counted: {why}"]
    lengths = fitted(
        reader.count([content(draft, row) for row in (*source.rows, *source.held_out)]),
        _answers(reader, source.rows, layout.answer),
        window,
    )
    if lengths.num_overlong == lengths.num_prompts:
        raise BadRequest(
            f"the shortest prompt of {source.train!r} leaves no room for an answer: the model "
            f"{draft.model!r} holds {window} tokens; expected shorter prompts, or another model"
        )
    return replace(draft, lengths=lengths), [*notes, _told(lengths)]


def _answers(reader: PromptReader, rows: Sequence[Row], column: str | None) -> list[int]:
    return reader.count([str(row.get(column)) for row in rows]) if column else []


def _found(source: Source) -> str:
    layout = source.layout
    roles = {
        "the prompt": layout.prompt,
        "the right answer": layout.answer,
        "the tests": layout.tests,
    }
    shown = ", ".join(f"{column!r} is {role}" for role, column in roles.items() if column)
    if not source.rows:
        return f"{source.train}: {shown}"
    held_out = f", {len(source.held_out)} held out" if source.eval else ", none held out"
    return f"{source.train}: {len(source.rows)} rows{held_out}; {shown}"


def _told(lengths: Lengths) -> str:
    dropped = (
        f"; {lengths.num_overlong} of {lengths.num_prompts} prompts are too long for it and are "
        "dropped"
        if lengths.num_overlong
        else ""
    )
    return (
        f"the model holds {lengths.window} tokens: the longest prompt has {lengths.longest}, and "
        f"a completion may have {lengths.max_tokens}{dropped}"
    )


def _write(draft: Draft, file: Path, notes: Sequence[str], *, force: bool) -> Written:
    """Writes the job, and its reward file where it has one, and reads it as `hone submit` would."""
    texts = {file: job_text(draft)}
    if draft.reward == "function":
        texts[file.with_name(draft.own_file)] = own_text(draft)
    if there := [str(path) for path in texts if path.exists() and not force]:
        raise BadRequest(f"{', '.join(there)} is there already; --force replaces it")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BadRequest(f"{str(path)!r} cannot be written: {error.strerror}") from error
    job = load_job(file)
    return Written(
        job=str(file),
        files=tuple(map(str, texts)),
        reward=draft.reward,
        prompt=draft.source.layout.prompt,
        answer=draft.source.layout.answer,
        max_tokens=job.sampling.max_tokens,
        max_model_len=job.max_model_len,
        notes=tuple(notes),
    )


def _next(written: Written) -> list[str]:
    return [
        f"wrote {' and '.join(written.files)}",
        f"  hone run {written.job}                 starts a stack if there is none, and trains",
        f"  hone submit --dry-run {written.job}    only checks the job, on a stack that runs",
    ]
