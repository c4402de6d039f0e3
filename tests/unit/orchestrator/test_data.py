"""Where problems come from, which of them are taken, and what is refused."""

from __future__ import annotations

import csv
import datetime
import io
import json
import random
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.data import sources, tables
from services.orchestrator.data.choosing import Problem
from services.orchestrator.data.order import StreamOrder, shuffled_within
from services.orchestrator.data.sources import SourceRequest, open_source, opener_of
from services.orchestrator.data.uploads import Uploads, new_id
from services.orchestrator.errors import OperatorActionNeeded
from services.orchestrator.grpo import prompts as prompts_module
from services.orchestrator.grpo.prompts import Prompts, load_prompts
from services.orchestrator.jobs.prompt_checks import check_rows
from shared.errors import BadRequest, NotFound, Unavailable
from shared.job import Job
from shared.settings import Settings
from tests.support.job_records import job_with

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1), "level": n % 5} for n in range(40)]
MAPPED = {"columns": {"prompt": "question"}}


def parquet_without_rows() -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    column = pyarrow.array([], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), file)
    return file.getvalue()


NO_ROWS = parquet_without_rows()


def make_job(data: dict[str, Any], **changes: Any) -> Job:
    sampling = {"prompts_per_step": 4, **changes.pop("sampling", {})}
    return job_with(data=data, sampling=sampling, **changes)


def write(path: Path, rows: Sequence[dict[str, Any]] = ROWS) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def load(data: dict[str, Any], settings: Settings, **changes: Any) -> Prompts:
    return load_prompts(make_job(data, **changes), settings)


