"""`hone init`: a first job, made of a model and a data file, with every key explained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from pydantic import BaseModel
from rich.text import Text

from hone.first_job import READERS, Layout, Lengths, Reward, Source, fitted, look
from hone.shell import Output, OutputOption, command, say, show
from shared.errors import BadRequest
from shared.job import name_of
from shared.job.file import load_job

if TYPE_CHECKING:
    from shared.templates import Content, PromptReader

REWARDS: tuple[Reward, ...] = get_args(Reward)

JUDGE_MODEL = "gpt-4.1-mini"

WHICH_MODEL = "Which model is trained: a folder, or a Hugging Face id?"
WHICH_DATA = "Which problems does it train on: a file, or a Hugging Face dataset id?"
WHAT_GRADES = f"What grades answers: {', '.join(REWARDS[:-1])} or {REWARDS[-1]}?"


class InitResult(BaseModel):
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
    found = [path for path in sorted(Path().iterdir()) if path.suffix in READERS]
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
    from shared.templates import TokenizerUnavailable, prompt_reader
    from shared.weights.model_folder import check_model_folder, model_folder, read_config, window_of

    source = draft.source
    notes = [_found(source)]
    folder = model_folder(draft.model)
    if folder is None:
        return draft, [*notes, f"tokens are not counted: {draft.model!r} is not a folder here"]
    check_model_folder(folder)
    try:
        reader = prompt_reader(draft.model, folder)
    except TokenizerUnavailable as error:
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
        _answers(reader, draft),
        window,
    )
    if lengths.num_overlong == lengths.num_prompts:
        raise BadRequest(
            f"the shortest prompt of {source.train!r} leaves no room for an answer: the model "
            f"{draft.model!r} holds {window} tokens; expected shorter prompts, or another model"
        )
    return replace(draft, lengths=lengths), [*notes, _told(lengths)]


def _answers(reader: PromptReader, draft: Draft) -> list[int]:
    """Returns the lengths of the right answers; none if they are bare results, which say nothing of
    how long the model is that is told to think step by step."""
    rows, column = draft.source.rows, draft.source.layout.answer
    lengths = reader.count([str(row.get(column)) for row in rows]) if column else []
    return lengths if draft.reward != "math" or max(lengths) > BARE else []


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


def _write(draft: Draft, file: Path, notes: Sequence[str], *, force: bool) -> InitResult:
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
    return InitResult(
        job=str(file),
        files=tuple(map(str, texts)),
        reward=draft.reward,
        prompt=draft.source.layout.prompt,
        answer=draft.source.layout.answer,
        max_tokens=job.sampling.max_tokens,
        max_model_len=job.max_model_len,
        notes=tuple(notes),
    )


def _next(written: InitResult) -> list[str]:
    return [
        f"wrote {' and '.join(written.files)}",
        f"  hone run {written.job}                 starts a stack if there is none, and trains",
        f"  hone submit --dry-run {written.job}    only checks the job, on a stack that runs",
    ]


# --- the text of the job -------------------------------------------------------------------------

WIDTH = 44
"""Columns of a line before its comment."""

STEPS, PROMPTS, GROUP, HELD_OUT = 200, 32, 8, 200

BARE = 32
"""Most tokens of a right answer that is a result without its solution."""

NO_EVAL = '# eval = "..."'

OF_HUB = {
    "config": "which part of the data set",
    "train_split": "the rows to train on",
    "eval_split": "the held-out rows",
}
"""Purpose of the keys that a Hub data set needs besides its name."""

TASKS: dict[Reward, str] = {
    "math": "Think step by step. Put the final answer into \\boxed{}.",
    "code": "Answer with one Python code block that has the whole solution.",
}
"""The instruction on the form of the answer, if the grader needs one."""

RUBRIC = "Is this a good answer to the question? 10 for right, complete and clear; 0 for useless."

OWN = '''"""The reward of the job beside this file. It is tried on one completion by

    hone grade --file {file} --completion "..." --row '{row}'
"""


def reward(completions, {column}**columns):
    """Returns a number for each completion: the more, the better. None: does not apply."""
    return [{call} for {names}]


def score(text{argument}):
    {body}


def text_of(completion):
    """A completion of a chat is a list of messages, else it is text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''


LAST_WORDS = """answer = str(wanted).rpartition("####")[2].split()
    words = text.rstrip(" .!\\n").split()
    # Only the end counts: `answer in text` would pay for a list of guesses.
    return float(words[-len(answer) :] == answer)"""


