"""Configurations of other trainers become jobs with the values worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl.trainer.grpo_config import GRPOConfig
from typer.testing import CliRunner

from hone.cli import app
from hone.importing import trl
from hone.importing.importing import FRAMEWORKS, ImportResult, import_config
from hone.importing.table import default
from shared.errors import BadRequest
from shared.job.file import load_job

OPENRLHF = """ray job submit --address=http://127.0.0.1:8265
-- python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-4B
--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256
--data.prompt_dataset zhuzilin/dapo-math-17k --data.input_key question
--rollout.max_new_tokens 4096 --data.max_len 6144 --algo.advantage.estimator rloo
--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k2
--actor.eps_clip_low_high 0.2 0.27 --actor.adam.lr 5e-7 --actor.lr_warmup_ratio 0
--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop
--ckpt.output_dir out --ckpt.save_steps 10 --actor.entropy_coef 0.001
--vllm.gpu_memory_utilization 0.7 --made.up 3"""

VERL = """
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: true,
            kl_ctrl: {kl_coef: 0.002}}
data:
  train_files: train.parquet
  val_files: test.parquet
  train_batch_size: 512
  max_prompt_length: 1024
  max_response_length: 3072
  filter_overlong_prompts: true
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora_rank: 32, lora_alpha: 64}
  actor:
    ppo_mini_batch_size: 128
    loss_agg_mode: seq-mean-token-mean
    clip_ratio_high: 0.28
    optim: {lr: 1e-6, lr_warmup_steps_ratio: 0.1, lr_scheduler_type: cosine, min_lr_ratio: 0.5}
  rollout: {n: 16, top_p: 0.9, name: vllm, prompt_length: "${data.max_prompt_length}"}
trainer: {total_training_steps: 205, logger: [console, wandb], project_name: p,
          experiment_name: Qwen3_8B run, test_freq: 5, save_freq: -1}
custom_reward_function: {path: mine.py, name: score}
"""

PRIME_RL = """
max_steps = 100
seq_len = 4096
model.name = "Qwen/Qwen3-1.7B"
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 1024
[[orchestrator.train.source]]
[orchestrator.train.source.env.taskset]
id = "math-env"
dataset_name = "owner/math"
[trainer.optim]
lr = 3e-6
[trainer.scheduler]
type = "cosine"
[trainer.model.lora]
rank = 32
[ckpt]
interval = 50
"""

TRL = """
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


def of(text: str, name: str, folder: Path, **more: Any) -> ImportResult:
    file = folder / name
    file.write_text(text)
    return import_config([str(file)], **more)


def values(found: ImportResult) -> dict[str, Any]:
    """Returns the job by dotted keys, read back from its TOML."""
    table = tomllib.loads(found.toml)
    assert table == found.job
    parts = {key: value for key, value in table.items() if isinstance(value, dict)}
    inner = {f"{name}.{key}": each for name, part in parts.items() for key, each in part.items()}
    return {key: value for key, value in table.items() if key not in parts} | inner


def lacking(found: ImportResult) -> dict[str, str]:
    return {each.name: each.why for each in found.lacking}


def test_an_openrlhf_command_becomes_a_job() -> None:
    found = import_config([OPENRLHF])
    expected = {
        "name": "qwen3-4b",
        "model": "Qwen/Qwen3-4B",
        "max_model_len": 6144,
        "data.columns": {"prompt": "question"},
        "data.epochs": 1.0,
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
        "training.adam_beta2": 0.95,
        "advantages.baseline": "leave_one_out",
        "advantages.std": "none",
        "correction.method": "icepop",
        "correction.low": 0.5,
        "correction.high": 5.0,
        "memory.gradient_checkpointing": False,
        "checkpoints.every": 10,
    }
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert found.settings == {"HONE_GPU_MEMORY_UTILIZATION": 0.7}
    assert lacking(found).keys() == {"actor.entropy_coef", "made.up"}
    assert lacking(found)["made.up"] == "not in the table of OpenRLHF"
    assert found.fill_in.keys() == {"rewards"}


