"""`hone plan` in the shell: what it prints, and what it says to bad input."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from typer.testing import CliRunner

from hone import reward_service
from hone.cli import app
from hone.commands import plan
from hone.commands.plan import lengths_of
from hone.reports import plan_lines, total_text
from shared.errors import Failed
from shared.job.file import load_job
from shared.plan.gpus import parse_gpus
from shared.plan.planning import make_plan
from shared.settings import Settings
from shared.wire import PromptLengths
from shared.wire.records import StepTime
from tests.support.plan_models import LLAMA_8B, QWEN_05B, job, model

ROOT = Path(__file__).parents[3]
JOB = """
name = "t"
model = "{model}"
steps = 100
[data]
train = "x"
[[rewards]]
grader = "length"
params = {{ target = 64 }}
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose model is a folder of Qwen2.5-0.5B's size, and whose prompts are not counted."""
    monkeypatch.setattr(plan, "lengths_of", lambda job: PromptLengths())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_05B))
    (folder / "model.safetensors").write_bytes(header_of(494_032_768))
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(model=folder))
    return path


def test_the_parts_of_the_trainers_memory_add_up() -> None:
    """Of 1.544e9 parameters, in GiB: 2 bytes of weights, 4 of gradients and 12 of the optimizer are
    2.88, 5.75 and 17.25; with 1.0 of overhead 26.88 of the 32.8."""
    planned = make_plan(
        load_job(ROOT / "deploy/jobs/gsm8k.toml", []),
        model("Qwen2.5-1.5B"),
        Settings(),
        parse_gpus("1xA100-80GB"),
        PromptLengths(longest=200, is_all=True),
    )
    lines = plan_lines(planned)
    assert lines[2:5] == [
        "  trainer, each GPU: needs 32.8 GiB and has 47.5, with gradient checkpointing",
        "    always: weights 2.9, gradients 5.8, optimizer 17.3, overhead 1.0",
        "    at most 6.0 at once: activations 4.0, logits 2.0, update 1.3, buffers 1.5",
    ]
    page = (ROOT / "docs/planning.md").read_text()
    assert "\n".join(lines[2:5]) in page