@dataclass(frozen=True)
class Draft:
    """A first job: findings and choices. `has_template` None: it is not known here whether the
    model has a chat template. `lengths` None: nothing was measured."""

    name: str
    model: str
    source: Source
    reward: Reward
    has_template: bool | None = None
    lengths: Lengths | None = None
    judge_model: str = ""
    own_file: str = ""

    @property
    def is_chat(self) -> bool:
        return self.has_template is not False

    @property
    def makes_messages(self) -> bool:
        """Whether the job says how a row becomes messages: its prompt is text that nothing else
        makes a chat of, or ends with its answer."""
        layout = self.source.layout
        is_text = bool(self.source.rows) and not layout.is_chat and not self.task
        return self.is_chat and (layout.is_answered or is_text)

    @property
    def task(self) -> str | None:
        """The instruction to the model beside the problem."""
        return None if self.source.layout.has_system else TASKS.get(self.reward)


def content(draft: Draft, row: Mapping[str, object]) -> Content:
    """Returns the prompt that the job makes of a row."""
    layout = draft.source.layout
    value = row.get(layout.prompt)
    said = [*_said(value, layout)]
    if not draft.is_chat:
        return f"{said[-1]['content']}{_ending(draft)}"
    if draft.task:
        return [{"role": "system", "content": draft.task}, *said]
    return said


def _said(value: object, layout: Layout) -> Sequence[Mapping[str, object]]:
    """Returns the messages of a prompt. If the conversation ends with its answer, the same messages
    as `_messages` takes."""
    if not layout.is_chat or not isinstance(value, list):
        return [{"role": "user", "content": str(value)}]
    messages = cast(list[Mapping[str, object]], value)
    if not layout.is_answered:
        return messages
    return [*(messages[:1] if layout.has_system else []), *messages[-2:-1]]


def job_text(draft: Draft) -> str:
    """Returns the job file."""
    lines = [
        "# Made by `hone init`. `hone explain KEY` says what a key means, and which others there",
        "# are; `hone submit --dry-run` checks the job and shows its first prompts.",
        "",
        _line("name", draft.name, "of the run folder"),
        _line("model", draft.model, "a folder, or a Hugging Face id"),
        _line("steps", STEPS, "batches to train on; data.epochs counts passes instead"),
        *(
            [_line("max_model_len", found.max_model_len, f"the model holds {found.window} tokens")]
            if (found := draft.lengths)
            else []
        ),
        "",
        "[data]",
        *_data(draft),
        "",
        "[sampling]",
        *_sampling(draft),
        "",
        "[[rewards]]",
        *TABLES[draft.reward](draft),
        "",
        "[training]",
        _beside("# learning_rate = 1e-6", "the default; 1e-5 with a section [lora]"),
    ]
    if draft.source.eval:
        count = len(draft.source.held_out)
        lines += [
            "",
            "[evaluation]",
            _line("every", 25, "steps; also before the first and after the last"),
            _line("num_prompts", min(count or HELD_OUT, HELD_OUT), "held-out problems, the first"),
        ]
    return "\n".join(lines) + "\n"


def own_text(draft: Draft) -> str:
    """Returns the text of the user's own reward file."""
    if draft.source.layout.answer is None:
        return OWN.format(
            file=draft.own_file,
            row="{}",
            column="",
            call="score(text_of(completion))",
            names="completion in completions",
            argument="",
            body="return 1 / (1 + len(text) / 1000)  # the shorter the better: say what you want",
        )
    return OWN.format(
        file=draft.own_file,
        row='{"answer": "42"}',
        column="answer, ",
        call="score(text_of(completion), wanted)",
        names="completion, wanted in zip(completions, answer)",
        argument=", wanted",
        body=LAST_WORDS,
    )


def _data(draft: Draft) -> list[str]:
    source, layout = draft.source, draft.source.layout
    lines = [_line("train", source.train, "a row per problem")]
    if source.eval:
        lines.append(_line("eval", source.eval, "held-out problems, never trained on"))
    else:
        lines.append(_beside(NO_EVAL, "held-out problems, never trained on"))
    lines += [_line(key, value, OF_HUB[key]) for key, value in source.more.items()]
    renamed = _renamed(draft)
    if renamed:
        shown = ", ".join(f"{new} = {_toml(old)}" for new, old in renamed.items())
        lines.append(_beside(f"columns = {{ {shown} }}", "name in the job = column in the data"))
    if not draft.is_chat:
        text = f"{{{{ {_last_said(layout)} }}}}{_ending(draft)}"
        lines.append(_line("template", text, "the model has no chat template"))
    elif draft.task:
        lines.append(_line("system_prompt", draft.task, "said to the model before each problem"))
    if draft.makes_messages:
        lines += _messages(layout)
    return lines