def test_openrlhf_s_older_names_are_the_same_keys() -> None:
    words = "python -m openrlhf.cli.train_ppo_ray --pretrain a/m --prompt_data a/d "
    words += "--advantage_estimator group_norm --rollout_batch_size 64 --n_samples_per_prompt 4 "
    words += "--train_batch_size 256 --prompt_max_len 512 --generate_max_len 1536 --use_kl_loss"
    got = values(import_config(words.split()))
    assert got["model"] == "a/m"
    assert got["sampling.prompts_per_step"] == 64
    assert got["training.minibatches"] == 1
    assert "training.loss" not in got  # dapo, as the job's own
    assert (got["max_model_len"], got["sampling.max_tokens"]) == (2048, 1536)
    assert (got["training.beta"], got["training.kl"]) == (0.01, "k1")


def test_openrlhf_s_gspo_is_corrected_by_the_ratio_itself() -> None:
    words = "openrlhf --actor.policy_loss_type gspo --algo.advantage.is_correction_enable"
    job = import_config(words.split()).job
    assert job["training"]["loss"] == "gspo"
    assert job["correction"] == {"method": "none", "ratio_base": "sampler"}


def test_verl_s_yaml_becomes_a_job(tmp_path: Path) -> None:
    found = of(VERL, "config.yaml", tmp_path)
    expected = {
        "name": "qwen3_8b-run",
        "steps": 205,
        "max_model_len": 4096,
        "data.train": "train.parquet",
        "sampling.prompts_per_step": 512,
        "sampling.group_size": 16,
        "sampling.max_tokens": 3072,
        "sampling.overlong_prompts": "drop",
        "sampling.top_p": 0.9,
        "correction.truncated_sampling": "accept",
        "advantages.std": "none",
        "training.loss": "grpo",
        "training.minibatches": 4,
        "training.clip_low": None,  # 0.2, as the job's own
        "training.clip_high": 0.28,
        "training.dual_clip": 3.0,
        "training.beta": 0.002,
        "training.kl": "k3_true",
        "training.warmup_steps": 20,  # 20.5, rounded down there
        "training.schedule": "cosine",
        "training.min_learning_rate": 5e-7,
        "training.weight_decay": 0.01,
        "lora.rank": 32,
        "lora.alpha": 64.0,
        "evaluation.every": 5,
        "checkpoints.every": 0,
        "rewards": [{"file": "mine.py", "function": "score"}],
    }
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert found.fill_in == {}
    assert lacking(found) == {}
    assert found.job["wandb"] == {"project": "p"} and "trackers" not in found.job


def test_verl_s_overrides_are_the_same_keys() -> None:
    words = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gdpo data.train_batch_size=64"
    words += " +actor_rollout_ref.actor.ppo_mini_batch_size=64 trainer.v1.trainer_mode="
    words += "separate_async trainer.logger=['console'] "
    words += "actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
    words += "actor_rollout_ref.actor.optim.clip_grad=0.3 actor_rollout_ref.model.lora.rank=8"
    found = import_config(words.split())
    got = values(found)
    assert got["advantages.combine"] == "normalize_then_sum"
    assert got["training.max_grad_norm"] == 0.3
    assert lacking(found) == {
        "actor_rollout_ref.model.lora.rank": "not in the table of verl",
        "trainer.v1.trainer_mode": "see max_staleness",
    }
    assert got["training.loss"] == "gspo" and "training.dual_clip" not in got


def test_of_verl_s_two_divergences_the_loss_s_is_the_job_s() -> None:
    words = ["verl", "algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"]
    found = import_config([*words, "actor_rollout_ref.actor.kl_loss_coef=0.01"])
    assert values(found)["training.beta"] == 0.01
    assert "algorithm.use_kl_in_reward" in [each.name for each in found.lacking]


