"""Prompts in the tokens of the job's model: whether they leave room for their completions, and how
the model gets the first ones, for a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.orchestrator.data.choosing import BadRow
from services.orchestrator.data.hub import cached_model
from shared.errors import BadRequest
from shared.job import Job
from shared.templates import CannotCount, PromptReader, prompt_reader
from shared.weights.model_folder import model_folder, read_config, window_of
from shared.wire import PreviewedPrompt, Prompt

REMEDIES = (
    "lower {key}, leave such rows out by data.filter, or set sampling.overlong_prompts to "
    '"drop" or "truncate"'
)


@dataclass
class Fit:
    """Room for `limit` tokens of prompt and completion together; the completion takes up to
    `max_tokens`, by the job's `key`. `overlong` is what the job does with longer prompts;
    `num_fitting` counts prompts that fit."""

    reader: PromptReader
    limit: int
    key: str
    max_tokens: int
    overlong: str
    num_tried: int = 0
    num_fitting: int = 0

    def check(self, prompts: Sequence[Prompt], data: str) -> None:
        """Raises BadRow for the first prompt that leaves no room, and BadRequest for messages that
        the model's chat template refuses."""
        counts = self.reader.count([prompt.content for prompt in prompts])
        for prompt, count in zip(prompts, counts, strict=True):
            self.num_tried += 1
            self.num_fitting += 0 < count <= self.limit - self.max_tokens
            at = f"row {prompt.index} of {data}"
            if not count:
                raise BadRow(f"{at}: its prompt has no tokens")
            if self.overlong == "error" and count + self.max_tokens > self.limit:
                raise BadRow(
                    f"{at}: its prompt has {count} tokens, which with {self.key} "
                    f"{self.max_tokens} makes {count + self.max_tokens}, and the model holds "
                    f"{self.limit}; {REMEDIES.format(key=self.key)}"
                )

    def check_any(self, data: str) -> None:
        """Raises BadRequest if all of the prompts would be dropped."""
        if self.overlong == "drop" and self.num_tried and not self.num_fitting:
            raise BadRequest(
                f"none of the {self.num_tried} prompts of {data} leaves room for {self.key} "
                f"{self.max_tokens}: the model holds {self.limit} tokens; lower {self.key}"
            )


def fit_of(job: Job) -> Fit | None:
    """Returns the room in the job's model; None if its tokenizer is not known here. Raises
    BadRequest if completions leave no room for any prompt."""
    try:
        folder = tokenizer_folder(job)
        reader = prompt_reader(job.model, folder, job.sampling.template_args)
        window = window_of(read_config(folder)) if (folder / "config.json").is_file() else None
    except CannotCount:
        return None
    limits = [limit for limit in (job.max_model_len, window) if limit is not None]
    if not limits:
        return None
    fit = Fit(
        reader,
        min(limits),
        "sampling.max_tokens",
        job.sampling.max_tokens,
        job.sampling.overlong_prompts,
    )
    if not job.trains:
        return held_out_fit(fit, job)
    if not (job.is_pushed or job.steps_never_sample):
        _check_room(fit)
    return fit


def held_out_fit(fit: Fit, job: Job) -> Fit:
    """Returns the same for the held-out problems."""
    found = replace(fit, num_tried=0, num_fitting=0)
    if (most := job.evaluation.max_tokens) is not None:
        found = replace(found, key="evaluation.max_tokens", max_tokens=most)
    _check_room(found)
    return found


def _check_room(fit: Fit) -> None:
    if fit.max_tokens >= fit.limit:
        raise BadRequest(
            f"{fit.key} is {fit.max_tokens}, and the model holds {fit.limit} tokens of prompt and "
            f"completion together; expected at most {fit.limit - 1}, and room for the prompts"
        )


MAX_SHOWN = 4


def preview(job: Job, prompts: Sequence[Prompt]) -> tuple[tuple[PreviewedPrompt, ...], str]:
    """Returns the first prompts as they are rendered, and why their tokens were not counted ("" if
    they were). Raises BadRequest for prompts that the model's chat template refuses."""
    shown = prompts[:MAX_SHOWN]
    contents = [prompt.content for prompt in shown]
    try:
        reader = reader_of(job)
    except CannotCount as error:
        return tuple(PreviewedPrompt(index=p.index, content=p.content) for p in shown), str(error)
    texts, counts = reader.texts(contents), reader.count(contents)
    previewed = tuple(
        PreviewedPrompt(index=prompt.index, content=prompt.content, text=text, num_tokens=count)
        for prompt, text, count in zip(shown, texts, counts, strict=True)
    )
    return previewed, ""


def reader_of(job: Job) -> PromptReader:
    """Returns how the job's model reads prompts. Raises CannotCount."""
    return prompt_reader(job.model, tokenizer_folder(job), job.sampling.template_args)


def tokenizer_folder(job: Job) -> Path:
    """Returns the folder with the configuration and the tokenizer of the job's model; for a Hub
    model, in this machine's cache. Raises CannotCount."""
    folder = model_folder(job.model) or cached_model(job.model, job.model_revision)
    if folder is None:
        raise CannotCount(f"the model {job.model!r} is not in the Hugging Face cache here")
    return folder


def tokenizer_stamp(job: Job) -> tuple[object, ...]:
    """Returns a stamp that changes when the files with the model's tokenizer or chat template
    do."""
    try:
        folder = tokenizer_folder(job)
    except CannotCount:
        return ()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = [folder / name for name in names]
    found = [file.stat() for file in files if file.is_file()]
    return (str(folder), *((each.st_ino, each.st_size, each.st_mtime_ns) for each in found))