def _renamed(draft: Draft) -> dict[str, str]:
    """Returns the job's names for columns with other names."""
    layout = draft.source.layout
    wanted = {"prompt": layout.prompt} if draft.is_chat and not draft.makes_messages else {}
    if draft.reward in ("math", "function") and layout.answer:
        wanted["answer"] = layout.answer
    if draft.reward == "code" and layout.tests:
        wanted["tests"] = layout.tests
    return {new: old for new, old in wanted.items() if new != old}


def _messages(layout: Layout) -> list[str]:
    """Returns the lines that make a prompt from a text, or a conversation that ends with its
    answer."""
    roles = {"system": f'row["{layout.prompt}"][0].content'} if layout.has_system else {}
    roles["user"] = _last_said(layout)
    lines: list[str] = []
    for role, said in roles.items():
        text = "{{ " + said + " }}"
        lines += [
            "",
            _beside("[[data.messages]]", "one message of the prompt, in order"),
            _line("role", role, "who says it"),
            _line("content", text, "what is said, from columns of the row"),
        ]
    return lines


def _last_said(layout: Layout) -> str:
    column = f'row["{layout.prompt}"]'
    if not layout.is_chat:
        return column
    return f"{column}[{-2 if layout.is_answered else -1}].content"


def _ending(draft: Draft) -> str:
    return f"\n\n{draft.task}\n\n" if draft.task else "\n"


def _sampling(draft: Draft) -> list[str]:
    count, found = len(draft.source.rows), draft.lengths
    lines = [
        _line("prompts_per_step", min(count or PROMPTS, PROMPTS), "problems per step"),
        _line("group_size", GROUP, "completions of each, compared with each other"),
    ]
    if found is None:
        most = 1024 if draft.reward == "code" else 512
        return [*lines, _line("max_tokens", most, "of a completion; nothing was measured")]
    answers = f"; right answers have up to {found.answer}" if found.answer else ""
    lines.append(_line("max_tokens", found.max_tokens, f"of a completion{answers}"))
    if found.num_overlong:
        why = f"{found.num_overlong} of {found.num_prompts} prompts leave no room for max_tokens"
        lines.append(_line("overlong_prompts", "drop", why))
    return lines


def _math(draft: Draft) -> list[str]:
    return [_line("grader", "math", "1 for an answer equal to the row's, else 0")]


def _code(draft: Draft) -> list[str]:
    lines = [_line("grader", "code_tests", "1 for a program that passes the row's tests, else 0")]
    layout = draft.source.layout
    if layout.entry_point:
        prompt = next((new for new, old in _renamed(draft).items() if old == layout.prompt), None)
        named = {"entry_point": layout.entry_point, "prefix": prompt or layout.prompt}
        shown = ", ".join(f"{key} = {_toml(column)}" for key, column in named.items())
        lines.append(_beside(f"params = {{ {shown} }}", "columns that the tests need"))
    return lines


def _judge(draft: Draft) -> list[str]:
    column = "prompt" if "prompt" in _renamed(draft) else draft.source.layout.prompt
    question = "{{ item." + column + " }}"
    rubric = f"{RUBRIC}\n\nQuestion: {question}\n\nAnswer: {{{{ sample.output_text }}}}"
    return [
        _line("grader", "llm_judge", "what a language model thinks of it, 0 to 1"),
        "",
        _beside("[rewards.params]", "HONE_JUDGE_URL and HONE_JUDGE_API_KEY say where it is"),
        _line("model", draft.judge_model, "which one judges"),
        _line("rubric", rubric, "what it is asked"),
    ]


def _function(draft: Draft) -> list[str]:
    return [
        _line("file", draft.own_file, "your own code; it travels with the job"),
        _line("function", "reward", "in that file"),
    ]


TABLES: dict[Reward, Callable[[Draft], list[str]]] = {
    "math": _math,
    "code": _code,
    "judge": _judge,
    "function": _function,
}


def _line(key: str, value: object, comment: str) -> str:
    return _beside(f"{key} = {_toml(value)}", comment)


def _beside(text: str, comment: str) -> str:
    return f"{text:<{WIDTH - 2}}  # {comment}"


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
