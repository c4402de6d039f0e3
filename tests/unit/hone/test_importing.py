"""Configurations of other trainers become jobs with the values worked out by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import tomllib
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hone.cli import app
from hone.commands.explain import find
from hone.importing.importing import FRAMEWORKS, import_config
from hone.importing.table import ImportedJob
from hone.importing.trl import TRL
from shared.errors import BadRequest
from shared.job.file import load_job

OPENRLHF = """ray job submit --address=http://127.0.0.1:8265
-- python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-4B
--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256
--data.prompt_dataset zhuzilin/dapo-math-17k --data.input_key question
--rollout.max_new_tokens 4096 --data.max_len 6144 --algo.advantage.estimator rloo
--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k2 --ds.lora.rank 8
--actor.eps_clip_low_high 0.2 0.27 --actor.adam.lr 5e-7 --actor.lr_warmup_ratio 0
--eval.dataset a/b --eval.steps 7 --ckpt.save_steps 10 --actor.entropy_coef 0.001
--vllm.gpu_memory_utilization 0.7 --made.up 3"""

VERL = """
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, filter_groups: {enable: true}}
data:
  train_files: [train.parquet]
  val_files: test.parquet
  train_batch_size: 512
  max_prompt_length: 1024
  max_response_length: 3072
  filter_overlong_prompts: true
  apply_chat_template_kwargs: {enable_thinking: false}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora_rank: 32, lora_alpha: 64}
  actor:
    ppo_mini_batch_size: 128
    loss_agg_mode: seq-mean-token-mean
    use_kl_loss: true
    kl_loss_coef: 0.01
    clip_ratio_high: 0.28
    optim: {lr: 1e-6, lr_warmup_steps: 20, lr_scheduler_type: cosine, min_lr_ratio: 0.5}
  rollout: {n: 16, name: vllm, val_kwargs: {do_sample: true, temperature: 0.6}}
trainer: {total_training_steps: 205, logger: [console], project_name: p,
          experiment_name: Qwen3_8B run, test_freq: 5, save_freq: -1}
