"""Data files as the commands read them on the user's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.commands.grade import items_in
from hone.first_job import read_rows


def test_only_a_line_feed_ends_a_line_of_completions(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    path = tmp_path / "completions.jsonl"
    path.write_bytes(f'{{"completion": "{text}"}}\r\n\n{{"completion": "e"}}\n'.encode())
    assert [item.completion for item in items_in(path)] == [text, "e"]


@pytest.mark.parametrize("text", ['[{"prompt": "x"}]', '{"prompt": "x"}\n'])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_first_job_reads_json_with_a_byte_order_mark(
    tmp_path: Path, name: str, text: str
) -> None:
    if name == "rows.jsonl" and text.startswith("["):
        text = '{"prompt": "x"}'
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    assert read_rows(tmp_path / name) == [{"prompt": "x"}]
