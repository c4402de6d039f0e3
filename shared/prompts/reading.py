"""How a model reads prompts: by its folder's chat template and `tokenizer.json`. Needs neither
torch nor the model's code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shared.errors import BadRequest
from shared.prompts.templates import RENDERER, CannotRender

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Content = str | Sequence[Mapping[str, Any]]
"""A prompt: text, or chat messages."""


class CannotCount(Exception):
    """Why the tokens of prompts are not known here."""


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts as the model called `model` does. `template` is its chat template, None without
    one; `values` are the template's variables."""

    model: str
    template: str | None
    values: Mapping[str, Any]
    tokenizer: Tokenizer

    def texts(self, contents: Sequence[Content]) -> list[str]:
        """Returns the text that the model reads for each prompt, up to where its answer begins.
        Raises BadRequest for messages that the chat template refuses."""
        chats = [list(content) for content in contents if not isinstance(content, str)]
        rendered = iter(self._rendered(chats))
        return [content if isinstance(content, str) else next(rendered) for content in contents]

    def count(self, contents: Sequence[Content]) -> list[int]:
        """Returns how many tokens each prompt is. Raises as `texts`."""
        return [len(each) for each in self._encoded(contents)]

    def ids(self, content: Content) -> list[int]:
        """Returns a prompt's token ids. Raises as `texts`."""
        return self._encoded([content])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens left out."""
        return self.tokenizer.decode(list(ids))

    def texts_of_tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token, special tokens included. A token that is a part of a
        character gives "\ufffd"."""
        found: list[str] = []
        for at, each in enumerate(ids):
            before = list(ids[max(at - 1, 0) : at])  # a tokenizer may trim what stands first
            both = self.tokenizer.decode([*before, each], skip_special_tokens=False)
            alone = self.tokenizer.decode(before, skip_special_tokens=False) if before else ""
            found.append(both[len(alone) :])
        return found

    def _encoded(self, contents: Sequence[Content]) -> list[Encoding]:
        texts = self.texts(contents)
        found: dict[int, Encoding] = {}
        for is_text in (True, False):  # a chat template writes special tokens itself
            places = [at for at, each in enumerate(contents) if isinstance(each, str) is is_text]
            encoded = self.tokenizer.encode_batch_fast(
                [texts[at] for at in places], add_special_tokens=is_text
            )
            found |= zip(places, encoded, strict=True)
        return [found[at] for at in range(len(contents))]

    def _rendered(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
        if not chats:
            return []
        if self.template is None:
            raise BadRequest(
                f"the prompts are chat messages and the model {self.model!r} has no chat template; "
                "expected prompts that are text, as data.template makes them"
            )
        asked = [
            {**self.values, "messages": messages, "add_generation_prompt": True}
            for messages in chats
        ]
        try:
            return RENDERER.chats(self.template, asked)
        except CannotRender as error:
            raise BadRequest(
                f"the chat template of model {self.model!r} does not take the prompts: "
                f"{error.reason}"
            ) from error


def prompt_reader(
    model: str, folder: Path, template_args: Mapping[str, Any] | None = None
) -> PromptReader:
    """Returns how the model in `folder` reads prompts. Raises CannotCount for a folder without a
    `tokenizer.json` that can be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CannotCount(f"the model {model!r} has no tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise CannotCount("the library tokenizers is not installed here") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CannotCount(f"the tokenizer.json of {model!r} cannot be read: {error}") from error
    config = _config(folder)
    values = _special_tokens(config) | dict(template_args or {})
    return PromptReader(model, _chat_template(folder, config), values, tokenizer)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the texts of special tokens by their names, as chat templates use them."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {
        name: cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        for name, value in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (own := folder / "chat_template.jinja").is_file():
        return own.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = cast(list[dict[str, str]], found)
        return next((one["template"] for one in named if one["name"] == "default"), None)
    return found


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
