"""`hone init`: what it finds in data and model, and that the jobs it writes are valid."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hone.cli import app
from hone.commands import init
from hone.commands.init import TASKS
from hone.first_job import fitted, read_rows
from shared.job import Job
from shared.job.file import load_job
from tests.support.model_folders import make_model_folder

DATA = Path(__file__).parents[2] / "data"
GSM8K = gzip.decompress((DATA / "gsm8k/test.jsonl.gz").read_bytes()).decode().splitlines()


KINDS = ("jsonl", "parquet")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, answers: str | None = None) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["init", *arguments], input=answers)
    return done.exit_code, done.output


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def written(*arguments: str) -> Job:
    code, shown = run(*arguments)
    assert code == 0, shown
    lines = Path("job.toml").read_text().splitlines()
    assert [line for line in lines if " = " in line and not re.search(r"\S +# \w", line)] == []
    return load_job(Path("job.toml"))


def longest(lines: Iterable[str], column: str) -> int:
    return max(len(json.loads(line)[column].split()) for line in lines)


def test_gsm8k_as_published_needs_neither_flags_nor_answers(here: Path) -> None:
    make_model_folder(here / "model", window=2048)
    (here / "train.jsonl").write_text("\n".join(GSM8K[:300]))
    (here / "test.jsonl").write_text("\n".join(GSM8K[300:340]))
    code, shown = run()
    assert code == 0, shown
    job = load_job(here / "job.toml")
    assert (job.data.train, job.data.eval) == (str(here / "train.jsonl"), str(here / "test.jsonl"))
    assert job.data.columns == {"prompt": "question"} and job.rewards[0].grader == "math"
    told = f"system {TASKS['math']} user"
    prompt = len(told.split()) + longest(GSM8K[:340], "question")
    answer = longest(GSM8K[:300], "answer")
    max_tokens = -(-2 * answer // 64) * 64
    assert job.sampling.max_tokens == max_tokens and job.sampling.overlong_prompts == "error"
    assert job.max_model_len == -(-(prompt + max_tokens) // 64) * 64
    assert (job.sampling.prompts_per_step, job.evaluation.num_prompts) == (32, 40)
    assert "300 rows, 40 held out; 'question' is the prompt" in shown
    told = f"the longest prompt has {prompt}, and a completion may have {max_tokens}"
    assert told in " ".join(shown.split())


def test_a_model_that_holds_little_drops_what_is_too_long_and_says_so(here: Path) -> None:
    make_model_folder(here / "model", window=64, chat=False)
    (here / "train.jsonl").write_text("\n".join(GSM8K[:200]))
    job = written()
    assert (job.sampling.max_tokens, job.max_model_len) == (16, 64)
    assert job.sampling.overlong_prompts == "drop" and job.data.eval is None
    assert job.data.template is not None and job.data.template.startswith('{{ row["question"] }}')
    prompts = [f"{json.loads(line)['question']} {TASKS['math']}" for line in GSM8K[:200]]
    too_long = sum(len(prompt.split()) > 48 for prompt in prompts)
    assert f"{too_long} of 200 prompts leave no room" in (here / "job.toml").read_text()


def test_bounds_by_hand() -> None:
    found = fitted([10, 30], [100], window=1000)
    assert (found.max_tokens, found.max_model_len, found.num_overlong) == (256, 320, 0)
    found = fitted([10, 30], [], window=100)
    assert (found.max_tokens, found.max_model_len, found.num_overlong) == (70, 100, 0)
    found = fitted([10, 70, 90], [100], window=100)
    assert (found.max_tokens, found.max_model_len, found.num_overlong) == (25, 100, 1)


def test_opc_sft_stage2_is_graded_by_its_tests(here: Path) -> None:
    (here / "rows.jsonl").write_bytes((DATA / "opc_sft_stage2/rows.jsonl").read_bytes())
    job = written("--model", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "--data", "rows.jsonl")
    assert job.rewards[0].grader == "code_tests" and job.rewards[0].params == {}
    assert job.data.columns == {"prompt": "instruction", "tests": "testcase"}
    assert job.max_model_len is None and job.sampling.max_tokens == 1024


def test_known_data_sets_of_the_hub_need_no_look(here: Path) -> None:
    job = written("--model", "Qwen/Qwen2.5-1.5B-Instruct", "--data", "openai/gsm8k")
    assert (job.name, job.data.config, job.data.eval) == ("gsm8k", "main", "openai/gsm8k")
    assert job.rewards[0].grader == "math"
    hub = "OpenCoder-LLM/opc-sft-stage2"
    job = written("--model", "a/b", "--data", hub, "--force")
    assert (job.data.train_split, job.data.eval_split) == ("train[200:]", "train[:200]")
    code, shown = run("--model", "a/b", "--data", "some/thing", "--force")
    assert code == 2 and "name the one with the prompt by --prompt" in " ".join(shown.split())
    job = written("--model", "a/b", "--data", "some/thing", "--prompt", "q", "--force")
    assert job.data.columns == {"prompt": "q"} and job.rewards[0].grader == "llm_judge"


def test_chats_are_recognized_with_and_without_their_answer(here: Path) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "w3?"}]
    answered = [*said, {"role": "assistant", "content": "w4"}]
    make_model_folder(here / "model")
    write(here / "chats.jsonl", [{"messages": said}])
    job = written("--reward", "judge")
    assert job.data.columns == {"prompt": "messages"} and job.data.messages is None
    assert "{{ item.prompt }}" in str(job.rewards[0].params["rubric"])
    write(here / "chats.jsonl", [{"messages": answered}])
    job = written("--reward", "judge", "--force")
    assert job.data.messages is not None
    assert [each.role for each in job.data.messages] == ["system", "user"]
    assert job.data.messages[1].content == '{{ row["messages"][-2].content }}'


def test_a_function_of_ones_own_is_written_beside_the_job(here: Path) -> None:
    make_model_folder(here / "model")
    write(here / "train.jsonl", [{"prompt": "w3?", "solution": "so #### 4"}])
    job = written("--reward", "function")
    assert job.rewards[0].source == (here / "rewards.py").read_text()
    assert job.data.columns == {"answer": "solution"}
    reward = runpy.run_path(str(here / "rewards.py"))["reward"]
    chat = [{"role": "assistant", "content": "I think it is 4."}]
    assert reward(["it is 5", chat], answer=["so #### 4", 4]) == [0.0, 1.0]
    write(here / "train.jsonl", [{"prompt": "w3?"}])
    written("--reward", "function", "--force")
    reward = runpy.run_path(str(here / "rewards.py"))["reward"]
    assert reward(["", "x" * 1000], prompts=["", ""]) == [1.0, 0.5]


@pytest.mark.parametrize("reward", ["judge", "function"])
def test_a_chat_model_gets_plain_text_as_a_chat(here: Path, reward: str) -> None:
    make_model_folder(here / "model")
    write(here / "train.jsonl", [{"question": "w3?", "answer": "w4"}])
    job = written("--reward", reward)
    assert job.data.messages is not None
    said = [(each.role, each.content) for each in job.data.messages]
    assert said == [("user", '{{ row["question"] }}')]
    assert job.data.columns == {} and (job.data.template, job.data.system_prompt) == (None, None)
    if reward == "judge":
        assert "{{ item.question }}" in str(job.rewards[0].params["rubric"])
    make_model_folder(here / "base", chat=False)
    job = written("--model", "base", "--reward", reward, "--force")
    assert job.data.messages is None and str(job.data.template).startswith('{{ row["question"] }}')


def test_bare_results_are_no_measure_of_a_solution(here: Path) -> None:
    make_model_folder(here / "model", window=2048)
    write(here / "train.jsonl", [{"question": "w3?", "answer": 4}] * 2)
    assert written("--reward", "math").sampling.max_tokens == 512
    assert written("--reward", "function", "--force").sampling.max_tokens == 64
    write(here / "train.jsonl", [{"question": "w3?", "answer": "w1 " * 33}])
    assert written("--reward", "math", "--force").sampling.max_tokens == 128


def test_three_questions_are_asked_at_a_terminal(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model_folder(here / "model")
    write(here / "train.jsonl", [{"question": "w3?", "answer": "#### 4"}])
    monkeypatch.setattr(init, "is_terminal", lambda: True)
    code, shown = run(answers="\n\nfunction\n")
    assert code == 0, shown
    assert "Which model is trained: a folder, or a Hugging Face id? [model] " in shown
    data = "Which problems does it train on: a file, or a Hugging Face dataset id? [train.jsonl] "
    assert data in shown
    finding = "train.jsonl: 1 rows, none held out; 'question' is the prompt, 'answer' is the right"
    asked = "\nWhat grades answers: math, code, judge or function? [math] "
    assert 0 < shown.index(finding) < shown.index(asked)
    assert load_job(here / "job.toml").rewards[0].file == "rewards.py"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is not given, and there is no terminal to ask at"),
        (["--model", "no/such/folder"], "there is no folder 'no/such/folder' here"),
        (["--model", "a/b", "--data", "x.jsonl"], "no data file at 'x.jsonl'"),
        (["--model", "a/b", "--data", "rows.txt"], "expected a file ending in .jsonl, .json"),
        (["--model", "a/b", "--prompt", "quest"], "no column 'quest'; did you mean 'question'?"),
        (["--model", "a/b", "--reward", "maths"], "expected one of math, code, judge, function"),
        (["--model", "a/b", "--reward", "code"], "the reward code needs a column with tests"),
        (["--model", "a/b", "--data", "odd.csv"], "is known to be the prompt: a, b; --prompt"),
        (["--model", "a/b", "--data", "torn.json"], "line 2 is not JSON"),
        (["--model", "a/b", "--data", "bare.jsonl"], "the rows of bare.jsonl have no columns"),
        (
            ["--model", "a/b", "--data", "bare.jsonl", "--prompt", "q"],
            "the rows of bare.jsonl have no columns",
        ),
        (
            ["--model", "a/b", "--data", "wide.csv"],
            "'wide.csv', line 3: it has more values than the header has columns, 2",
        ),
    ],
)
def test_what_cannot_become_a_job_is_a_sentence(
    here: Path, arguments: list[str], sentence: str
) -> None:
    write(here / "train.jsonl", [{"question": "w3?", "answer": "#### 4"}])
    (here / "odd.csv").write_text("a,b\n1,2\n")
    (here / "bare.jsonl").write_text("{}\n{}\n")
    (here / "wide.csv").write_text("prompt,answer\nw3,4\nw4,5,6\n")
    (here / "torn.json").write_text('{"prompt": 1}\n{"prompt"\n')
    (here / "rows.txt").write_text("x")
    code, shown = run(*arguments)
    assert code == 2 and sentence in " ".join(shown.split()), shown
    assert not (here / "job.toml").exists()


def test_a_file_that_is_there_is_not_replaced_unasked(here: Path) -> None:
    (here / "job.toml").write_text("mine")
    code, shown = run("--model", "a/b", "--data", "openai/gsm8k")
    assert code == 2 and "job.toml is there already; --force replaces it" in shown
    assert (here / "job.toml").read_text() == "mine"


@pytest.mark.parametrize("prompt", [None, ""])
def test_a_row_without_a_prompt_is_named_and_no_job_is_written(here: Path, prompt: Any) -> None:
    make_model_folder(here / "model", window=2048)
    write(here / "train.jsonl", [{"question": "1+1?", "answer": "2"}] * 2)
    write(here / "test.jsonl", [{"question": "2+2?"}, {"question": prompt}])
    code, shown = run("--model", "model", "--data", "train.jsonl", "--reward", "math")
    assert code == 2
    assert f"row 1, column 'question': got {prompt!r}; expected a prompt" in " ".join(shown.split())
    assert not (here / "job.toml").exists()


def test_a_parquet_file_is_looked_at_as_the_same_rows_in_jsonl(here: Path) -> None:
    """Reads columns, rows and lengths of a file of 300 rows, more than are in memory at once."""
    import pyarrow
    import pyarrow.parquet

    make_model_folder(here / "model", window=2048)
    rows = [{"question": f"{number} + 1 ?", "answer": str(number + 1)} for number in range(300)]
    for name, part in (("train", rows), ("test", rows[:7])):
        write(here / f"{name}.jsonl", part)
        dated = [{**row, "day": dt.date(2024, 1, 1), "of": None} for row in part]
        table = pyarrow.Table.from_pylist(dated)
        pyarrow.parquet.write_table(table, here / f"{name}.parquet")
    jobs = {ending: written("--data", f"train.{ending}", "--force") for ending in KINDS}
    assert jobs["parquet"].evaluation.num_prompts == 7
    (jsonl, parquet) = (jobs[ending].model_dump(exclude={"data"}) for ending in KINDS)
    assert parquet | {"name": ""} == jsonl | {"name": ""}
    assert jobs["parquet"].data.columns == {"prompt": "question"}
    assert jobs["parquet"].data.eval == str(here / "test.parquet")


def test_a_file_that_is_no_parquet_is_refused_with_its_name(here: Path) -> None:
    make_model_folder(here / "model", window=2048)
    (here / "train.parquet").write_text("no parquet")
    code, shown = run("--data", "train.parquet")
    assert code == 2
    assert "'train.parquet' cannot be read: " in shown


@pytest.mark.parametrize("text", ['[{"prompt": "x"}]', '{"prompt": "x"}\n'])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_first_job_reads_json_with_a_byte_order_mark(
    tmp_path: Path, name: str, text: str
) -> None:
    if name == "rows.jsonl" and text.startswith("["):
        text = '{"prompt": "x"}'
    (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
    assert read_rows(tmp_path / name) == [{"prompt": "x"}]
