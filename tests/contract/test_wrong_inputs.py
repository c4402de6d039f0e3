"""What is wrong is said in a sentence, as early as it can be known. The page docs/errors.md is made
of what these cases are answered: `python -m tests.contract.test_wrong_inputs --write` renews it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from hone.cli import app
from tests.support.model_folders import CONFIG, make_model_folder
from tests.support.reward_service import running_service
from tests.support.served_stack import ServedStack, quiet_logs, served_stack

PAGE = Path(__file__).parents[2] / "docs/errors.md"

JOB: dict[str, Any] = {
    "name": "mine",
    "model": "model",
    "steps": 2,
    "data": {"train": "rows.jsonl"},
    "sampling": {"prompts_per_step": 2, "group_size": 2, "max_tokens": 8},
    "rewards": [{"grader": "math"}],
}
TOML = """name = "mine"
model = "model"
steps = 2

[data]
train = "rows.jsonl"

[[rewards]]
grader = "math"
"""
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
ROWS = [{"prompt": f"w{number} w4", "answer": str(number)} for number in range(3, 9)]


@dataclass(frozen=True)
class Place:
    """A folder with a job, its data and its model, and a stack to submit to."""

    folder: Path
    stack: ServedStack
    http: httpx.Client

    def write(self, name: str, *rows: Any) -> str:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    def model(self, name: str, **config: Any) -> Path:
        folder = make_model_folder(self.folder / name, window=32)
        if config:
            (folder / "config.json").write_text(json.dumps(CONFIG | config))
        return folder


@dataclass(frozen=True)
class Answer:
    sentence: str
    code: str


@dataclass(frozen=True)
class Case:
    """A wrong input, as the page shows it, and what gives its answer."""

    shown: str
    ask: Callable[[Place], Answer]


def hone(*arguments: str, **environment: str) -> Callable[[Place], Answer]:
    """A command, in the folder of the job."""

    def ask(place: Place) -> Answer:
        env = {"HONE_ORCHESTRATOR_URL": place.stack.url} | environment
        done = CliRunner().invoke(app, arguments, env=env, catch_exceptions=False)
        sentence = " ".join(done.output.split()).removeprefix("hone: ")
        return Answer(sentence, f"exit {done.exit_code}")

    return ask


def toml(change: Callable[[str], str]) -> Callable[[Place], Answer]:
    """`hone submit` of a job file that was changed."""

    def ask(place: Place) -> Answer:
        (place.folder / "changed.toml").write_text(change(TOML))
        return hone("submit", "changed.toml")(place)

    return ask


def added(text: str) -> Callable[[Place], Answer]:
    return toml(lambda job: f"{text}\n{job}")


def set_to(*changes: str) -> Callable[[Place], Answer]:
    words = [word for change in changes for word in ("--set", change)]
    return hone("submit", "job.toml", *words)


def job(**changes: Any) -> Callable[[Place], Answer]:
    """A job by `POST /v1/jobs`; a function of the place makes a value."""

    def ask(place: Place) -> Answer:
        document = JOB | {"model": str(place.folder / "model")}
        document["data"] = {"train": str(place.folder / "rows.jsonl")}
        for key, value in changes.items():
            given = value(place) if callable(value) else value
            document[key] = {**document.get(key, {}), **given} if isinstance(given, dict) else given
        return answered(place.http.post("/v1/jobs", json={"job": document}))

    return ask


def file(name: str, *rows: Any, **data: Any) -> Callable[[Place], Answer]:
    """A job whose data is a file of these rows."""
    return job(data=lambda place: {"train": str(place.folder / place.write(name, *rows)), **data})


def text_file(name: str, text: str) -> Callable[[Place], Answer]:
    def written(place: Place) -> dict[str, str]:
        (place.folder / name).write_text(text)
        return {"train": str(place.folder / name)}

    return job(data=written)


def model(name: str, spoil: Callable[[Path], Any], **config: Any) -> Callable[[Place], Answer]:
    """A job whose model folder was spoiled."""

    def spoiled(place: Place) -> str:
        folder = place.model(name, **config)
        spoil(folder)
        return str(folder)

    return job(model=spoiled)


def api(method: str, path: str, **request: Any) -> Callable[[Place], Answer]:
    return lambda place: answered(place.http.request(method, path, **request))


def openenv(place: str) -> dict[str, str]:
    return {"kind": "openenv", "url": f"http://{place}"}


def answered(response: httpx.Response) -> Answer:
    return Answer(response.json()["detail"], f"HTTP {response.status_code}")


def same_key_twice(place: Place) -> Answer:
    key = {"idempotency-key": "once"}
    document = JOB | {"model": str(place.folder / "model")}
    document |= {"data": {"train": str(place.folder / "rows.jsonl")}}
    made = place.http.post("/v1/jobs", json={"job": document}, headers=key)
    place.http.post(f"/v1/jobs/{made.json()['id']}/cancel")
    other = document | {"steps": 3}
    return answered(place.http.post("/v1/jobs", json={"job": other}, headers=key))


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-16])


def nothing(_: Path) -> None:
    pass


AT_ONCE = (
    Case("`hone submit nojob.toml`, which is not there", hone("submit", "nojob.toml")),
    Case("a job file that is not TOML: `steps =`", added("steps =")),
    Case("a key that does not exist: `stepz = 3`", added("stepz = 3")),
    Case("a key of a section that does not exist", set_to("sampling.topp=1")),
    Case("TRL's name for a key", added("num_generations = 8")),
    Case("OpenAI's name for a key", set_to("training.n_epochs=2")),
    Case("a section that does not exist", set_to("trainning.loss=grpo")),
    Case("a job without a model", toml(lambda text: text.replace('model = "model"\n', ""))),
    Case("a job without rewards", toml(lambda text: text.partition("[[rewards]]")[0])),
    Case('`steps = "many"`', set_to("steps=many")),
    Case("`steps = -1`", set_to("steps=-1")),
    Case("neither `steps` nor `data.epochs`", toml(lambda text: text.replace("steps = 2\n", ""))),
    Case("`steps = 0` without held-out problems", set_to("steps=0")),
    Case("`sampling.top_p = 1.5`", set_to("sampling.top_p=1.5")),
    Case("`sampling.top_p = 0.9` without `top_k`", set_to("sampling.top_p=0.9")),
    Case('`training.loss = "grppo"`', set_to("training.loss=grppo")),
    Case('`name = "My job"`', set_to("name=My job")),
    Case("`--set steps`", set_to("steps")),
    Case("`--set rewards.3.weight=2` of a job with one reward", set_to("rewards.3.weight=2")),
    Case("a reward file that is not there", set_to('rewards=[{file="your_rewards.py"}]')),
    Case(
        "a reward with `grader` and `file`", set_to('rewards=[{grader="math",file="rewards.py"}]')
    ),
    Case('`environment = {kind = "openenv"}`', set_to('environment={kind="openenv"}')),
    Case("two rewards of one name", set_to('rewards=[{grader="math"},{grader="math"}]')),
    Case(
        "`data.template` and `data.messages`",
        set_to("data.template=x", 'data.messages=[{role="user",content="x"}]'),
    ),
    Case("`stop.target` without held-out problems", set_to("stop.target=0.9")),
    Case('`weight_sync = "lora"` without `[lora]`', set_to("weight_sync=lora")),
    Case("`sync_every = 3` without staleness", set_to("sync_every=3")),
    Case("no orchestrator at its URL", hone("ls", HONE_ORCHESTRATOR_URL="http://127.0.0.1:9")),
    Case("a port that is none", hone("ls", HONE_ORCHESTRATOR_PORT="x")),
    Case("`hone explain` of `sampling.topp`", hone("explain", "sampling.topp")),
    Case(
        "`hone grade --job mine --step 0`",
        hone("grade", "--job", "mine", "--step", "0", "--reward", "x"),
    ),
    Case("`hone ls --metadata team`", hone("ls", "--metadata", "team")),
    Case("`hone grade` without a grader", hone("grade", "--completion", "x")),
    Case("`hone grade` of a row that is no JSON", hone("grade", "math", "--row", "{")),
    Case("`hone init --data no.jsonl`", hone("init", "new.toml", "--data", "no.jsonl")),
    Case(
        "`hone init --reward code` for rows without tests",
        hone("init", "new.toml", "--reward", "code"),
    ),
)

SUBMITTED = (
    Case("a data file that is not there", job(data={"train": "./no.jsonl"})),
    Case(
        "a CSV with semicolons between its columns",
        text_file("semicolons.csv", "prompt;answer\nw3;3\n"),
    ),
    Case("a data file of another kind", text_file("rows.txt", "x")),
    Case("an empty data file", text_file("empty.jsonl", "")),
    Case("a line that is no JSON", text_file("torn.jsonl", '{"prompt": "w3"}\n{"prompt"\n')),
    Case("a URL in place of a file", job(data={"train": "https://example.org/rows.jsonl"})),
    Case("an upload that is not there", job(data={"train": "file-0123456789abcdef01234567"})),
    Case("rows without a prompt", file("questions.jsonl", {"question": "w3", "answer": "3"})),
    Case("a column that is not there", job(data={"columns": {"prompt": "quest"}})),
    Case("a template that names no column", job(data={"template": "{{ question }}"})),
    Case("a template that is none", job(data={"template": "{{ prompt"})),
    Case("a filter that no row passes", job(data={"filter": "answer == 'x'"})),
    Case("a row without a prompt", file("none.jsonl", *ROWS, {"prompt": None, "answer": "1"})),
    Case(
        "a prompt that leaves no room",
        file("long.jsonl", *ROWS, {"prompt": "w3 " * 30, "answer": "1"}),
    ),
    Case("`max_tokens` as large as the model's window", job(sampling={"max_tokens": 32})),
    Case("`max_model_len` above the model's", job(max_model_len=64)),
    Case(
        "no `max_model_len` for a model whose RoPE is another for long sequences",
        model("ntk", nothing, max_position_embeddings=32, rope_parameters=DYNAMIC),
    ),
    Case("`group_size = 1`", job(sampling={"group_size": 1})),
    Case("a model of OpenAI's", job(model="gpt-4o-mini")),
    Case("a model folder that is not there", job(model="./no/model")),
    Case(
        "a model folder without weights",
        model("bare", lambda at: (at / "model.safetensors").unlink()),
    ),
    Case("weights that were cut short", model("cut", cut)),
    Case(
        "weights of another shape than the configuration's",
        model("shaped", nothing, hidden_size=32),
    ),
    Case(
        "weights of fewer layers than the configuration's",
        model("deep", nothing, num_hidden_layers=3),
    ),
    Case(
        "an architecture that is not known",
        model("odd", nothing, architectures=["Qwen2ForCausalLLM"]),
    ),
    Case(
        "a configuration that is no JSON",
        model("torn", lambda at: (at / "config.json").write_text("{")),
    ),
    Case("a model without a tokenizer", model("mute", lambda at: (at / "tokenizer.json").unlink())),
    Case(
        "chat messages for a model without a chat template",
        job(
            model=lambda place: str(make_model_folder(place.folder / "plain", 32, chat=False)),
            data={"system_prompt": "w5"},
        ),
    ),
    Case("a grader that does not exist", job(rewards=[{"grader": "maths"}])),
    Case(
        "a param that a grader does not have",
        job(rewards=[{"grader": "math", "params": {"anser": "a"}}]),
    ),
    Case(
        "a column that a grader needs",
        job(rewards=[{"grader": "math", "params": {"answer": "solution"}}]),
    ),
    Case(
        "a row that no answer could be graded by",
        file("unknown.jsonl", {"prompt": "w3", "answer": None}),
    ),
    Case(
        "tests that assert nothing",
        job(
            data=lambda place: {
                "train": str(
                    place.folder / place.write("tested.jsonl", {"prompt": "w3", "tests": "f(1)"})
                )
            },
            rewards=[{"grader": "code_tests"}],
        ),
    ),
    Case(
        "a judge where the reward service knows none",
        job(
            rewards=[
                {
                    "grader": "llm_judge",
                    "params": {"model": "m", "rubric": "{{ sample.output_text }}"},
                }
            ]
        ),
    ),
    Case("an OpenEnv server of a host that is not allowed", job(environment=openenv("games:8100"))),
    Case("an OpenEnv server that is unreachable", job(environment=openenv("127.0.0.1:9"))),
    Case("a function that cannot be compiled", job(rewards=[{"source": "def reward(:"}])),
)

ASKED = (
    Case("`GET /v1/jobs/nojob`", api("GET", "/v1/jobs/nojob")),
    Case("a parameter that a route does not have", api("GET", "/v1/jobs?statuss=queued")),
    Case("a status that is none", api("GET", "/v1/jobs?status=done")),
    Case(
        "a body that is no JSON",
        api("POST", "/v1/jobs", content=b"{", headers={"content-type": "application/json"}),
    ),
    Case("a body without a job", api("POST", "/v1/jobs", json={"jobb": {}})),
    Case("a key that was used for another job", same_key_twice),
    Case("a method that a path does not have", api("PUT", "/v1/jobs", json={})),
)

SECTIONS = (
    ("At once: by the command, before anything is asked of a service", AT_ONCE),
    ("When a job is submitted, or tried by `--dry-run`", SUBMITTED),
    ("By the API", ASKED),
)

HEAD = """# Wrong inputs, and what is said of them