def test_verl_s_two_bounds_are_of_tokens_or_of_sequences() -> None:
    key = "algorithm.rollout_correction.rollout_is"
    for level, method in (("token", "icepop"), ("sequence", "sequence_mask")):
        job = import_config(["verl", f"{key}={level}", f"{key}_threshold=0.5_5.0"]).job
        assert job["correction"] == {"method": method, "low": 0.5, "high": 5.0}


GRPO = ["verl", "algorithm.adv_estimator=grpo"]
BUFFER = "reward_model.overlong_buffer"
KWARGS = "reward.reward_kwargs.overlong_buffer_cfg"
SIZES = {"len": 4096, "penalty_factor": 0.5}


@pytest.mark.parametrize("key", [BUFFER, "reward_model.reward_kwargs.overlong_buffer_cfg", KWARGS])
def test_verl_s_overlong_buffer_is_the_grader_overlong(key: str) -> None:
    words = [*GRPO, "reward_model.reward_manager=dapo", "data.max_response_length=20480"]
    words += [f"+{key}.enable=True", *(f"+{key}.{name}={value}" for name, value in SIZES.items())]
    found = import_config(words)
    params = {"max_tokens": 20480, "buffer_tokens": 4096, "penalty": 0.5}
    assert found.job["rewards"] == [{"grader": "overlong", "shaping": True, "params": params}]
    assert found.lacking == ()
    longer = import_config([*words, "reward.reward_kwargs.max_resp_len=24000"])
    assert longer.job["rewards"][0]["params"]["max_tokens"] == 24000


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("data.train_files=a", "reward manager 'dapo' applies this penalty; it is 'naive'"),
        (f"{BUFFER}.enable=sometimes reward.reward_manager.name=dapo", "expected true or false"),
        (
            "reward.reward_kwargs.max_resp_len=256 reward.reward_manager.name=dapo",
            "the penalty grows beyond 256 tokens of 512; here it does not",
        ),
    ],
)
def test_an_overlong_buffer_that_hone_has_not_is_listed(words: str, why: str) -> None:
    given = {f"{BUFFER}.enable": True, **{f"{BUFFER}.{name}": SIZES[name] for name in SIZES}}
    given |= dict(word.split("=") for word in words.split())
    found = import_config([*GRPO, *(f"{name}={value}" for name, value in given.items())])
    assert lacking(found) == {f"{KWARGS}.enable": why}
    assert "rewards" not in found.job


def test_an_overlong_buffer_is_off_or_incomplete_or_a_table() -> None:
    words = [*GRPO, "reward_model.reward_manager=dapo"]
    off = import_config([*words, f"{BUFFER}.enable=False", f"{BUFFER}.len=9"])
    assert ("rewards" in off.job, off.lacking) == (False, ())
    part = import_config([*words, f"{BUFFER}.enable=True", f"{BUFFER}.len=9"])
    assert "needs max_tokens, buffer_tokens and penalty" in part.fill_in["rewards"]
    whole = import_config([*words, f"+{KWARGS}={{enable:True,len:9,penalty_factor:1}}"])
    params = {"max_tokens": 512, "buffer_tokens": 9, "penalty": 1.0}
    assert whole.job["rewards"][0]["params"] == params
    alone = import_config([*words, f"{BUFFER}.len=9"])  # without `enable` it does nothing
    assert lacking(alone) == {f"{KWARGS}.len": "not in the table of verl"}


STRATEGY = "expected 'steps' with save_steps, or 'no'"


