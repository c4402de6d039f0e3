"""The job file: what it accepts, what `--set` does, and the sentence for each mistake."""

from __future__ import annotations

import os
import re
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadRequest
from shared.job import EvaluatedModel, Job
from shared.job import file as job_file
from shared.job.file import load_job, parse_job, read_source
from shared.job.job import same_learning

MINIMAL = """
name = "demo"
model = "org/model"
steps = 3
[data]
train = "data.jsonl"
[[rewards]]
grader = "exact_match"
"""


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_adapters_are_trained_at_ten_times_the_rate_unless_the_job_says_one(tmp_path: Path) -> None:
    lora = write(tmp_path, MINIMAL + "\n[lora]\n")
    assert load_job(lora).learning_rate == 1e-5
    assert load_job(lora, ["training.learning_rate=1e-6"]).learning_rate == 1e-6
    assert load_job(lora, ["training.learning_rate=0"]).learning_rate == 0
    assert load_job(lora, ["training.min_learning_rate=1e-5"]).learning_rate == 1e-5
    with pytest.raises(BadRequest, match=r"min_learning_rate is 2e-05, above .* 1e-05"):
        load_job(lora, ["training.min_learning_rate=2e-5"])
    said = load_job(lora, ["training.learning_rate=1e-5"])
    assert same_learning(load_job(lora), said)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=7", 7),
        ("training.learning_rate=1e-4", 1e-4),
        ("rewards.0.weight=2", 2.0),
        ("sampling.stop=['x']", ("x",)),
        ("data.train=other.jsonl", "other.jsonl"),
    ],
)
def test_set_overrides_a_key(tmp_path: Path, override: str, expected: object) -> None:
    value: object = load_job(write(tmp_path), [override])
    for part in override.partition("=")[0].split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    assert value == expected


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "training.lerning_rate=1",
            "unknown key 'training.lerning_rate'; did you mean 'learning_rate'?",
        ),
        ("training.lr=1", "unknown key 'training.lr'; here it is 'training.learning_rate'"),
        (
            "training.zero_stage=3",
            "unknown key 'training.zero_stage'; did you mean 'memory.zero_stage'?",
        ),
        (
            "learning_rate=1",
            "'learning_rate'; did you mean 'training.learning_rate' or 'warmup.learning_rate'?",
        ),
        (
            "rollouts.every=1",
            "'rollouts.every'; did you mean 'evaluation.every' or 'checkpoints.every'?",
        ),
        ("sampling.seed=1", "'sampling.seed'; did you mean 'seed', which is in no section?"),
        ("sampling.stop=x", "'sampling.stop': got 'x'; expected a list"),
        ("sampling.stop=['']", "'sampling.stop.0': got ''; string should have at least 1"),
        ("data=3", "'data': got 3; expected a table (in JSON, an object)"),
        ("rewards=[]", "'rewards': got []; expected at least 1 in the list"),
        (
            "metadata={" + ",".join(f"k{n}='x'" for n in range(17)) + "}",
            "; expected at most 16 keys",
        ),
        ("model=''", "'model': got ''; string should have at least 1"),
        ("rewards.0.source=x", "grader is 'exact_match', and there is code of your own"),
        ("rewards.0.wieght=1", "unknown key 'rewards.0.wieght'; did you mean 'weight'?"),
        (
            "training.schedule=step",
            "'training.schedule': got 'step'; input should be 'constant', 'linear' or 'cosine'",
        ),
        (
            "lora.target_modules=q_proj",
            "'lora.target_modules': got 'q_proj'; expected \"all-linear\" or a list of modules",
        ),
        ("name.x=1", 'is "demo", not a section'),
        # what no service could hold
        ("sampling.prompts_per_step=65537", "should be less than or equal to 65536"),
        ("steps=1000000001", "should be less than or equal to 1000000000"),
        ("seed=9223372036854775808", "should be less than 9223372036854775808"),
        ("evaluation.samples=1025", "should be less than or equal to 1024"),
        ("sampling.temperature=2.1", "should be less than or equal to 2"),
        ("evaluation.temperature=2.1", "should be less than or equal to 2"),
        # of less than 0.01 vLLM makes 0.01, while the trainer would divide by what the job says
        ("sampling.temperature=0.009", "should be greater than or equal to 0.01"),
        # what cannot end or skip
        ("stop.target=0.9 data.eval=x stop.metric=pass@2", "stop.metric is 'pass@2'"),
        (
            "stop.target=0.9 evaluation.sets.hard.source=x",
            "stop.metric is 'reward'; expected one of 'hard/pass@1', 'hard/reward'",
        ),
        (
            "difficulty.skip_right=1 data.streaming=true",
            "difficulty skips problems and data.streaming is true",
        ),
        ("evaluation.sets.Hard.source=x", "Hard"),
        ("evaluation.sets.hard.source=''", "expected a file, a data set's id"),
        # models are compared without training
        ('evaluation.models=[{model="a/b"}]', "and the job trains; expected none, or steps = 0"),
        ("steps=0 data.eval=a/b evaluation.models=[{}]", "'evaluation.models.0.model' is"),
        ('steps=0 data.eval=a/b evaluation.models=["a/b"]', "expected a table"),
    ],
)
def test_a_mistake_is_named_with_its_value_and_remedy(
    tmp_path: Path, overrides: str, sentence: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        load_job(write(tmp_path), overrides.split())
    assert sentence in raised.value.detail


def test_a_fault_is_reported_of_its_override_or_else_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL.replace("steps = 3", "steps = -1\nstepz = 3"))
    with pytest.raises(BadRequest) as raised:
        load_job(file, ["training.lr=1", "rewards.0.source=x", "rewards.0.weight=2"])
    told = {fault["pointer"]: fault["detail"] for fault in raised.value.errors}
    assert told["/steps"].startswith(f"{file}: 'steps': got -1")
    assert told["/stepz"].startswith(f"{file}: unknown key 'stepz'")
    assert told["/training/lr"].startswith("--set 'training.lr=1': unknown key 'training.lr'")
    assert told["/rewards/0"].startswith("--set 'rewards.0.")


