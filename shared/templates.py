"""From rows to the text that a model reads, and how the model reads it: by its folder's chat
template and `tokenizer.json`. Needs neither torch nor the model's code.

Templates and filters of jobs are in Jinja. A stranger may have written them, so they run in a
process of their own with limits (`inside_templates.py`) and without our secrets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGPROF
from typing import TYPE_CHECKING, Any, Literal, cast

from shared.errors import BadRequest
from shared.inside_templates import CPU_S
from shared.wire.messages import for_template

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


ROWS_PER_REQUEST = 64
INSIDE = Path(__file__).with_name("inside_templates.py")


class RenderFailed(Exception):
    """Why a template failed, and at which row; None: at all rows."""

    def __init__(self, reason: str, position: int | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


class Renderer:
    """One process for all callers. It is started when it is needed, and again after it was
    ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._turn = threading.Lock()

    def texts(self, template: str, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Returns the text of each row. Raises RenderFailed."""
        return self._values("text", template, rows)[0]

    def holds(self, expression: str, rows: Sequence[dict[str, Any]]) -> tuple[list[bool], float]:
        """Returns for each row whether the expression is true, and the CPU seconds for all rows.
        Raises RenderFailed."""
        return self._values("test", expression, rows)

    def chats(self, template: str, values: Sequence[dict[str, Any]]) -> list[str]:
        """Returns the text that a model's chat template makes of each. Raises RenderFailed."""
        return self._values("chat", template, values)[0]

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _values(
        self, kind: Literal["text", "test", "chat"], source: str, rows: Sequence[dict[str, Any]]
    ) -> tuple[list[Any], float]:
        """Returns the value of each row, and the CPU seconds for all rows."""
        values, cpu_s = list[Any](), 0.0
        for start in range(0, len(rows), ROWS_PER_REQUEST):
            several = rows[start : start + ROWS_PER_REQUEST]
            try:
                answer = self._ask(kind, source, several)
            except RenderFailed as error:
                position = None if error.position is None else start + error.position
                raise RenderFailed(error.reason, position) from None
            values += answer["values"]
            cpu_s += answer["cpu_s"]
        return values, cpu_s

    def _ask(self, kind: str, source: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        try:
            request = json.dumps({"kind": kind, "source": source, "rows": rows})
        except (TypeError, ValueError) as error:
            reason = f"{error}; expected text, numbers, lists and tables of them"
            raise RenderFailed(reason, 0) from error
        with self._turn:
            line = self._exchange(request)
            if not line:
                raise RenderFailed(self._why_it_ended(), None)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RenderFailed(answer["error"], answer["position"])
        return answer

    def _exchange(self, request: str) -> str:
        """Returns the answer; "" if the process ended instead."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = self._started()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", str(INSIDE)],
            env={},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _why_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        if code == -SIGPROF:
            return f"it takes more than {CPU_S:g} s of processor time for {ROWS_PER_REQUEST} rows"
        return f"the process that renders it ended with status {code}: it takes too much memory"


RENDERER = Renderer()


Content = str | Sequence[Mapping[str, Any]]
"""A prompt: text, or chat messages."""


class TokenizerUnavailable(Exception):
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
        try:
            asked = [
                {**self.values, "messages": for_template(messages), "add_generation_prompt": True}
                for messages in chats
            ]
        except ValueError as error:
            raise BadRequest(f"the prompts: {error}") from error
        try:
            return RENDERER.chats(self.template, asked)
        except RenderFailed as error:
            raise BadRequest(
                f"the chat template of model {self.model!r} does not take the prompts: "
                f"{error.reason}"
            ) from error


def prompt_reader(
    model: str, folder: Path, template_args: Mapping[str, Any] | None = None
) -> PromptReader:
    """Returns how the model in `folder` reads prompts. Raises TokenizerUnavailable for a folder
    without a `tokenizer.json` that can be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerUnavailable(f"the model {model!r} has no tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise TokenizerUnavailable("the library tokenizers is not installed here") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerUnavailable(
            f"the tokenizer.json of {model!r} cannot be read: {error}"
        ) from error
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
