"""What a dry run shows of a job's prompts: the first ones as the model gets them, and how many
tokens they are. The tokenizer is the model's own `tokenizer.json`; neither torch nor the model's
code is loaded for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.orchestrator.data.rendering import RENDERER, CannotRender
from shared.errors import BadRequest
from shared.job import Job
from shared.models import model_folder
from shared.wire import PreviewedPrompt, Prompt

MAX_SHOWN = 4


class CannotCount(Exception):
    """Why the tokens of prompts are not known here."""


def preview(job: Job, prompts: Sequence[Prompt]) -> tuple[tuple[PreviewedPrompt, ...], str]:
    """Returns the first prompts as they are rendered, and why their tokens were not counted ("" if
    they were). Raises BadRequest for prompts that the model's chat template refuses."""
    shown = prompts[:MAX_SHOWN]
    try:
        folder = _tokenizer_folder(job)
        count, why = _counter(job, folder), ""
    except CannotCount as error:
        count, why = (lambda _: (None, None)), str(error)
    return tuple(_previewed(prompt, count) for prompt in shown), why


Counted = tuple[str | None, int | None]
"""The text as the model reads it, and how many tokens that is."""


def _previewed(prompt: Prompt, count: Callable[[Prompt], Counted]) -> PreviewedPrompt:
    text, num_tokens = count(prompt)
    return PreviewedPrompt(
        index=prompt.index, content=prompt.content, text=text, num_tokens=num_tokens
    )


def _counter(job: Job, folder: Path) -> Callable[[Prompt], Counted]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def count(prompt: Prompt) -> Counted:
        if isinstance(prompt.content, str):
            return prompt.content, len(tokenizer.encode(prompt.content).ids)
        text = _chat(job, folder, prompt.content)
        return text, len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def _chat(job: Job, folder: Path, messages: Sequence[dict[str, Any]]) -> str:
    """Returns the messages as the model's chat template renders them, with room for the answer."""
    config = _config(folder)
    template = _chat_template(folder, config)
    if template is None:
        raise BadRequest(
            f"the prompts are chat messages and the model {job.model!r} has no chat template; "
            "expected prompts that are text, as data.template makes them"
        )
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, dict | str)
    }
    values = special | job.sampling.template_args
    values |= {"messages": list(messages), "add_generation_prompt": True}
    try:
        (text,) = RENDERER.chats(template, [values])
    except CannotRender as error:
        raise BadRequest(
            f"the chat template of model {job.model!r} does not take the prompts: {error.reason}"
        ) from error
    return text


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (own := folder / "chat_template.jinja").is_file():
        return own.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        return next((one["template"] for one in found if one["name"] == "default"), None)
    return found


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _tokenizer_folder(job: Job) -> Path:
    """Returns the folder of the model's tokenizer, fetched from the Hub if it is there. Raises
    CannotCount."""
    folder = model_folder(job.model)
    if folder is None:
        folder = _fetched(job)
    if not (folder / "tokenizer.json").is_file():
        raise CannotCount(f"the model {job.model!r} has no tokenizer.json")
    return folder


def _fetched(job: Job) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                job.model,
                revision=job.model_revision,
                allow_patterns=["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"],
            )
        )
    except Exception as error:  # of whatever the Hub's library connects with
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CannotCount(
            f"the tokenizer of {job.model!r} cannot be fetched: {reason[0]}"
        ) from error