@pytest.mark.parametrize(
    ("words", "every", "lacks"),
    [
        ("", 500, {}),  # transformers' own
        ("--save_strategy steps --save_steps 100", 100, {}),
        ("--save_strategy steps --save_steps 0.1", 40, {}),  # a tenth of 400
        ("--save_strategy no --save_steps 100", 0, {}),
        ("--save_strategy epoch --save_steps 100", None, {"save_strategy": STRATEGY}),
        ("--save_strategy best", None, {"save_strategy": STRATEGY}),
        ("--save_steps 0", None, {"save_steps": "expected 1 or more"}),
    ],
)
def test_trl_s_save_strategy_is_kept_or_listed(
    words: str, every: int | None, lacks: dict[str, str]
) -> None:
    found = import_config(["trl", "grpo", "--max_steps", "400", *words.split()])
    assert found.job.get("checkpoints", {}).get("every") == every
    assert lacking(found).keys() == lacks.keys()
    assert all(text in lacking(found)[name] for name, text in lacks.items())


def test_trl_evaluates_by_steps_or_the_strategy_is_listed() -> None:
    words = ["trl", "grpo", "--dataset_name", "a/d", "--eval_strategy"]
    assert import_config([*words, "steps"]).job["evaluation"]["every"] == 10  # TRL's logging_steps
    assert import_config([*words, "steps", "--eval_steps", "7"]).job["evaluation"]["every"] == 7
    found = import_config([*words, "epoch"])
    assert lacking(found).keys() == {"eval_strategy"}
    assert "every" not in found.job["evaluation"]


def test_prime_rl_decays_over_the_last_steps_only(tmp_path: Path) -> None:
    text = PRIME_RL.replace('"cosine"', '"linear"')
    got = values(of(text, "rl.toml", tmp_path))
    assert (got["training.schedule"], got["training.warmup_steps"]) == ("constant", 10)
    got = values(of(text.replace('"linear"', '"linear"\ndecay_steps = 90'), "rl.toml", tmp_path))
    assert got["training.schedule"] == "linear"


def test_prime_rl_s_defaults_count_where_nothing_is_said(tmp_path: Path) -> None:
    text = "orchestrator.group_size = 16\ntrainer.model.optimization_dtype = 'float32'\n"
    found = of(text, "rl.toml", tmp_path)
    got = values(found)
    assert got["sampling.prompts_per_step"] == 8  # 128 completions
    assert got["checkpoints.every"] == 0  # only at the end, as there
    assert "trainer.model.optimization_dtype" in lacking(found)


def test_prime_rl_s_toml_becomes_a_job(tmp_path: Path) -> None:
    found = of(PRIME_RL, "rl.toml", tmp_path)
    expected = {
        "name": "qwen3-1-7b",
        "steps": 100,
        "max_staleness": 4,
        "sampling.prompts_per_step": 32,  # 512 completions in groups of 16
        "sampling.group_size": 16,
        "sampling.max_tokens": 1024,
        "advantages.std": "none",
        "correction.ratio_base": "sampler",
        "training.learning_rate": 3e-6,
        "training.schedule": "cosine",
        "training.warmup_steps": 10,
        "training.weight_decay": 0.01,
        "lora.rank": 32,
        "checkpoints.every": 50,
    }
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert got["environment.kind"] == "worker" and found.fill_in.keys() == {"data.train"}
    assert "python -m hone.agents.verifiers math-env > rows.jsonl" in found.fill_in["data.train"]
    written = found.toml.replace("\n#  ", "")
    assert "`hone work agent.py`" in written and '{"id": "math-env"}' in written
    assert lacking(found).keys() == {"trainer.loss.kl_tau"}


def test_prime_rl_s_older_wandb_and_teacher_are_known(tmp_path: Path) -> None:
    text = PRIME_RL + '[wandb]\nproject = "p"\nname = "n"\n[teacher_inference]\nport = 1\n'
    found = of(text, "rl.toml", tmp_path)
    assert found.job["wandb"] == {"project": "p", "name": "n"}
    assert "see [teacher]" in lacking(found)["teacher_inference.port"]


def test_verl_s_empty_batch_size_is_to_be_filled_in() -> None:
    found = import_config([*GRPO, "data.train_batch_size=0"])
    assert "expected prompts of a step" in found.fill_in["sampling.prompts_per_step"]
    assert "minibatches" not in found.job.get("training", {})