{count} wrong inputs, with the sentence that each is answered and when it comes. What a command
finds out ends it with exit code 2; what the orchestrator refuses has the HTTP status, and
`hone submit` then prints the same sentence and ends with exit code 2, after HTTP 503 once it has
asked again for a while. (1: the job did not succeed; 3: it is paused; 130: Ctrl-C.) None of them
reaches a running engine. The table is made by the test that tries them
([`test_wrong_inputs.py`](../tests/contract/test_wrong_inputs.py)).
"""


@contextlib.contextmanager
def place(folder: Path) -> Generator[Place]:
    """The stack has the real reward service behind it, for it says what a reward cannot be."""
    here = Path.cwd()
    (folder / "work").mkdir()
    quiet_logs()
    with (
        running_service() as rewards,
        served_stack(folder, reward_url=rewards.url) as stack,
        httpx.Client(base_url=stack.url, timeout=60) as http,
    ):
        found = Place(folder / "work", stack, http)
        found.write("rows.jsonl", *ROWS)
        found.model("model")
        (found.folder / "job.toml").write_text(TOML)
        (found.folder / "rewards.py").write_text("def reward(completions): return [1.0]\n")
        os.chdir(found.folder)
        try:
            yield found
        finally:
            os.chdir(here)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Answer]]:
    with place(tmp_path_factory.mktemp("wrong")) as found:
        yield all_answers(found)
        assert found.stack.fakes.calls["model"] == found.stack.fakes.calls["job"] == 0


def all_answers(place: Place) -> dict[str, Answer]:
    cases = [case for _, section in SECTIONS for case in section]
    return {case.shown: plain(case.ask(place), place.folder) for case in cases}


def plain(answer: Answer, folder: Path) -> Answer:
    """Returns the answer without what differs from run to run."""
    sentence = answer.sentence.replace(f"{folder}/", "").replace(str(folder), "the folder")
    sentence = re.sub(r"(127\.0\.0\.1:)(?!9\b)\d+", r"\g<1>8000", sentence)
    sentence = re.sub(r"mine-[a-z0-9]{20}", "mine-1nfv92cwz3aaqp4yht6c", sentence)
    return Answer(sentence, answer.code)


def page(answers: dict[str, Answer]) -> str:
    lines = [HEAD.format(count=len(answers))]
    for title, section in SECTIONS:
        lines += [f"## {title}", "", "| input | sentence | |", "|---|---|---|"]
        for case in section:
            found = answers[case.shown]
            lines.append(f"| {cell(case.shown)} | {cell(found.sentence)} | {found.code} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{{", "&#123;{")


def test_the_page_says_what_wrong_inputs_are_answered(answers: dict[str, Answer]) -> None:
    renew = "python -m tests.contract.test_wrong_inputs --write renews it"
    assert page(answers) == PAGE.read_text(), renew


def test_sixty_wrong_inputs_are_refused_in_sentences(answers: dict[str, Answer]) -> None:
    assert len(answers) == sum(len(section) for _, section in SECTIONS) >= 60
    for shown, answer in answers.items():
        assert answer.code == "exit 2" or re.fullmatch(r"HTTP (4\d\d|503)", answer.code), shown
        assert len(answer.sentence) > 20 and "Traceback" not in answer.sentence, shown


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, place(Path(folder)) as found:
        text = page(all_answers(found))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