def indices(prompts: Prompts, *steps: int, round: int = 0) -> list[int]:
    return [prompt.index for step in steps for prompt in prompts.for_step(step, round)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# --- kinds


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(
    tmp_path: Path, settings: Settings, ending: str, streaming: bool
) -> None:
    train = write(tmp_path / f"rows{ending}")
    prompts = load({"train": train, "streaming": streaming, **MAPPED}, settings)
    found = {one.index: one for step in range(1, 11) for one in prompts.for_step(step)}
    assert sorted(found) == list(range(40))
    assert set(prompts.columns) == {"prompt", "answer", "level"}
    assert found[7].content == "7+1?" and found[7].row["level"] == 2
    assert str(found[7].row["answer"]) == "8"


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_file_is_read_without_a_word_to_anybody(
    tmp_path: Path, settings: Settings, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("datasets.load.get_session", lambda: asked.append("the Hub"))
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    load({"train": write(tmp_path / f"rows{ending}"), **MAPPED}, settings)
    assert asked == []


def test_rows_in_the_job_and_uploaded_files_are_sources_too(settings: Settings) -> None:
    inline = load({"train": ROWS, **MAPPED}, settings)
    with Path(write(settings.runs_dir.parent / "rows.jsonl")).open("rb") as content:
        file = Uploads(settings.runs_dir).add(content, "my.jsonl", "fine-tune", new_id(None))
    uploaded = load({"train": file.id, "eval": ROWS[:3], **MAPPED}, settings)
    assert inline.for_step(2) == uploaded.for_step(2)
    assert inline.versions == {} and set(uploaded.versions) == {"train"}
    assert [prompt.index for prompt in uploaded.held_out()[""]] == [0, 1, 2]


def test_a_row_keeps_what_is_in_it_whatever_other_rows_have(
    tmp_path: Path, settings: Settings
) -> None:
    rows = [{"prompt": "a", "x": {"p": 1}}, {"prompt": "b", "x": "text", "y": 2}]
    prompts = load({"train": write(tmp_path / "x.jsonl", rows), "shuffle": False}, settings)
    first, second, *_ = prompts.for_step(1)
    assert first.row == {"prompt": "a", "x": {"p": 1}, "y": None}
    assert second.row == rows[1]


@pytest.mark.parametrize(
    ("source", "opener"),
    [
        ((), sources._inline),
        ("https://example.org/rows.jsonl", sources._url),
        ("hf://datasets/a/b", sources._url),
        ("file-" + "0" * 24, sources._uploaded),
        ("file-x.jsonl", sources._file),
        ("/data/rows.txt", sources._file),
        ("openai/gsm8k", sources._hub),
    ],
)
def test_a_source_is_of_the_kind_that_it_looks_like(source: Any, opener: object) -> None:
    assert opener_of(source) is opener


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("file:///etc/passwd", "a URL, which is not fetched"),
        ("file-abc", "'file-abc'; expected the id of an uploaded file, 'file-' and 24 hex"),
        (
            "a/b/c",
            "data.train is 'a/b/c'; expected a file ending in .jsonl, .json, .csv or .parquet",
        ),
        ("a\0b.jsonl", r"data.train is 'a\x00b.jsonl', with a NUL; expected a file"),
        ("a" * 300 + ".jsonl", "aaa: File name too long; expected a file"),
    ],
)
def test_what_is_no_source_is_a_sentence(settings: Settings, source: str, sentence: str) -> None:
    with pytest.raises(BadRequest) as raised:
        load({"train": source}, settings)
    assert sentence in raised.value.detail


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt"\n', "line 3: Expecting ':' delimiter at "),
        ("a.jsonl", '{"prompt": "x"}\n[1]\n', "line 2 of dataset '"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "line 1: 'utf-8' codec can't decode byte 0xff"),
        ("a.json", '[{"prompt": "x"}, 3]', "a.json' is 3; expected a JSON object"),
        ("a.json", '[{"prompt": "x"}, ', "a.json' cannot be read as JSON: "),
        ("a.csv", "prompt,answer\nx,1\ny,2,3\n", "Expected 2 fields in line 3, saw 3"),
        (
            "a.csv",
            "prompt,answer,answer\nx,1,2\n",
            "a.csv' has two columns 'answer'; expected each",
        ),
        (
            "a.csv",
            "prompt,answer\n\nx\n",
            "a.csv' cannot be read as CSV: Expected 2 fields in line 3",
        ),
        ("a.csv", 'prompt,answer\n"x\ny",1\n"z,2\n', "line 4: unexpected end of data; expected"),
        ("a.csv", b"prompt\nx\n\xff\n", "line 3: 'utf-8' codec can't decode byte 0xff"),
        ("a.parquet", "no parquet", "a.parquet' cannot be read: "),
        ("a.jsonl", "", "a.jsonl' has no rows; expected at least one"),
        ("a.csv", "prompt,answer\n", "a.csv' has no rows; expected at least one"),
        ("a.csv", "", "a.csv' has no rows; expected at least one"),
        ("a.txt", "x", "is not a file that can be read; expected a file ending in"),
        ("a.parquet", NO_ROWS, "a.parquet' has no rows; expected at least one"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_file_is_named_with_the_line(
    tmp_path: Path,
    settings: Settings,
    name: str,
    content: str | bytes,
    sentence: str,
    streaming: bool,
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadRequest) as raised:
        load({"train": str(path), "streaming": streaming}, settings)
    assert sentence in raised.value.detail and name in raised.value.detail


def test_an_uploaded_file_that_came_to_another_host_is_brought_in(
    settings: Settings, tmp_path: Path
) -> None:
    with Path(write(tmp_path / "rows.jsonl")).open("rb") as content:
        file = Uploads(settings.runs_dir).add(content, "my.jsonl", "fine-tune", new_id(None))
    (settings.runs_dir / ".files").rename(tmp_path / "elsewhere")
    with pytest.raises(NotFound, match="no uploaded file"):
        load({"train": file.id, **MAPPED}, settings)
    command = f"mv {tmp_path}/elsewhere {settings.runs_dir}/.files"
    refreshed = settings.model_copy(update={"runs_refresh": command})
    assert load({"train": file.id, **MAPPED}, refreshed).for_step(1)


def test_an_uploaded_file_whose_name_says_no_format_is_refused(settings: Settings) -> None:
    uploads = Uploads(settings.runs_dir)
    file = uploads.add(io.BytesIO(b'{"prompt": "x"}\n'), "rows.txt", "fine-tune", new_id(None))
    with pytest.raises(
        BadRequest, match=r"\(rows\.txt\); expected one uploaded with a name ending in"
    ):
        load({"train": file.id}, settings)


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_a_row_that_stops_everything_else_while_it_is_read_is_refused(
    tmp_path: Path, ending: str
) -> None:
    row = '{"prompt": [' + "[]," * 400_000 + "[]]}"
    path = tmp_path / f"a{ending}"
    path.write_text(f'[{{"prompt": "x"}}, {row}]' if ending == ".json" else row)
    with pytest.raises(BadRequest, match="of these in a row"):
        load({"train": str(path)}, Settings())


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv"])
def test_too_many_columns_are_refused(tmp_path: Path, ending: str) -> None:
    path, names = tmp_path / f"a{ending}", [f"c{number}" for number in range(10_001)]
    rows = [json.dumps({name: 1}) for name in names]
    texts = {".jsonl": "\n".join(rows), ".json": f"[{','.join(rows)}]", ".csv": ",".join(names)}
    path.write_text(texts[ending])
    with pytest.raises(BadRequest, match="has more than 10000 columns"):
        load({"train": str(path)}, Settings())


def test_a_list_is_read_row_by_row(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.json", list[dict[str, Any]]()
    for size in (0, 10, tables.WINDOW - 20, tables.WINDOW, 3 * tables.WINDOW, 9 * tables.WINDOW):
        rows += [{"prompt": '\u00e4\\"],' * (size // 5)}, {f"column {size}": [{"a": [1]}]}]
    for text in (json.dumps(rows, ensure_ascii=False), "\ufeff \n" + json.dumps(rows, indent=9)):
        path.write_text(text)
        found = tables.JsonTable("a", path, None).rows()
        assert [*tables.JsonTable("a", path, None).stream()] == rows
        assert len(found) == len(rows)
        assert found.column_names[:2] == ["prompt", "column 0"]
        for index, row in enumerate(rows):
            assert {k: v for k, v in found[index].items() if v is not None} == row
    for wrong in ("[{}", "[{},]", "[{} {}]", "[{}] x", "[,]", '[{"a": tru}]', "["):
        path.write_text(wrong)
        with pytest.raises(BadRequest, match="cannot be read as JSON"):
            tables.JsonTable("a", path, None).rows()
    path.write_text("[]")
    assert len(tables.JsonTable("a", path, None).rows()) == 0


@pytest.mark.parametrize("shape", ["text", "list", "table", "map"])
def test_a_parquet_file_that_takes_far_more_room_than_it_has_is_refused(
    tmp_path: Path, shape: str
) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"

    def written(num_rows: int) -> int:
        indices = pyarrow.array([0] * num_rows, pyarrow.int32())
        column: Any = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["a" * (1 << 20)]))
        if shape == "list":
            offsets = pyarrow.array(range(num_rows + 1), pyarrow.int32())
            column = pyarrow.ListArray.from_arrays(offsets, column)
        elif shape == "table":
            column = pyarrow.StructArray.from_arrays([column], ["inner"])
        elif shape == "map":
            offsets = pyarrow.array(range(num_rows + 1), pyarrow.int32())
            numbers = pyarrow.array([str(number % 7) for number in range(num_rows)])
            column = pyarrow.MapArray.from_arrays(offsets, numbers, column)
        table = pyarrow.table({"prompt": column})
        pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
        return path.stat().st_size

    def opened() -> None:
        job = make_job({"train": str(path)})
        ask = SourceRequest("data.train", str(path), "train", job.data, Settings())
        open_source(ask)

    assert written(1_000_000) < 1 << 19  # a TB
    with pytest.raises(BadRequest, match="its rows take more than 1073741824"):
        opened()
    written(100)
    opened()


def test_jobs_read_files_of_the_folders_that_they_may_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    inside, outside = write(tmp_path / "data/a.jsonl"), write(tmp_path / "b.jsonl")
    (tmp_path / "data/link.jsonl").symlink_to(outside)
    settings = Settings(data_dirs=(tmp_path / "data",), runs_dir=tmp_path / "runs")
    assert load({"train": inside, **MAPPED}, settings).num_train == 40
    for path in (outside, str(tmp_path / "data/link.jsonl"), str(tmp_path / "data/../b.jsonl")):
        with pytest.raises(
            BadRequest, match=r"jobs may read files below these folders only: .*data"
        ):
            load({"train": path, **MAPPED}, settings)
    beyond = Settings(host="0.0.0.0", token="x" * 8, runs_dir=tmp_path / "runs")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="HONE_DATA_DIRS is not set"):
        load({"train": inside, **MAPPED}, beyond)


# --- names, templates, filters


def test_columns_have_the_names_that_the_job_gives_them(settings: Settings) -> None:
    names = {"prompt": "question", "target": "answer"}
    (prompt, *_) = load({"train": ROWS, "columns": names, "shuffle": False}, settings).for_step(1)
    assert prompt.row == {"level": 0, "prompt": "0+1?", "target": "1"}
    with pytest.raises(
        BadRequest, match=r"no column 'anwser' \(data.columns.target\); did you mean"
    ):
        load({"train": ROWS, "columns": {"target": "anwser"}}, settings)
    with pytest.raises(
        BadRequest, match="has no column 'prompt'; its columns are question, answer"
    ):
        load({"train": ROWS}, settings)


def test_a_template_makes_text_and_messages_make_a_conversation(settings: Settings) -> None:
    text = {"template": "Q: {{ question }}\nA:", "shuffle": False}
    (prompt, *_) = load({"train": ROWS, **text}, settings).for_step(1)
    assert prompt.content == "Q: 0+1?\nA:" and prompt.row == ROWS[0]
    messages = [
        {"role": "system", "content": "Level {{ level }}."},
        {"role": "user", "content": "{{ question }}"},
    ]
    prompts = load({"train": ROWS, "messages": messages, "shuffle": False}, settings)
    assert prompts.for_step(1)[1].content == (
        {"role": "system", "content": "Level 1."},
        {"role": "user", "content": "1+1?"},
    )
    with pytest.raises(BadRequest) as raised:
        load({"train": ROWS, "template": "{{ qestion }}"}, settings).for_step(1)
    assert "data.template does not work on row" in raised.value.detail
    assert "'qestion' is undefined; its columns are question, answer" in raised.value.detail


@pytest.mark.parametrize("streaming", [False, True])
def test_a_filter_and_max_samples_choose_rows_by_their_own_numbers(
    settings: Settings, streaming: bool
) -> None:
    chosen = {"filter": "level == 3", "max_samples": 4, "streaming": streaming}
    prompts = load({"train": ROWS, "eval": ROWS, **chosen, **MAPPED}, settings)
    assert sorted(indices(prompts, 1)) == sorted(indices(prompts, 2)) == [3, 8, 13, 18]
    assert [prompt.index for prompt in prompts.held_out()[""]] == list(range(3, 40, 5))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_filter_that_takes_too_long_over_all_rows_is_a_sentence(
    settings: Settings, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tuple({"prompt": f"{number}?"} for number in range(1000))
    slow = "range(99999) | sum < 0"
    monkeypatch.setattr(prompts_module, "FILTER_CPU_S", 0.05)
    with pytest.raises(BadRequest) as raised:
        prompts = load({"train": rows, "filter": slow, "streaming": streaming}, settings)
        prompts.for_step(1)
    said = re.fullmatch(
        r"data.filter 'range\(99999\) \| sum < 0' took (\S+) s of processor time for (\d+) rows of "
        r"data.train.*; expected at most 0.05 s: filter .*",
        raised.value.detail,
    )
    assert said and float(said[1]) >= 0.05 and int(said[2]) < len(rows)
    some = {"train": rows[:20], "filter": f"{slow} or prompt == '13?'", "streaming": streaming}
    monkeypatch.setattr(prompts_module, "FILTER_CPU_S", 60.0)
    assert load(some, settings).for_step(1)[0].content == "13?"


def test_a_filter_that_no_row_passes_or_that_breaks_is_a_sentence(settings: Settings) -> None:
    with pytest.raises(BadRequest, match=r"data.filter 'level > 9' is true of no row"):
        load({"train": ROWS, "filter": "level > 9", **MAPPED}, settings)
    with pytest.raises(BadRequest, match=r"data.filter does not work on row 0 of data.train in"):
        load({"train": ROWS, "filter": "levle > 1", **MAPPED}, settings)
    with pytest.raises(BadRequest, match=r"data.filter does not work: line 1: "):
        load({"train": ROWS, "filter": "level >", **MAPPED}, settings)


# --- order


def test_a_shuffle_seed_alone_decides_the_order(settings: Settings) -> None:
    def order(**data: Any) -> list[int]:
        seed = data.pop("seed", 0)
        return indices(load({"train": ROWS, **MAPPED, **data}, settings, seed=seed), 1, 2, 3)

    assert order(seed=1) != order(seed=2)
    assert order(seed=1, shuffle_seed=5) == order(seed=2, shuffle_seed=5) == order(seed=5)
    assert order(shuffle=False) == list(range(12)) == order(shuffle=False, streaming=True)


def test_a_shuffle_within_a_buffer_gives_every_row_once_and_holds_no_more() -> None:
    read = 0

    def rows():
        nonlocal read
        for read in range(1, 101):
            yield Problem(read - 1, {})

    taken: list[int] = []
    for problem in shuffled_within(rows(), 10, random.Random(0)):
        taken.append(problem.index)
        assert read <= len(taken) + 10
    assert sorted(taken) == list(range(100)) and taken != list(range(100))


def stream(job: Job, count: int, num_rounds: int = 0) -> tuple[StreamOrder, list[int]]:
    began: list[int] = []

    def begin():
        began.append(0)
        return (Problem(index, {}) for index in range(count))

    return StreamOrder(job, begin, num_rounds), began


def test_a_stream_continues_in_the_same_order_for_any_caller_at_any_time() -> None:
    job = make_job({"train": "x.jsonl", "streaming": True, "shuffle_buffer": 7}, max_staleness=2)
    whole, _ = stream(job, 30)
    steps = [[one.index for one in whole.take(step, 0)] for step in range(1, 40)]
    resumed, _ = stream(job, 30)
    assert [one.index for one in resumed.take(23, 0)] == steps[22]
    assert [one.index for one in resumed.take(24, 0)] == steps[23]
    assert [one.index for one in resumed.take(2, 0)] == steps[1]
    flat = [index for step in steps for index in step]
    passes = [flat[start : start + 30] for start in range(0, 150, 30)]
    assert all(sorted(one) == list(range(30)) for one in passes)
    assert len({tuple(one) for one in passes}) == 5


def test_a_stream_holds_the_steps_under_way_and_skips_passes_that_it_knows() -> None:
    job = make_job({"train": "x.jsonl", "streaming": True}, max_staleness=2)
    order, began = stream(job, 12)
    order.take(1, 0)
    began.clear()
    order.take(4, 0), order.take(2, 0)
    assert began == [0], "one more pass, and nothing again"
    began.clear()
    order.take(300, 0)
    assert len(began) <= 2
    assert len(order._main._held) <= 16


def test_rows_of_a_stream_that_replace_others_are_fresh_ones() -> None:
    job = make_job({"train": "x.jsonl", "streaming": True}, sampling={"refills": 3})
    order, _ = stream(job, 50, 3)
    rounds = [[one.index for one in order.take(2, round)] for round in range(4)]
    taken = [index for one in rounds for index in one]
    assert len(set(taken)) == len(taken) and len(rounds[1]) >= 2
    again, _ = stream(job, 50, 3)
    assert [[one.index for one in again.take(2, round)] for round in range(4)] == rounds
    small, _ = stream(job, 3, 3)
    assert small.take(1, 1) == []


# --- the same data on resuming


def test_a_file_that_changed_since_the_submission_is_refused_by_name(
    tmp_path: Path, settings: Settings
) -> None:
    for ending in (".jsonl", ".csv"):
        path = tmp_path / f"rows{ending}"
        job = make_job({"train": write(path), **MAPPED})
        versions = load_prompts(job, settings).versions
        assert load_prompts(job, settings, versions).versions == versions
        write(path, ROWS[:-1])
        with pytest.raises(OperatorActionNeeded) as raised:
            load_prompts(job, settings, versions)
        assert f"'{path}' has changed since the job was submitted" in raised.value.detail
        assert f"expected {versions['train']}" in raised.value.detail


def test_a_file_that_changes_under_a_running_job_stops_it(
    tmp_path: Path, settings: Settings
) -> None:
    path = tmp_path / "rows.jsonl"
    prompts = load({"train": write(path), **MAPPED}, settings)
    first = prompts.for_step(1)
    write(path)
    assert prompts.for_step(1) == first, "written again, with the same content"
    write(path, [{**row, "question": "other"} for row in ROWS])
    with pytest.raises(OperatorActionNeeded, match="has changed since the job was submitted"):
        prompts.for_step(2)
    path.unlink()
    with pytest.raises(Unavailable, match="cannot be read any more: No such file"):
        prompts.for_step(3)


def test_a_dataset_of_the_hub_is_read_at_the_commit_of_the_submission(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def dataset_info(_: Any, name: str, *, revision: str | None, timeout: float) -> Any:
        asked.append((name, revision))
        return type("Info", (), {"sha": "a" * 40})()

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    spec = make_job({"train": "openai/gsm8k", "config": "main", "revision": "v1"}).data
    ask = SourceRequest("data.train", "openai/gsm8k", "train", spec, settings)
    table: Any = open_source(ask)
    assert asked == [("openai/gsm8k", "v1")] and table.version == "a" * 40
    assert table.arguments["revision"] == "a" * 40
    assert (table.arguments["name"], table.arguments["split"]) == ("main", "train")
    again: Any = open_source(
        SourceRequest("data.train", "openai/gsm8k", "train", spec, settings, wanted="b" * 40)
    )
    assert len(asked) == 1 and again.arguments["revision"] == "b" * 40


@pytest.mark.parametrize(("separator", "called"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_csv_with_other_separators_than_commas_says_so(
    settings: Settings, tmp_path: Path, separator: str, called: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt{separator}answer\n1?{separator}1\n")
    with pytest.raises(BadRequest) as refused:
        load({"train": str(path)}, settings)
    assert refused.value.detail == (
        f"dataset {str(path)!r} has {called} between its columns (prompt, answer), and is read "
        "with commas; save it with commas, or as .jsonl"
    )
    path.write_text("prompt\n1; 2?\n")
    assert load({"train": str(path)}, settings).num_train == 1, "one column is no fault"


@pytest.mark.parametrize("streaming", [False, True])
def test_messages_of_a_parquet_file_are_as_they_were_written(
    tmp_path: Path, settings: Settings, streaming: bool
) -> None:
    def calling(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}

    first = [{"role": "user", "content": "a", "weight": 0}, calling({"city": "Rome"})]
    second = [calling({"day": 2}), {"role": "user", "content": "b"}]
    rows = [{"prompt": first, "x": {"p": 1}}, {"prompt": second, "x": {"q": 2}}]
    train = write(tmp_path / "chats.parquet", rows)
    prompts = load({"train": train, "streaming": streaming, "shuffle": False}, settings)
    one, other, *_ = prompts.for_step(1)
    assert (one.content, other.content) == (tuple(first), tuple(second))
    assert other.row["x"] == {"p": None, "q": 2}  # no message: graders see the columns as they are


CSV = """\
\ufeffprompt,id,level,score,gap,big,known,flag
"1,2 ""and""
3",007,7,0.5,1,1,NA,True
b,008,-8,2.25,,9223372036854775808,None,False

"",009,0,-1.0,3,2,null,True
"""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_keeps_each_text_and_reads_numbers_that_are_written_as_such(
    tmp_path: Path, settings: Settings, end: str, streaming: bool
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(CSV.replace("\n", end).encode())
    data = {"train": str(path), "streaming": streaming, "shuffle": False, "template": "{{ id }}"}
    prompts = load(data, settings, sampling={"prompts_per_step": 3})
    common = {"prompt", "id", "level", "score", "gap", "big", "known", "flag"}
    values = [
        (f'1,2 "and"{end}3', "007", 7, 0.5, "1", "1", "NA", "True"),
        ("b", "008", -8, 2.25, "", "9223372036854775808", "None", "False"),
        ("", "009", 0, -1.0, "3", "2", "null", "True"),
    ]
    assert set(prompts.columns) == common
    for prompt, expected in zip(prompts.for_step(1), values, strict=True):
        found = tuple(prompt.row.values())
        assert (found, [*map(type, found)]) == (expected, [*map(type, expected)])
    notes = [note.partition(f" of dataset '{path}' was read as ") for note in notes_of(prompts)]
    told = [(column, rest.partition(",")[0]) for column, _, rest in notes]
    assert told == [("column 'level'", "integers"), ("column 'score'", "floats")]


def notes_of(prompts: Prompts) -> list[str]:
    return [note for table in prompts.tables for note in tables.notes_of(table)]


def test_a_long_field_and_a_column_without_a_name_are_read(
    tmp_path: Path, settings: Settings
) -> None:
    (tmp_path / "rows.csv").write_text(f",prompt\nx,{'p' * 200_000}\n")
    (prompt, *_) = load({"train": str(tmp_path / "rows.csv")}, settings).first()
    assert prompt.row == {"Unnamed: 0": "x", "prompt": "p" * 200_000}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("text", ['[{"prompt": "x"}]', '{"prompt": "x"}\n', '\n{"prompt": "x"}'])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_may_begin_with_a_byte_order_mark(
    tmp_path: Path, settings: Settings, name: str, text: str, streaming: bool
) -> None:
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    prompts = load({"train": str(tmp_path / name), "streaming": streaming}, settings)
    assert prompts.first()[0].content == "x" and prompts.columns == ("prompt",)


DATED = {
    "prompt": ["a", "b", "c", "d"],
    "created": [datetime.datetime(2024, 1, 2)] * 4,
    "day": [datetime.date(2024, 1, 2)] * 4,
    "price": [Decimal("1.50")] * 4,
    "raw": [b"x"] * 4,
    "meta": [{"at": [datetime.datetime(2024, 1, 2)], "n": 1}] * 4,
    "level": [1] * 4,
}
KINDS_LEFT_OUT = {
    "created": "timestamp[us]",
    "day": "date32",
    "price": "decimal128(3, 2)",
    "raw": "binary",
    "meta": "timestamp[us]",
}


def dated(path: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(DATED), path)
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_that_json_has_not_are_left_out_where_nothing_reads_them(
    tmp_path: Path, settings: Settings, streaming: bool
) -> None:
    train = dated(tmp_path / "dated.parquet")
    asked = make_job({"train": train, "streaming": streaming, "shuffle": False})
    prompts = load_prompts(asked, settings)
    assert check_rows(asked, prompts)[1].row == {"prompt": "b", "level": 1}
    for note, (column, kind) in zip(notes_of(prompts), KINDS_LEFT_OUT.items(), strict=True):
        assert note.startswith(f"column {column!r} of dataset {train!r} is left out of its rows")
        assert f"its type is {kind}; if a reward reads it, convert" in note


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("data", "key", "column"),
    [
        ({"columns": {"prompt": "created"}}, "data.columns.prompt", "created"),
        ({"template": "{{ prompt }} of {{ row['day'] }}"}, "data.template", "day"),
        ({"filter": "price > 1"}, "data.filter", "price"),
        (
            {"messages": [{"role": "user", "content": "{% if raw %}x{% endif %}"}]},
            "data.messages.0.content",
            "raw",
        ),
    ],
)
def test_a_column_that_json_has_not_is_refused_by_name_and_type_where_it_is_read(
    tmp_path: Path, settings: Settings, data: dict[str, Any], key: str, column: str, streaming: bool
) -> None:
    train = dated(tmp_path / "dated.parquet")
    with pytest.raises(BadRequest) as raised:
        load({"train": train, "streaming": streaming, **data}, settings)
    assert raised.value.detail == (
        f"{key} reads the column {column!r} of dataset {train!r}, whose type is "
        f"{KINDS_LEFT_OUT[column]}; expected text, numbers, or lists and tables of them: convert "
        "the column to text"
    )


def test_a_template_may_name_such_a_column_in_its_text(tmp_path: Path, settings: Settings) -> None:
    data = {
        "train": dated(tmp_path / "dated.parquet"),
        "template": "What day and price? {{ prompt }}",
    }
    assert load({**data, "shuffle": False}, settings).first()[0].content == "What day and price? a"