def test_verl_s_teacher_and_loggers_are_taken_over() -> None:
    teacher = "distillation.teacher_models.teacher_model.model_path=a/teacher"
    words = ["distillation.enabled=true", teacher, "trainer.logger=[console,mlflow,tensorboard]"]
    found = import_config([*GRPO, *words, "trainer.project_name=p"])
    assert found.job["teacher"] == {"model": "a/teacher"}
    assert "see [teacher]" in lacking(found)["distillation.enabled"]
    assert found.job["trackers"] == ["tensorboard", "mlflow"] and "wandb" not in found.job
    found = import_config([*GRPO, "trainer.logger=[console,swanlab]"])
    assert "not ['swanlab']" in lacking(found)["trainer.logger"]


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_trl_file_becomes_a_job(tmp_path: Path, suffix: str) -> None:
    text = TRL if suffix == "yaml" else json.dumps(yaml.safe_load(TRL))
    found = of(text, f"grpo.{suffix}", tmp_path, processes=2)
    expected = {
        "model": "a/m",
        "steps": 100,  # 400 updates, of which a batch has 2 minibatches * 2 iterations
        "data.train": "owner/math",
        "data.config": "main",
        "sampling.prompts_per_step": 16,  # 4 * 2 processes * 16 parts / 8 completions
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
        "checkpoints.every": 25,
        "rewards": [
            {"grader": "math", "params": {"answer": "solution"}, "weight": 1.0},
            {"file": "mine.py", "function": "brief", "weight": 0.1},
        ],
    }
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert lacking(found).keys() == {"top_entropy_quantile"}
    assert (found.fill_in, found.faults, found.ignored) == (
        {},
        (),
        ("num_processes", "use_vllm", "output_dir"),
    )
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
    words += ["--top_p", "0.9"]
    found = import_config(words)
    assert (found.fill_in, found.faults, found.lacking) == ({}, (), ())
    (tmp_path / "job.toml").write_text(found.toml)
    job = load_job(tmp_path / "job.toml")
    assert job.training.learning_rate == 1e-5 and job.steps == 10
    assert (job.training.beta, job.training.kl) == (0.1, "k3_true")
    assert (job.max_model_len, job.sampling.overlong_prompts) == (1536, "truncate")
    assert (job.correction.method, job.correction.high) == ("sequence_mask", 2)
    assert (job.sampling.top_p, job.correction.truncated_sampling) == (0.9, "accept")
    assert (job.evaluation.samples, job.evaluation.temperature) == (8, 1)  # as in training
    assert job.lora is not None
    assert (job.lora.rank, job.lora.dropout, job.lora.target_modules) == (
        16,
        0.05,
        ("q_proj", "v_proj"),
    )


@pytest.mark.parametrize("field", dataclasses.fields(GRPOConfig), ids=lambda each: each.name)
def test_every_field_of_a_grpoconfig_has_a_key_or_a_reason(field: Any) -> None:
    assert trl.knows(field.name)
    if field.name in trl.DEFAULTS:
        assert trl.DEFAULTS[field.name] == field.default


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_key_of_a_table_is_the_job_s(name: str) -> None:
    rows = FRAMEWORKS[name].rows
    for key in (each for row in rows.values() if row.here for each in row.here.split(",")):
        assert key.startswith("HONE_") or default(key) is not ...


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
    assert code == 0 and json.loads(out)["lacking"][0]["value"] == 0.001


def test_a_script_is_refused_with_what_to_do_instead() -> None:
    code, out, said = run("train.sh")
    assert (code, out) == (2, "")
    sentence = " ".join(said.split())
    assert "'train.sh' is not one of the .yaml, .yml, .toml, .json files that are read" in sentence
    assert "write the command that starts the trainer after --" in sentence
    code, out, said = run("grpo.py")
    assert (code, out) == (2, "")
    sentence = " ".join(said.split())
    assert "'grpo.py' is a script, and only .yaml, .yml, .toml, .json files are read" in sentence
    assert "`hone import -- trl grpo --learning_rate 1e-6`" in sentence


