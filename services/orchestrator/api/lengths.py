"""How long a job's prompts are, for its plan. `python -m services.orchestrator.api.lengths` reads a
job as JSON, and prints this as JSON."""

from __future__ import annotations

import math
import sys

from services.orchestrator.data.fitting import reader_of
from services.orchestrator.data.sources import is_on_hub
from services.orchestrator.grpo.prompts import Prompts, load_prompts
from services.orchestrator.grpo.supervised import lessons
from shared.errors import HoneError
from shared.http import codec
from shared.job import Job
from shared.job.running import EvaluationSpec
from shared.settings import Settings, load_settings
from shared.templates import CannotCount
from shared.wire import PromptLengths

MAX_COUNTED = 256
"""Prompts whose tokens are counted: a second or two for prompts of some thousand tokens."""

MAX_COUNTED_SIZE = 4_000_000
"""Characters after which no further prompt is counted: a few seconds, however long prompts are."""


def prompt_lengths(job: Job, settings: Settings) -> PromptLengths:
    """Returns the lengths of training prompts. Takes as long as reading the file. The Hub is not
    asked, because a plan must not wait for a download."""
    if job.is_pushed:
        return PromptLengths(why_not="the job's groups are sampled elsewhere")
    if job.data.train is not None and is_on_hub(job.data.train):
        name = job.data.train
        return PromptLengths(why_not=f"a dry run counts those of {name!r}, on the Hugging Face Hub")
    data = job.data.model_copy(update={"eval": None})
    trained = job.model_copy(update={"data": data, "evaluation": EvaluationSpec()})
    try:
        return counted(trained, load_prompts(trained, settings))
    except HoneError as error:
        return PromptLengths(why_not=error.detail)


def counted(job: Job, prompts: Prompts) -> PromptLengths:
    """Returns the lengths of at most `MAX_COUNTED` prompts, taken evenly from the data; of a
    stream, of the first step's. Raises as `Prompts.made_of`."""
    try:
        reader = reader_of(job)
    except CannotCount as error:
        return PromptLengths(why_not=str(error))
    every = 0
    if prompts.train is None:
        made = prompts.first()[:MAX_COUNTED]
    else:
        every = math.ceil(len(prompts.train) / MAX_COUNTED)
        made = prompts.made_of(prompts.train[::every])
    if job.has_answers:
        made = tuple(lesson.prompt for lesson in lessons(made, job, prompts.name))
    counts, size = list[int](), 0
    for prompt in made:
        counts += reader.count([prompt.content])
        size += len(str(prompt.content))
        if size > MAX_COUNTED_SIZE:
            break
    is_all = every == 1 and len(counts) == len(made)
    return PromptLengths(longest=max(counts, default=None), num=len(counts), is_all=is_all)


def main() -> None:
    job = codec.decode(Job, sys.stdin.buffer.read())
    sys.stdout.write(prompt_lengths(job, load_settings()).model_dump_json())


if __name__ == "__main__":
    main()
