"""Chat messages in one form, whoever wrote them, and OpenAI's graders as rewards of a job."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire.messages import for_openai, for_template, normalized, without_arrow_nones
from shared.wire.rewards import reward_of


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [called | more]}


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "1"}, {"text": "+"}, "2", {"type": "input_text", "text": "?"}]
    assert normalized([user("1+2?"), user(parts), user([])]) == (
        user("1+2?"),
        user("1+2?"),
        user(""),
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "part 1 of the 'content' of mess"),
        ([{"type": "image_url"}], "is of type 'image_url'; expected parts of type 'text'"),
        ([{"type": "text", "text": 5}], "is {'type': 'text', 'text': 5}; expected parts"),
        ([7], "part 0 of the 'content' of message 1 is 7; expected parts of type 'text'"),
        (7, "the 'content' of message 1 is 7; expected text"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(content: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="message 1") as raised:
        normalized([user("a"), user(content)])
    assert sentence in str(raised.value)


def test_keys_without_a_value_are_left_out_but_arguments_may_be_null() -> None:
    message = calling({"unit": None}, index=None) | {"content": None, "weight": None, "name": "a"}
    assert normalized([message]) == (calling({"unit": None}) | {"content": None, "name": "a"},)
    assert normalized([user("a", tool_calls=[])]) == (user("a"),)


def test_a_template_gets_objects_and_openai_gets_text() -> None:
    for arguments in ('{"a": 2, "b": "x"}', {"a": 2, "b": "x"}):
        assert for_template([calling(arguments)]) == [calling({"a": 2, "b": "x"}) | {"content": ""}]
        assert for_openai([calling(arguments)]) == [calling('{"a": 2, "b": "x"}')]
    for nothing in (None, "", "{}", {}):
        assert for_template([calling(nothing)]) == [calling({}) | {"content": ""}]
    assert for_openai([calling(None)]) == [calling("{}")]


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", [1]])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the 'arguments' of call 0 of message 1 are .*; expected"
    ):
        for_template([user("a"), calling(arguments)])


def test_messages_of_arrow_lose_what_it_adds_and_other_structs_do_not() -> None:
    chat = [user("a", tool_calls=None), calling({"a": 1, "b": None}) | {"content": None}]
    assert without_arrow_nones(chat) == [user("a"), calling({"a": 1})]
    assert without_arrow_nones({"messages": chat, "id": None}) == {
        "messages": [user("a"), calling({"a": 1})],
        "id": None,
    }
    assert without_arrow_nones([{"a": None}]) == [{"a": None}]


@pytest.mark.parametrize("kind", [None, 3, "function"])
def test_a_grader_without_a_type_is_refused(kind: object) -> None:
    with pytest.raises(BadRequest, match=r"grader\.type"):
        reward_of({"type": kind})


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"grader\.name.* is 3; expected text"):
        reward_of({"type": "exact_match", "name": 3})


@pytest.mark.parametrize("named", [{}, {"name": None}, {"name": ""}])
def test_a_grader_without_a_name_is_called_by_its_type(named: dict[str, Any]) -> None:
    assert reward_of({"type": "exact_match", **named}).label == "exact_match"


@pytest.mark.parametrize("kind", ["exact_match", "string_check"])
def test_type_and_name_are_beside_the_params_of_every_grader(kind: str) -> None:
    expected = RewardSpec(grader=kind, name="n", params={"column": "answer"})
    assert reward_of({"type": kind, "name": "n", "column": "answer"}) == expected