custom_reward_function: {path: mine.py, name: score}
"""

PRIME_RL = """
max_steps = 100
seq_len = 4096
model.name = "Qwen/Qwen3-1.7B"
wandb.project = "p"
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 1024
[[orchestrator.train.source]]
[orchestrator.train.source.env.taskset]
id = "math-env"
[trainer.optim]
lr = 3e-6
[trainer.scheduler]
type = "linear"
[trainer.model.lora]
rank = 32
[ckpt]
interval = 50
"""

TRL_YAML = """
model_name_or_path: a/m
dataset_name: owner/math
dataset_config: main
learning_rate: 2e-6
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
steps_per_generation: 16
num_generations: 8
num_iterations: 2
max_steps: 400
warmup_ratio: 0.1
epsilon: 0.1
scale_rewards: false
use_vllm: true
top_entropy_quantile: 0.2
reward_funcs: [accuracy_reward, mine.brief]
reward_weights: [1.0, 0.1]
loss_type: bnpo
save_steps: 100
output_dir: out
"""


def of(text: str, name: str, folder: Path, **more: Any) -> ImportedJob:
    file = folder / name
    file.write_text(text)
    found = import_config([str(file)], **more)
    assert tomllib.loads(found.toml) == found.job
    return found


def test_an_openrlhf_command_becomes_a_job() -> None:
    found = import_config([OPENRLHF])
    assert found.keys == {
        "name": "qwen3-4b",
        "model": "Qwen/Qwen3-4B",
        "seed": 42,
        "max_model_len": 6144,
        "data.train": "zhuzilin/dapo-math-17k",
        "data.eval": "a/b",
        "data.eval_split": "train",
        "data.columns": {"prompt": "question"},
        "data.epochs": 1,
        "sampling.prompts_per_step": 128,
        "sampling.group_size": 8,
        "sampling.max_tokens": 4096,
        "training.minibatches": 4,  # 128 * 8 / 256
        "training.loss": "bnpo",
        "training.clip_low": 0.2,
        "training.clip_high": 0.27,
        "training.beta": 0.001,
        "training.kl": "k2",
        "training.learning_rate": 5e-7,
        "training.schedule": "cosine",
        "training.min_learning_rate": 5e-8,  # a tenth, the default of min_lr_ratio
        "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.95,
        "advantages.baseline": "leave_one_out",
        "advantages.std": "none",
        "lora.rank": 8,
        "lora.alpha": 16,
        "lora.target_modules": "all-linear",
        "evaluation.every": 7,
        "evaluation.samples": 4,
        "evaluation.temperature": 0.6,
        "checkpoints.every": 10,
        "checkpoints.keep_last": 3,
    }
    assert found.lacking.keys() == {
        *("actor.entropy_coef", "made.up", "vllm.gpu_memory_utilization")
    }
    assert found.lacking["made.up"] == "3: not in the table of OpenRLHF"
    assert found.fill_in.keys() == {"rewards"}


def test_openrlhf_s_older_names_are_the_same_keys() -> None:
    words = "python -m openrlhf.cli.train_ppo_ray --pretrain a/m --prompt_data a/d "
    words += "--advantage_estimator group_norm --rollout_batch_size 64 --n_samples_per_prompt 4 "
    words += "--train_batch_size 256 --prompt_max_len 512 --generate_max_len 1536 --eps_clip 0.1 "
    got = import_config(words.split()).keys
    assert got["model"] == "a/m"
    assert (got["sampling.prompts_per_step"], got["training.minibatches"]) == (64, 1)
    assert got["training.loss"] == "dapo"
    assert (got["max_model_len"], got["sampling.max_tokens"]) == (2048, 1536)
    assert (got["training.clip_low"], got["training.clip_high"]) == (0.1, 0.1)
    assert (got["training.beta"], got["training.kl"]) == (0.01, "k3_true")  # in the reward there
    assert "lora.alpha" not in got and "evaluation.samples" not in got
    assert import_config([*words.split(), "--use_kl_loss"]).keys["training.kl"] == "k1"


def test_of_two_names_of_one_key_the_later_is_listed() -> None:
    words = ["openrlhf", "--rollout_batch_size", "4", "--rollout.batch_size"]
    assert import_config([*words, "4"]).lacking.keys().isdisjoint({"rollout.batch_size"})
    found = import_config([*words, "5"])
    assert found.keys["sampling.prompts_per_step"] == 4
    assert found.lacking["rollout.batch_size"] == "5: another name of rollout.batch_size is 4"


def test_verl_s_yaml_becomes_a_job(tmp_path: Path) -> None:
    found = of(VERL, "config.yaml", tmp_path)
    assert found.keys == {
        "name": "qwen3_8b-run",
        "model": "Qwen/Qwen3-8B",
        "steps": 205,
        "max_model_len": 4096,
        "data.train": "train.parquet",
        "data.eval": "test.parquet",
        "sampling.prompts_per_step": 512,
        "sampling.group_size": 16,
        "sampling.max_tokens": 3072,
        "sampling.overlong_prompts": "drop",
        "sampling.refills": 10,
        "sampling.template_args": {"enable_thinking": False},
        "advantages.baseline": "mean",
        "advantages.std": "none",
        "training.loss": "grpo",
        "training.minibatches": 4,
        "training.clip_low": 0.2,
        "training.clip_high": 0.28,
        "training.dual_clip": 3.0,
        "training.beta": 0.01,
        "training.kl": "k3",
        "training.learning_rate": 1e-6,
        "training.warmup_steps": 20,
        "training.schedule": "cosine",
        "training.min_learning_rate": 5e-7,
        "training.weight_decay": 0.01,
        "lora.rank": 32,
        "lora.alpha": 64,
        "lora.target_modules": "all-linear",
        "evaluation.every": 5,
        "evaluation.temperature": 0.6,
        "checkpoints.every": 0,
    }
    assert found.fill_in.keys() == {"rewards"}
    assert found.lacking == {
        "reward.custom_reward_function.path": "'mine.py': write it as `reward(completions, "
        "**columns)`, or set a grader: docs/rewards.md",
        "trainer.project_name": "'p': see [wandb] and trackers",
    }
    assert found.ignored == [
        *("actor_rollout_ref.rollout.name", "custom_reward_function.name"),
    ]


GRPO = ["verl", "algorithm.adv_estimator=grpo"]
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"advantages.std": "group", "data.epochs": 30, "checkpoints.every": 0}),
        ("algorithm.adv_estimator=rloo", {"advantages.baseline": "leave_one_out"}),
        ("", {"training.loss": "bnpo", "training.minibatches": 4}),  # 1024 in batches of 256
        ("data.train_batch_size=64", {"training.loss": "dapo", "training.minibatches": 1}),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", {"training.loss": "dr_grpo"}),
        (
            f"{ACTOR}.policy_loss.loss_mode=gspo",
            {"training.loss": "gspo", "training.dual_clip": None},
        ),
        ("", {"sampling.overlong_prompts": "error", "training.min_learning_rate": None}),
        ("data.truncation=left", {"sampling.overlong_prompts": "truncate"}),
        ("", {"training.beta": None, "training.kl": None, "sampling.refills": None}),
        ("", {"lora.rank": None, "lora.alpha": None, "evaluation.temperature": None}),
        (f"+{ACTOR}.optim.betas=[0.9,0.98]", {"training.adam_beta2": 0.98}),
        ("trainer.total_training_steps=7", {"steps": 7, "data.epochs": None}),
        ("data.prompt_key=question", {"data.columns": {"prompt": "question"}}),
    ],
)
def test_verl_s_overrides_become_keys(words: str, expected: dict[str, Any]) -> None:
    got = import_config([*GRPO, *words.split()]).keys
    assert {key: got.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("algorithm.adv_estimator=gae", "'gae': expected one of grpo, rloo"),
        ("data.train_files=[a,b]", "['a', 'b']: a job has one data set"),
        ("data.train_batch_size=300", "256: a step of 300 cannot be cut into equal batches of it"),
        (f"{ACTOR}.policy_loss.loss_mode=clip_cov", "the losses here are vanilla, gspo and sapo"),
        (f"{ACTOR}.loss_agg_mode=odd", "'vanilla': expected one of seq-mean-token-mean"),
        ("algorithm.use_kl_in_reward=true", "True: there a token answers for the KL of later"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.enable=True", "set the grader `overlong`"),
        ("reward_model.overlong_buffer.enable=True", "set the grader `overlong`"),
        ("trainer.test_freq=-1", "-1: leave data.eval out for no evaluation"),
        ("trainer.v1.trainer_mode=separate_async", "see max_staleness"),
        ("actor_rollout_ref.model.lora.rank=8", "8: not in the table of verl"),
        ("data.max_prompt_length=x", "'x': it cannot be converted with the values beside it"),
        ("data.train_batch_size=$SIZE", "'$SIZE': the variable was not replaced"),
        ("data.train_files=$HOME/a.parquet", "'$HOME/a.parquet': the variable was not replaced"),
        ("algorithm.gamma=${oc.env:G}", "the variable was not replaced"),
    ],
)
def test_what_a_job_has_not_is_listed_with_the_reason(word: str, why: str) -> None:
    lacking = import_config([*GRPO, word]).lacking
    assert any(why in each for each in lacking.values())
    assert f"# not translated: {next(iter(lacking))} = " in import_config([*GRPO, word]).toml


@pytest.mark.parametrize(
    "word",
    [
        *("algorithm.gamma=1.0", "trainer.logger=['console']", "reward_model.enable=False"),
        "reward_model.overlong_buffer.enable=False",
    ],
)
def test_a_value_that_changes_nothing_is_not_listed(word: str) -> None:
    assert import_config([*GRPO, word]).lacking == {}


def test_prime_rl_s_toml_becomes_a_job(tmp_path: Path) -> None:
    found = of(PRIME_RL, "rl.toml", tmp_path)
    assert found.keys == {
        "name": "qwen3-1-7b",
        "model": "Qwen/Qwen3-1.7B",
        "steps": 100,
        "max_model_len": 4096,
        "max_staleness": 4,
        "sampling.prompts_per_step": 32,  # 512 completions in groups of 16
        "sampling.group_size": 16,
        "sampling.max_tokens": 1024,
        "advantages.std": "none",
        "correction.ratio_base": "sampler",
        "training.loss": "dapo",
        "training.learning_rate": 3e-6,
        "training.schedule": "constant",  # it decays over the last 10 of 100 steps
        "training.warmup_steps": 10,
        "training.weight_decay": 0.01,
        "lora.rank": 32,
        "checkpoints.every": 50,
        "wandb.project": "p",
    }
    by_default = "the default of trainer.loss.kl_tau"
    assert found.lacking.keys() == {by_default, "orchestrator.train.source"}
    assert "hone.agents.verifiers" in found.lacking["orchestrator.train.source"]
    assert found.fill_in.keys() == {"data.train", "rewards"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('type = "linear"\ndecay_steps = 90', ("linear", 10, None)),
        ('type = "cosine"\nmin_lr = 1e-7\nwarmup_steps = 5', ("cosine", 5, 1e-7)),
        ('type = "constant"', ("constant", None, None)),
    ],
)
def test_prime_rl_s_schedule_is_the_nearest(
    tmp_path: Path, lines: str, expected: tuple[Any, ...]
) -> None:
    got = of(PRIME_RL.replace('type = "linear"', lines), "rl.toml", tmp_path).keys
    names = ("schedule", "warmup_steps", "min_learning_rate")
    assert tuple(got.get(f"training.{name}") for name in names) == expected


def test_prime_rl_s_defaults_count_where_nothing_is_said(tmp_path: Path) -> None:
    text = "orchestrator.group_size = 16\ntrainer.model.optimization_dtype = 'float32'\n"
    found = of(text, "rl.toml", tmp_path)
    assert found.keys["sampling.prompts_per_step"] == 8  # 128 completions
    assert found.keys["checkpoints.every"] == 0  # only at the end, as there
    assert "trainer.model.optimization_dtype" in found.lacking
    assert "# max_staleness: the default of orchestrator.max_off_policy_steps" in found.toml


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_trl_file_becomes_a_job(tmp_path: Path, suffix: str) -> None:
    text = TRL_YAML if suffix == "yaml" else json.dumps(yaml.safe_load(TRL_YAML))
    found = of(text, f"grpo.{suffix}", tmp_path, processes=2)
    assert found.keys == {
        "name": "m",
        "model": "a/m",
        "seed": 42,
        "steps": 100,  # 400 updates, of which a batch has 2 minibatches * 2 iterations
        "data.train": "owner/math",
        "data.config": "main",
        "data.train_split": "train",
        "sampling.prompts_per_step": 16,  # 4 * 2 processes * 16 parts / 8 completions
        "sampling.group_size": 8,
        "sampling.max_tokens": 512,
        "training.minibatches": 2,  # 16 parts in updates of 8
        "training.epochs": 2,
        "training.loss": "bnpo",
        "training.learning_rate": 2e-6,
        "training.schedule": "linear",
        "training.warmup_steps": 10,
        "training.clip_low": 0.1,
        "training.clip_high": 0.1,
        "advantages.std": "none",
        "correction.method": "sequence_mask",
        "correction.high": 3.0,
        "checkpoints.every": 25,
        "rewards": [
            {"grader": "math", "params": {"answer": "solution"}, "weight": 1.0},
            {"file": "mine.py", "function": "brief", "weight": 0.1},
        ],
    }
    assert found.lacking.keys() == {"top_entropy_quantile"}
    assert (found.fill_in, found.ignored) == ({}, ["num_processes", "use_vllm", "output_dir"])
    assert "\n# training.learning_rate: learning_rate\n" in found.toml
    said = "# training.minibatches: gradient_accumulation_steps, steps_per_generation\n"
    assert said in found.toml


def test_a_trl_yaml_with_arguments_beside_it_becomes_a_job_that_is_accepted(
    tmp_path: Path,
) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: a/m\nlearning_rate: 1e-5\n")
    words = ["trl", "grpo", "--config", str(tmp_path / "grpo.yaml"), "--dataset_name", "a/d"]
    words += ["--reward_funcs", "accuracy_reward", "--max_steps=10", "--use_peft", "--beta", "0.1"]
    words += ["--lora_target_modules", "q_proj", "v_proj", "--max_prompt_length", "1024"]
    words += ["--use_vllm", "--vllm_importance_sampling_cap", "2", "--eval_strategy", "steps"]
    found = import_config(words)
    assert (found.fill_in, found.lacking) == ({}, {})
    (tmp_path / "job.toml").write_text(found.toml)
    job = load_job(tmp_path / "job.toml")
    assert job.training.learning_rate == 1e-5 and job.steps == 10
    assert (job.training.beta, job.training.kl) == (0.1, "k3_true")
    assert (job.max_model_len, job.sampling.overlong_prompts) == (1536, "truncate")
    assert (job.correction.method, job.correction.high) == ("sequence_mask", 2)
    assert (job.data.eval, job.data.eval_split) == ("a/d", "test")
    assert (job.evaluation.samples, job.evaluation.temperature) == (8, 1)  # as in training
    assert job.lora is not None
    assert (job.lora.rank, job.lora.alpha, job.lora.dropout) == (16, 32, 0.05)
    assert job.lora.target_modules == ("q_proj", "v_proj")


def test_trl_s_targets_of_peft_and_reward_models_are_listed() -> None:
    found = import_config(["trl", "grpo", "--use_peft", "--reward_funcs", "org/model"])
    assert "mostly q_proj and v_proj" in found.lacking["lora_target_modules"]
    assert "'org/model' is a reward model, or not known" in found.lacking["reward_funcs"]
    found = import_config(["trl", "grpo", "--learning_rate", "$LR", "--max_steps", "3"])
    assert found.lacking.keys() == {"learning_rate"}
    assert "training.learning_rate" not in found.keys


STRATEGY = "expected 'steps' with save_steps, or 'no'"


@pytest.mark.parametrize(
    ("words", "every", "lacks"),
    [
        ("", 500, {}),  # transformers' own
        ("--save_strategy steps --save_steps 100", 100, {}),
        ("--save_strategy steps --save_steps 0.1", 40, {}),  # a tenth of 400
        ("--save_strategy no --save_steps 100", 0, {}),
        ("--save_strategy false", 0, {}),  # a YAML file's no
        ("--save_strategy epoch --save_steps 100", None, {"save_strategy": STRATEGY}),
        ("--save_strategy best", None, {"save_strategy": STRATEGY}),
        ("--save_steps 0", None, {"save_steps": "expected 1 or more"}),
    ],
)
def test_trl_s_save_strategy_is_kept_or_listed(
    words: str, every: int | None, lacks: dict[str, str]
) -> None:
    found = import_config(["trl", "grpo", "--max_steps", "400", *words.split()])
    assert found.keys.get("checkpoints.every") == every
    assert found.lacking.keys() == lacks.keys()
    assert all(text in found.lacking[name] for name, text in lacks.items())


def test_trl_evaluates_by_steps_or_the_strategy_is_listed() -> None:
    words = ["trl", "grpo", "--dataset_name", "a/d", "--eval_strategy"]
    assert import_config([*words, "steps"]).keys["evaluation.every"] == 10  # TRL's logging_steps
    assert import_config([*words, "steps", "--eval_steps", "7"]).keys["evaluation.every"] == 7
    found = import_config([*words, "epoch"])
    assert found.lacking.keys() == {"eval_strategy"}
    assert "evaluation.every" not in found.keys
    assert "data.eval" not in import_config([*words, "false"]).keys  # a YAML file's no


def test_every_field_of_a_grpoconfig_has_a_key_or_a_reason() -> None:
    from trl.trainer.grpo_config import GRPOConfig

    fields = dataclasses.fields(GRPOConfig)
    assert len(fields) > 150
    assert [field.name for field in fields if not TRL.knows(field.name)] == []
    theirs = {field.name: field.default for field in fields if field.name in TRL.defaults}
    assert theirs == {name: TRL.defaults[name] for name in theirs}


class Recorded(UserDict[str, Any]):
    """Records which keys are looked up."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.read = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


