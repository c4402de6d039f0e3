"""The text of a completion made at its end, beside the text that vLLM makes token by token."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytestmark = pytest.mark.engine

END, SMILE = 0, "🙂"


@pytest.fixture(scope="module", params=["bytes", "spaces"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Tokens that are bytes, and a tokenizer that strips the space before a text's first word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if request.param == "bytes":
        words = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        tokens = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens.decoder = decoders.ByteLevel()
    else:
        words = ["</s>", "▁the", "▁cat", "s", ",", "▁"]
        tokens = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "s"))
        tokens.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")


def text_token_by_token(tokenizer: Any, prompt: list[int], ids: list[int], stopped: bool) -> str:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    params = SamplingParams()
    request = EngineCoreRequest("", prompt, None, params, None, 0.0, None, None, None)
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    for position, id in enumerate(ids):
        detokenizer.update([id], stopped and position == len(ids) - 1)
    return detokenizer.output_text


def test_a_text_made_at_the_end_is_the_one_vllm_makes_token_by_token(tokenizer: Any) -> None:
    from services.rollout.on_vllm.completions import text_of

    drawn = random.Random(0)
    for _ in range(200):
        ids = drawn.choices(range(len(tokenizer)), k=drawn.randrange(1, 40))
        prompt, ids = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        stopped = drawn.random() < 0.5
        expected = text_token_by_token(tokenizer, prompt, ids, stopped)
        assert text_of(tokenizer, prompt, ids, stopped=stopped) == expected


@pytest.mark.parametrize("tokenizer", ["bytes"], indirect=True)
def test_a_text_ends_with_its_last_whole_character(tokenizer: Any) -> None:
    from services.rollout.on_vllm.completions import text_of

    ids = tokenizer.encode(f"ab{SMILE}", add_special_tokens=False)
    assert len(ids) == 2 + 4
    assert text_of(tokenizer, [], ids, stopped=False) == f"ab{SMILE}"
    assert text_of(tokenizer, [], ids[:-1], stopped=False) == "ab"
    assert text_of(tokenizer, [], [*ids, END], stopped=False) == f"ab{SMILE}"
    assert text_of(tokenizer, [], ids[:2], stopped=True) == "a"


@pytest.mark.parametrize("tokenizer", ["spaces"], indirect=True)
def test_a_text_after_a_prompt_keeps_the_space_before_its_first_word(tokenizer: Any) -> None:
    from services.rollout.on_vllm.completions import text_of

    assert text_of(tokenizer, [1], [2, 3], stopped=False) == " cats"
