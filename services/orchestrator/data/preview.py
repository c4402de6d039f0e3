"""A dry run's view of a job's prompts: the first ones as the model gets them, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.orchestrator.data.hub import cached_model
from shared.job import Job
from shared.model.names import model_folder
from shared.prompts.reading import CannotCount, PromptReader, prompt_reader
from shared.wire import PreviewedPrompt, Prompt

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