def test_a_variable_that_was_not_replaced_is_listed(tmp_path: Path) -> None:
    found = import_config([*GRPO, "data.train_batch_size=$SIZE", "algorithm.gamma=${oc.env:G}"])
    assert lacking(found).keys() == {"data.train_batch_size", "algorithm.gamma"}
    assert found.fill_in["sampling.prompts_per_step"] == (
        "data.train_batch_size is '$SIZE'; expected the variable's value"
    )
    assert "sampling" not in found.job or "prompts_per_step" not in found.job["sampling"]
    text = "data: {max_response_length: 64, max_prompt_length: '${data.max_response_length}'}"
    found = of(text, "a.yaml", tmp_path)
    assert found.job["max_model_len"] == 128
    found = import_config(["trl", "grpo", "--learning_rate", "$LR", "--max_steps", "3"])
    assert lacking(found).keys() == {"learning_rate"}
    assert "learning_rate" not in found.job["training"]


def test_two_names_of_one_key_must_have_one_value() -> None:
    words = ["openrlhf", "--rollout_batch_size", "4", "--rollout.batch_size"]
    assert import_config([*words, "4"]).job["sampling"]["prompts_per_step"] == 4
    with pytest.raises(BadRequest, match=r"rollout.batch_size is 5, and 4 by another name"):
        import_config([*words, "5"])


def test_a_value_of_another_kind_is_to_be_filled_in() -> None:
    found = import_config(["verl.trainer.main_ppo", "data.train_batch_size=x"])
    assert "with the values beside it" in found.fill_in["training.minibatches"]


def test_what_no_trainer_knows_is_refused(tmp_path: Path) -> None:
    code, _, said = run("--", "train", "--foo", "3")
    assert code == 2 and "no trainer is known with foo" in said
    code, _, said = run(str(tmp_path / "none.yaml"))
    assert code == 2 and "cannot be read" in said


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", BOMB, "the YAML's aliases stand for more than 10000 values"),
        ("a.yaml", "data: &a {b: *a}", "is nested too deeply, or refers to itself"),
        ("a.yaml", "[" * 20_000, "is nested too deeply"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']", "is not valid yaml: could not"),
        ("a.toml", f"a = {'[' * 5000}", "is nested too deeply"),
        ("a.json", "{", "is not valid json: Expecting property name"),
        ("a.json", "[1]", "is list, expected keys and values"),
        ("a.json", '{"model": "\\ud800"}', "has text that is no Unicode"),
        ("a.yaml", "save_steps: often", "save_steps is 'often'; expected a number from 0 on"),
        ("a.yaml", "#" * (1 << 20) + "\n", "is longer than 1048576 bytes"),
    ],
)
def test_a_file_that_would_exhaust_the_reader_is_refused(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    (path := tmp_path / name).write_text(text)
    with pytest.raises(BadRequest) as error:
        import_config([str(path)], "trl")
    assert sentence in error.value.detail


def test_a_device_is_not_read_to_its_end(tmp_path: Path) -> None:
    (path := tmp_path / "a.yaml").symlink_to("/dev/zero")
    with pytest.raises(BadRequest, match="is longer than 1048576 bytes"):
        import_config([str(path)])


@pytest.mark.parametrize("value", [[None], {"a": [1, None]}, "\x7f\x1b[2J", float("nan"), "a\nb"])
def test_whatever_a_value_is_the_job_is_toml(tmp_path: Path, value: Any) -> None:
    (path := tmp_path / "a.yaml").write_text(
        json.dumps(dict.fromkeys(FRAMEWORKS["verl"].rows, value))
    )
    found = import_config([str(path)], "verl")
    tomllib.loads(found.toml)
    assert "\x1b" not in found.toml