def test_a_fault_in_a_list_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as raised:
        load_job(write(tmp_path), ["rewards.0.weight=nan"])
    assert [fault["pointer"] for fault in raised.value.errors] == ["/rewards/0/weight"]


def test_a_job_has_steps_or_epochs(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL.replace("steps = 3", ""))
    with pytest.raises(BadRequest, match=r"neither steps nor data\.epochs is set; expected one"):
        load_job(file)
    assert load_job(file, ["data.epochs=0.5"]).steps == 0
    with pytest.raises(BadRequest, match="how many rows a stream has is not known"):
        load_job(file, ["data.epochs=2", "data.streaming=true"])


def test_a_job_of_0_steps_evaluates_its_model_or_those_that_it_names(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL.replace("steps = 3", "steps = 0"))
    own = load_job(file, ["data.eval=owner/problems", "model_revision=v2"])
    assert not own.trains and load_job(file, ["data.epochs=1"]).trains
    assert own.evaluated_models == (EvaluatedModel(model=own.model, revision="v2"),)
    folder = tmp_path / "step-000040"
    folder.mkdir()
    models = f'evaluation.models=[{{model="{folder}/../step-000040", name="new"}}, {{model="a/b"}}]'
    new, other = load_job(file, ["data.eval=owner/problems", models]).evaluated_models
    assert (new.model, new.label) == (str(folder.resolve()), "new"), "made absolute"
    assert (other.label, other.revision) == ("a/b", None)


def test_only_a_job_that_trains_needs_problems_to_train_on(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^train = .*$", 'eval = "owner/problems"', MINIMAL)
    assert load_job(write(tmp_path, text), ["steps=0"]).data.train is None
    with pytest.raises(BadRequest, match=r"'data\.train' is missing; expected the training prob"):
        load_job(write(tmp_path, text))


def test_a_target_is_of_what_is_measured(tmp_path: Path) -> None:
    base = ["stop.target=0.9", "evaluation.sets.hard.source=x", "evaluation.samples=6"]
    for metric in ("hard/pass@6", "hard/pass@4", "hard/rewards/exact_match/mean"):
        assert load_job(write(tmp_path), [*base, f"stop.metric={metric}"]).stop.metric == metric


def test_a_held_out_set_takes_from_data_what_it_leaves_out(tmp_path: Path) -> None:
    job = load_job(
        write(tmp_path),
        [
            "data.messages=[{role='user', content='{{ q }}'}]",
            "data.filter=level < 5",
            "evaluation.sets.same.source=x",
            "evaluation.sets.own.source=x",
            "evaluation.sets.own.template={{ text }}",
            "evaluation.sets.own.filter=level > 0",
            "evaluation.sets.own.columns={text='problem'}",
        ],
    )
    same, own = (each.within(job.data) for each in job.evaluation.sets.values())
    assert (same.messages, same.filter) == (job.data.messages, "level < 5")
    assert (own.messages, own.template, own.filter) == (None, "{{ text }}", "level > 0")
    assert own.columns == {"text": "problem"} and same.columns == {}


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_a_device_is_no_job_file_and_is_not_read(tmp_path: Path, device: str) -> None:
    with pytest.raises(BadRequest, match=f"^'{device}' is a device; expected a text file$"):
        load_job(device)
    with pytest.raises(BadRequest, match="is a device; expected a text file"):
        read_source(Path(device))


def test_a_byte_order_mark_before_a_job_file_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text("\ufeff" + MINIMAL)
    assert load_job(path) == load_job(write(tmp_path))


def test_a_job_file_may_be_a_pipe_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(MINIMAL,))
    writer.start()
    assert load_job(pipe) == load_job(write(tmp_path))
    writer.join()
    monkeypatch.setattr(job_file, "MAX_FILE_MIB", 0)
    with pytest.raises(BadRequest, match="is larger than 0 MiB; expected a text file"):
        load_job(write(tmp_path))


