"""The command that chats with a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from deploy import chat
from deploy.chat import Messages, fitting

if TYPE_CHECKING:
    from torch import Tensor

SYSTEM = [{"role": "system", "content": "Be short."}]


def words(messages: Messages) -> int:
    """Returns the words of the messages, as if each were a token."""
    return sum(len(message["content"].split()) for message in messages)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.chat", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none' has no config.json; expected a checkpoint's folder" in done.stderr


def test_the_oldest_questions_are_dropped_with_their_answers_and_the_last_one_stays() -> None:
    texts = ("one two", "three", "four five", "six", "seven eight nine")
    history = [
        {"role": "assistant" if place % 2 else "user", "content": text}
        for place, text in enumerate(texts)
    ]
    kept = {limit: fitting(SYSTEM, history, words, limit) for limit in (11, 10, 8, 7, 0)}
    assert kept == {11: history, 10: history[2:], 8: history[2:], 7: history[4:], 0: history[4:]}


class Tokenizer:
    """A token per word. `asked`: the messages of each prompt."""

    model_max_length = 100

    def __init__(self) -> None:
        self.asked: list[Messages] = []

    def apply_chat_template(self, messages: Messages, **how: Any) -> Any:
        import torch

        if how["return_dict"]:
            self.asked.append(list(messages))
            return {"input_ids": torch.zeros(1, words(messages), dtype=torch.long)}
        return [0] * words(messages)

    def decode(self, ids: Tensor, **_: Any) -> str:
        return f"answer {int(ids[-1])}"


class Model:
    config = SimpleNamespace()

    def __init__(self) -> None:
        self._num_answers = 0

    def generate(self, *, input_ids: Tensor, **_: Any) -> Tensor:
        import torch

        self._num_answers += 1
        return torch.cat([input_ids, torch.tensor([[self._num_answers]])], dim=1)


FIRST, ANSWER, SECOND = (
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "answer 1"},
    {"role": "user", "content": "second"},
)


@pytest.mark.parametrize(
    ("options", "seen"), [([], [FIRST, ANSWER, SECOND]), (["--single-turn"], [SECOND])]
)
def test_the_model_sees_its_earlier_answers_unless_turns_are_single(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], seen: Messages
) -> None:
    (tmp_path / "config.json").touch()
    tokenizer, lines = Tokenizer(), iter(["first", "second", ""])
    monkeypatch.setattr("sys.argv", ["chat", str(tmp_path), "--system", "Be short.", *options])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    for name, made in (("AutoTokenizer", tokenizer), ("AutoModelForCausalLM", Model())):
        fake = SimpleNamespace(from_pretrained=lambda _, made=made: made)
        monkeypatch.setattr(f"transformers.{name}", fake)
    monkeypatch.setattr("transformers.TextStreamer", lambda *_, **__: None)
    chat.main()
    assert tokenizer.asked == [[*SYSTEM, FIRST], [*SYSTEM, *seen]]