VALUES = ("linear", "cosine", "vanilla", "ppo", "grpo", "accuracy_reward", 1)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_table_s_keys_are_the_job_s_and_what_it_has_beside_them_is_read(name: str) -> None:
    framework, rows = FRAMEWORKS[name], FRAMEWORKS[name].rows.values()
    for key in (key for row in rows if row.here for key in row.here.split(",")):
        assert find(key).key == key
    values = Recorded({key: value or 1 for key, value in framework.defaults.items()})
    for row, value in itertools.product(rows, VALUES):
        with contextlib.suppress(Exception):  # a value of another row
            row.convert(value, values)
    beside = framework.defaults.keys() - framework.rows.keys() - framework.others
    assert beside <= values.read


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["import", *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_the_job_and_says_the_rest_beside_it(tmp_path: Path) -> None:
    code, out, said = run("--to", str(tmp_path / "job.toml"), "--", OPENRLHF)
    assert (code, out) == (0, "")
    assert "not translated: actor.entropy_coef = 0.001: there is no entropy bonus" in said
    assert "not translated: made.up = 3: not in the table" in said and "fill in rewards" in said
    assert "model = " in (tmp_path / "job.toml").read_text()
    code, out, _ = run("-o", "json", "--", OPENRLHF)
    assert code == 0 and json.loads(out)["job"]["model"] == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("words", "text", "sentence"),
    [
        (["train.sh"], None, "'train.sh' is not a .yaml, .toml or .json file: write the trainer's"),
        (["a.yaml"], None, "'a.yaml' cannot be read"),
        (["a.yaml"], "a: !!python/object/apply:os.system ['true']", "cannot be read: could not"),
        (["a.toml"], "a = ", "cannot be read: Invalid value"),
        (["a.json"], "[1]", "is list, expected keys and values"),
        (["a.yaml"], "save_steps: often", "save_steps is 'often'; expected a number from 0 on"),
        (["train", "--foo", "3"], None, "no trainer is known with foo; expected arguments of trl"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(words[0]).write_text(text)
    with pytest.raises(BadRequest) as error:
        import_config(words, "trl" if text and "save_steps" in text else None)
    assert sentence in error.value.detail


@pytest.mark.parametrize("value", [[None], {"a": [1, None]}, "\x7f\x1b[2J", float("nan"), "a\nb"])
def test_whatever_a_value_is_the_job_is_toml(tmp_path: Path, value: Any) -> None:
    text = json.dumps(dict.fromkeys(FRAMEWORKS["verl"].rows, value))
    (path := tmp_path / "a.json").write_text(text)
    found = import_config([str(path)], "verl")
    tomllib.loads(found.toml)
    assert "\x1b" not in found.toml
