"""What a dry run shows of a job's prompts: the first ones as the model gets them, and how many
tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shared.job import Job
from shared.models import model_folder
from shared.prompts.reading import CannotCount, PromptReader, prompt_reader
from shared.wire import PreviewedPrompt, Prompt

MAX_SHOWN = 4
FETCHED = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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


def reader_of(job: Job, *, fetching: bool = True) -> PromptReader:
    """Returns how the job's model reads prompts. A tokenizer that is on the Hub is fetched, or
    without `fetching` taken from this machine's cache. Raises CannotCount."""
    folder = tokenizer_folder(job, fetching=fetching)
    return prompt_reader(job.model, folder, job.sampling.template_args)


def tokenizer_folder(job: Job, *, fetching: bool = True) -> Path:
    """Returns the folder with the configuration and the tokenizer of the job's model. Raises
    CannotCount."""
    return model_folder(job.model) or _fetched(job, fetching=fetching)


def _fetched(job: Job, *, fetching: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                job.model,
                revision=job.model_revision,
                allow_patterns=[*FETCHED],
                local_files_only=not fetching,
            )
        )
    except Exception as error:  # of whatever the Hub's library connects with
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CannotCount(
            f"the tokenizer of {job.model!r} cannot be fetched: {reason[0]}"
        ) from error
