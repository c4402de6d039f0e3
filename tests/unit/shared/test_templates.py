"""Templates of strangers: what they can reach, and how long they may take. Chat messages in one
form, whoever wrote them, and OpenAI's graders as rewards of a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.templates import Renderer, RenderFailed, prompt_reader
from shared.wire.messages import for_openai, for_template, normalized, without_arrow_nones
from shared.wire.rewards import reward_of
from tests.support.model_folders import make_model_folder


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    yield renderer
    renderer.close()


def test_a_template_is_rendered_for_each_row(renderer: Renderer) -> None:
    rows = [{"q": "2+2", "choices": ["3", "4"]}, {"q": "<b>", "choices": []}] * 70
    template = "{{ q }}{% for c in choices %} {{ loop.index }}) {{ c }}{% endfor %}\n"
    assert renderer.texts(template, rows) == ["2+2 1) 3 2) 4\n", "<b>\n"] * 70
    assert renderer.texts("{{ row['a b'] }}", [{"a b": 1}]) == ["1"]


def test_a_filter_says_of_each_row_if_it_is_true(renderer: Renderer) -> None:
    rows = [{"level": level, "answer": "x" * level} for level in range(100)]
    holds, cpu_s = renderer.holds("level > 90 and answer | length < 95", rows)
    assert 0 <= cpu_s < 2
    assert [place for place, held in enumerate(holds) if held] == [91, 92, 93, 94]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**9 }}", "it takes more than 512 MiB"),
        ("{{ '%0999999999d' % 1 }}", "it takes more than 512 MiB"),
        ("{{ 'a' * 2000000 }}", "it is 2000000 characters long, expected at most 1048576"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "is unsafe"),
        ("{{ q.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
        ("{{ p }}", "'p' is undefined"),
        ("{{ q", "line 1: unexpected end of template"),
    ],
)
def test_what_a_template_may_not_do_is_a_sentence(
    renderer: Renderer, template: str, reason: str
) -> None:
    with pytest.raises(RenderFailed) as raised:
        renderer.texts(template, [{"q": [1]}])
    assert reason in raised.value.reason


def test_the_row_that_a_template_does_not_work_on_is_named(renderer: Renderer) -> None:
    rows = [{"q": "x"}] * 100 + [{"q": 3}]
    with pytest.raises(RenderFailed) as raised:
        renderer.texts("{{ q + '?' }}", rows)
    assert raised.value.position == 100 and "unsupported operand" in raised.value.reason
    with pytest.raises(RenderFailed, match="not JSON serializable"):
        renderer.texts("{{ q }}", [{"q": b"bytes"}])


@pytest.mark.slow
def test_a_template_that_never_ends_is_ended_and_the_next_one_works(renderer: Renderer) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RenderFailed, match="more than 2 s of processor time"):
        renderer.texts(endless, [{}])
    assert renderer.texts("{{ q }}", [{"q": 1}]) == ["1"]


def test_the_process_of_templates_has_no_environment(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-ours")
    renderer.close()
    renderer.texts("x", [{}])
    process = renderer._process
    assert process is not None
    with open(f"/proc/{process.pid}/environ", "rb") as environment:  # noqa: PTH123
        assert b"secret" not in environment.read()


def test_chats_are_rendered_as_transformers_renders_them(renderer: Renderer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{%- for message in messages %}\n"
        "  {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "<|{{ message.role }}|>{{ message | tojson }}\n"
        "{%- endfor %}\n"
        "{% if add_generation_prompt %}<|assistant|>{{ bos_token }}{% endif %}\n"
    )
    messages = [{"role": "user", "content": "é <2>"}, {"role": "skip", "content": ""}]
    values = {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>"}
    ours = renderer.chats(template, [values])
    (theirs,), _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert ours == [theirs] and json.dumps(messages[0], ensure_ascii=False) in theirs


CALLING = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
    "{% for name, value in call.function.arguments.items() %} {{ name }} {{ value }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)


def test_messages_of_any_form_are_one_prompt(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CALLING)
    reader = prompt_reader("m/m", folder)
    plain, parts = "w3 w4", [{"type": "text", "text": "w3 "}, {"type": "text", "text": "w4"}]
    for content, arguments in ((plain, {"w5": "w6"}), (parts, '{"w5": "w6"}')):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        chat = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        assert reader.texts([chat]) == ["w3 w4 w5 w6"]
    with pytest.raises(BadRequest, match="part 0 of the 'content' of message 0 is of type 'image'"):
        reader.texts([[{"role": "user", "content": [{"type": "image"}]}]])


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