@pytest.mark.parametrize(
    ("path", "overrides", "sentence"),
    [
        (3, [], "the job file is 3; expected a path"),
        ("x.toml", "steps=2", "the overrides are 'steps=2'; expected a list, for example"),
        ("x.toml", None, "the overrides are None; expected a list, for example"),
        ("a\0b", [], "not valid TOML: embedded null byte"),
        ("x.toml", [2], "the overrides are [2]; expected a list, for example"),
    ],
)
def test_what_is_no_path_and_no_list_of_overrides_is_a_sentence(
    path: Any, overrides: Any, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(sentence)):
        load_job(path, overrides)


def test_a_reward_file_travels_as_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    job = load_job(write(tmp_path, MINIMAL.replace('grader = "exact_match"', 'file = "mine.py"')))
    assert job.rewards[0].source is not None and job.rewards[0].source.startswith("def reward")
    assert job.rewards[0].label == "reward"


def test_existing_paths_become_absolute_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("{}")
    job = load_job(write(tmp_path))
    assert job.data.train == str(tmp_path / "data.jsonl")
    assert job.model == "org/model"


def test_a_job_survives_the_wire(tmp_path: Path) -> None:
    job = load_job(write(tmp_path))
    assert Job.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 1025}])
def test_truncated_sampling_needs_a_bound_unless_it_is_asked_for_by_name(sampling):
    document = {
        "name": "t",
        "model": "m/m",
        "steps": 1,
        "data": {"train": "x"},
        "rewards": [{"grader": "x"}],
        "sampling": sampling,
    }
    with pytest.raises(BadRequest, match=r"correction\.truncated_sampling"):
        parse_job(document)
    accepted = parse_job(document | {"correction": {"truncated_sampling": "accept"}})
    bounded = parse_job(document | {"sampling": sampling | {"top_k": 50}})
    whole = parse_job(document | {"sampling": {}})
    assert [job.needs_masks for job in (accepted, bounded, whole)] == [False, True, False]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"steps": True}, "'steps': got True; expected a number"),
        ({"training": {"learning_rate": False}}, "'training.learning_rate': got False; expected a"),
        ({"max_model_len": True}, "'max_model_len': got True; expected a number"),
        ({"training": {"dual_clip": True}}, "'training.dual_clip': got True; expected a number"),
        (
            {"weight_sync": "nccl", "memory": {"zero_stage": 3}},
            "and memory.zero_stage is 3: they are not whole there",
        ),
        ({"weight_sync": "ipc", "lora": {"rank": 8}}, "and lora is set: they are not whole there"),
        ({"memory": {"zero_stage": True}}, "'memory.zero_stage': got True; expected"),
    ],
)
def test_true_is_no_number(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_job({**tomllib.loads(MINIMAL), **changed})
    assert sentence in raised.value.detail


def test_a_step_has_a_million_completions_at_most() -> None:
    sampling = {"prompts_per_step": 1025, "group_size": 1024}
    with pytest.raises(BadRequest, match=r"1049600 completions in a step; .* at most 1048576"):
        parse_job({**tomllib.loads(MINIMAL), "sampling": sampling})
    sampling["prompts_per_step"] = 1024
    parse_job({**tomllib.loads(MINIMAL), "sampling": sampling})


def test_true_stays_true() -> None:
    memory = parse_job({**tomllib.loads(MINIMAL), "memory": {"offload_optimizer": True}}).memory
    assert memory.offload_optimizer is True
