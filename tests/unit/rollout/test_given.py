"""The tokens of given answers, by a real tokenizer and chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.tool_model import END, make_tokenizer
from services.rollout.engine import BadPrompt
from services.rollout.groups import answer_ids
from tests.support.rendering_sampler import THINKING_TEMPLATE

ASKED = ({"role": "user", "content": "look"},)

PREFILLED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Begins an answer otherwise than it writes one, as DeepSeek-R1's template does."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def given(tokenizer: Any, prompt: Any, answer: Any, **template_args: Any) -> str:
    ends = {tokenizer.convert_tokens_to_ids(END)}
    ids = answer_ids(tokenizer, prompt, answer, template_args, ends)
    return str(tokenizer.decode(ids))


def test_a_text_is_followed_by_the_end_of_sequence(tokenizer) -> None:
    tokenizer.eos_token = END
    assert given(tokenizer, "look: ", "low") == f"low{END}"
    assert given(tokenizer, "look: ", f"low{END}") == f"low{END}"


def test_an_answer_in_a_chat_ends_where_the_model_would_stop(tokenizer) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE
    assert given(tokenizer, ASKED, "low") == f"low{END}"  # without the template's last newline
    whole = tokenizer.apply_chat_template(
        [*ASKED, {"role": "assistant", "content": "low"}], tokenize=False
    )
    head = tokenizer.apply_chat_template(list(ASKED), tokenize=False, add_generation_prompt=True)
    assert whole == f"{head}low{END}\n"


def test_a_message_keeps_the_thoughts_that_a_later_turn_would_lose(tokenizer) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE
    answer = {"role": "assistant", "content": "<think>up</think>\nlow"}
    assert given(tokenizer, ASKED, answer) == f"<think>up</think>\nlow{END}"


def test_a_template_that_begins_answers_otherwise_is_followed_by_the_text(tokenizer) -> None:
    tokenizer.chat_template = PREFILLED
    assert given(tokenizer, ASKED, "up</think>low") == f"up</think>low{END}"
    with pytest.raises(BadPrompt, match="the answer has tool_calls; expected an answer that is"):
        given(tokenizer, ASKED, {"role": "assistant", "content": "", "tool_calls": []})


def test_a_template_that_fails_and_an_answer_of_another_kind_are_refused(tokenizer) -> None:
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(BadPrompt, match="no such role"):
        given(tokenizer, ASKED, "low")
    with pytest.raises(BadPrompt, match="the prompt is text and the answer a message"):
        given(tokenizer, "look", {"role": "assistant", "content": "low"})


CALLING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %})"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Iterates over the arguments of calls, as templates of several models do."""


@pytest.mark.parametrize("arguments", ['{"n": 5}', {"n": 5}])
def test_calls_are_rendered_whether_their_arguments_are_text_or_an_object(
    tokenizer, arguments: Any
) -> None:
    tokenizer.chat_template = CALLING
    call = {"type": "function", "function": {"name": "guess", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert given(tokenizer, ASKED, answer) == f"guess(n=5){END}"
    assert given(tokenizer, (*ASKED, answer), "low") == f"low{END}"
    with pytest.raises(BadPrompt, match="part 0 of the 'content' of message 0 is of type 'image'"):
        given(tokenizer, ({"role": "user", "content": [{"type": "image"}]},), "low")