def header_of(count: int) -> bytes:
    """Returns a file that says of itself to hold so many parameters, and holds none."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(header)) + header


def run(*args: object, code: int = 0) -> str:
    ended = CliRunner().invoke(app, ["plan", *map(str, args)])
    assert ended.exit_code == code, ended.output
    return ended.output


def test_a_plan_is_lines_for_people_and_json_for_programs(job_file: Path) -> None:
    larger = ("--set", "memory.micro_batch_tokens=24576")
    shown = run(job_file, "--gpus", "1xA10G-24GB", *larger)
    assert "fits on 1xA10G: 1 rank and 1 sampler take turns on the same GPUs" in shown
    assert "settings: HONE_TRAINER_RANKS=1 HONE_COLOCATE=1" in shown
    assert "learning rate 1e-06" in shown
    assert "learning rate 1e-05" in run(job_file, "--gpus", "cpu", "--set", "lora.rank=16")
    found = json.loads(run(job_file, "--gpus", "1xA100-80GB", "-o", "json"))
    assert (found["fits"], found["gpus"], found["steps"]) == (True, "1xA100-80GB", 100)


def test_overrides_and_prompt_lengths_are_taken(job_file: Path) -> None:
    options = ("--set", "steps=7", "--set", "sampling.max_tokens=64", "--prompt-tokens", "9")
    found = json.loads(run(job_file, "--gpus", "cpu", *options, "-o", "json"))
    assert (found["steps"], found["prompt_tokens"], found["completion_tokens"]) == (7, 9, 64)


def test_the_prompts_of_the_data_are_counted(
    tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "lengths_of", lengths_of)
    monkeypatch.setattr(plan, "LENGTHS_S", 300.0)  # on a busy machine imports take long
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "w3": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "w3 " * n}) + "\n" for n in (1, 7, 2)))
    found = json.loads(run(job_file, "--gpus", "cpu", "--set", f"data.train={rows}", "-o", "json"))
    assert found["prompt_tokens"] == 7
    assert "the longest of all 3 prompts has 7 tokens" in found["notes"]
    found = json.loads(run(job_file, "--gpus", "cpu", "-o", "json"))
    (note,) = (note for note in found["notes"] if "taken to be of 512 tokens" in note)
    assert note.endswith(": a dry run counts the tokens of 'x', on the Hugging Face Hub")


def test_gpus_that_are_given_as_nothing_are_refused(job_file: Path) -> None:
    said = run(job_file, "--gpus", "", code=2)
    assert "--gpus is ''; expected a count and a name" in said


def test_without_gpus_it_is_planned_for_those_that_are_set(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONE_GPUS", "2xL40S")
    assert "on 2xL40S" in run(job_file)
    monkeypatch.setenv("HONE_GPUS", "2xL40")
    assert "hone: HONE_GPUS is '2xL40'; expected a count" in run(job_file, code=2)


def test_a_job_that_does_not_fit_says_what_to_change(tmp_path: Path, job_file: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    (folder / "model.safetensors").write_bytes(header_of(8_030_261_248))
    job_file.write_text(JOB.format(model=folder))
    shown = run(job_file, "--gpus", "1xA100-80GB")
    assert "does not fit on 1xA100-80GB" in shown and "the trainer needs" in shown
    assert "less memory: a smaller memory.micro_batch_tokens" in shown
    offloaded = ("--set", "memory.offload_optimizer=true")
    assert "fits on 1xA100-80GB" in run(job_file, "--gpus", "1xA100-80GB", *offloaded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "1xH10"), "--gpus is '1xH10'; expected a count and a name"),
        (("--set", "model=owner/none"), "neither a folder here nor in the Hugging Face cache"),
        (("--set", "model=/nowhere/at/all"), "there is no folder '/nowhere/at/all' here"),
        (("--set", "memory.zero_stag=1"), "unknown key 'memory.zero_stag'; did you mean"),
        (("--set", "sampling.group_size=1"), "sampling.group_size is 1: a single completion has"),
        (("--set", "rewards.0.grader=lenght"), "no grader 'lenght'; did you mean 'length'?"),
        (("--set", "rewards.0.params.maxx=1"), "params of reward 'length': unknown key 'maxx'"),
    ],
)
def test_bad_input_is_a_sentence(job_file: Path, options: tuple[str, ...], message: str) -> None:
    assert message in " ".join(run(job_file, *options, code=2).split())


def test_a_model_that_is_nearly_a_folder_here_is_said_to_be_looked_for_on_the_hub(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task/model").mkdir(parents=True)
    said = (
        "warning: there is no folder 'task/modell' here, and 'task' is one; the model is looked "
        "for on the Hugging Face Hub; did you mean 'task/model'?"
    )
    assert run(job_file, "--set", "model=task/modell", code=2).startswith(said)
    assert "warning" not in run(job_file, "--set", "model=owner/modell", code=2)


def test_a_plan_is_made_where_graders_cannot_be_listed(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: object) -> None:
        raise Failed("the graders cannot be listed on this machine: no module")

    monkeypatch.setattr(reward_service, "check_rewards", none)
    shown = run(job_file, "--gpus", "1xA100-80GB")
    assert "the rewards are not checked: the graders cannot be listed" in " ".join(shown.split())
    assert "fits on 1xA100-80GB" in shown


@pytest.mark.parametrize(
    ("hours", "told"),
    [(0.001, "less than a minute"), (1 / 60, "1 minute"), (0.5, "30 minutes"), (1.5, "1.5 hours")],
)
def test_how_long_all_steps_take_is_in_words(hours: float, told: str) -> None:
    time = StepTime(sample_s=0.0, train_s=36 * hours, step_s=36 * hours)
    settings = Settings(price_per_hour=2.5)
    plan = make_plan(job(), model("Qwen2.5-0.5B"), settings, parse_gpus("1xH100"), PromptLengths())
    assert total_text(plan.model_copy(update={"cost": None}), time) == f"all steps: about {told}"
    assert total_text(plan, time).startswith(f"all steps: about {told}, ")
    assert total_text(plan, time).endswith(" USD (2.50 USD per hour)")


def test_a_plan_says_what_is_needed_and_what_there_is(job_file: Path) -> None:
    shown = run(job_file, "--gpus", "2xA100-80GB")
    assert re.search(r"trainer, each GPU: needs [\d.]+ GiB and has [\d.]+, with", shown), shown
    assert re.search(r"sampler, each GPU: needs at least [\d.]+ GiB and has [\d.]+\n", shown)
    assert re.search(r"a step takes about .* s \(sampling .*, training .*\)\n", shown)
    assert "the trainer has 1 rank and 1 sampler, each on GPUs of its own" in shown
