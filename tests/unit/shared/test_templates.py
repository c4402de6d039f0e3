"""Templates of strangers: what they can reach, and how long they may take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.templates import Renderer, RenderFailed, prompt_reader
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
