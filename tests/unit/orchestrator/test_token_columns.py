"""The tokens of a stored rollout, as the page colours them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services.orchestrator.api.rollouts import token_columns
from shared.templates import PromptReader
from shared.wire import Rollout, Score
from shared.wire.packed import Logprobs, Mask, TokenIds

VOCABULARY = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}


def reader() -> PromptReader:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PromptReader("m", None, {}, tokenizer)


def columns(sampled: tuple[int, ...], teacher: tuple[float, ...]) -> Any:
    rollout = Rollout(
        text="one two three",
        token_ids=TokenIds((1, 2, 3)),
        logprobs=Logprobs((-1.0, 0.0, -2.0)),
        sampled=Mask(sampled),
        finish_reason="stop",
    )
    score = Score(value=1.0, parts={}, teacher_logprobs=Logprobs(teacher))
    return token_columns(rollout, score, reader())


def test_each_token_has_its_own_text() -> None:
    found = columns((), ())
    assert found.texts == ("one", " two", " three") and found.num_left_out == 0
    assert list(found.logprobs) == [-1.0, 0.0, -2.0] and found.teacher_logprobs == ()


def test_a_teachers_log_probs_stand_at_the_tokens_that_were_sampled() -> None:
    """A branch's come first: here of one token."""
    found = columns((1, 0, 1), (-9.0, -0.5, -1.5))
    assert found.teacher_logprobs == (-0.5, None, -1.5)


def test_what_the_trainer_said_is_missing_where_it_was_not_trained_on() -> None:
    rollout = Rollout(text="one two", token_ids=TokenIds((1, 2)), finish_reason="stop")
    said = Logprobs((math.nan, -0.5)), Logprobs((math.nan, 1.25))
    found = token_columns(rollout, Score(value=1.0, parts={}), reader(), *said)
    assert (found.trainer_logprobs, found.entropies) == ((None, -0.5), (None, 1.25))


def test_tokens_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.orchestrator.api.rollouts.MAX_TOKENS", 2)
    found = columns((1, 0, 1), (-0.5, -1.5))
    assert (len(found.texts), len(found.teacher_logprobs), found.num_left_out) == (2, 2, 1)
