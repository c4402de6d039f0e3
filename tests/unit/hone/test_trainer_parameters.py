"""Names that people use for GRPO, as keys of a job: values worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hone.trainer.parameters import check, explicit_parameters, translate
from shared.errors import BadRequest
from shared.job import Job
from shared.job.file import parse_job

REST: dict[str, Any] = {
    "name": "x",
    "model": "m",
    "rewards": [{"grader": "math"}],
    "data": {"train": "rows"},
}


@dataclass
class Adapter:
    """The fields of peft's LoraConfig that are looked at."""

    r: int = 8
    lora_alpha: int = 16
    target_modules: Any = None
    bias: str = "none"
    use_dora: bool = False


def job_of(**given: Any) -> Job:
    translation = translate(given)
    check(translation, "Trainer")
    document = translation.job
    return parse_job(REST | document | {"data": REST["data"] | document.get("data", {})})


def test_trls_batches_count_completions_and_its_steps_updates() -> None:
    job = job_of(
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_generations=4,
        num_iterations=2,
        max_steps=100,
        save_steps=24,
        warmup_steps=20,
    )
    assert job.sampling.group_size == 4
    assert job.sampling.prompts_per_step == 32  # 16 x 8 completions, groups of 4
    assert job.training.minibatches == 4  # of 8 parts, 2 for each update
    assert job.training.epochs == 2
    assert job.steps == 13  # 8 updates a batch: 12.5 batches
    assert job.checkpoints.every == 3
    assert job.training.warmup_steps == 3


def test_batch_size_counts_prompts_and_goes_over_the_others() -> None:
    job = job_of(batch_size=5, per_device_train_batch_size=16, max_steps=7, num_train_epochs=2)
    assert (job.sampling.prompts_per_step, job.training.minibatches) == (5, 1)
    assert (job.steps, job.data.epochs) == (7, None)


def test_a_generation_batch_is_cut_into_updates() -> None:
    job = job_of(
        generation_batch_size=64, per_device_train_batch_size=8, num_generations=8, max_steps=16
    )
    assert (job.sampling.prompts_per_step, job.training.minibatches, job.steps) == (8, 8, 2)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"epsilon": 0.1}, (0.1, 0.1)),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, (0.1, 0.3)),
        ({"epsilon_high": 0.3}, (0.2, 0.3)),
        ({"loss_type": "cispo", "epsilon": 0.1, "epsilon_high": 5.0}, (0.2, 4.0)),
    ],
)
def test_clipping_is_on_both_sides_unless_the_upper_bound_is_given(
    given: dict[str, Any], bounds: tuple[float, float]
) -> None:
    training = job_of(max_steps=1, **given).training
    assert (training.clip_low, training.clip_high) == bounds


def test_other_values_become_the_keys_values() -> None:
    job = job_of(
        max_steps=50,
        scale_rewards=False,
        lr_scheduler_type="constant_with_warmup",
        warmup_ratio=0.1,
        learning_rate=2e-5,
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        beta=0.04,
        use_bias_correction_kl=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.5,
        model_init_kwargs={"torch_dtype": "bfloat16", "revision": "abc"},
        top_k=-1,
        report_to=["wandb", "tensorboard", "trackio"],
        weight_sync_method="disk",
    )
    assert (job.advantages.std, job.training.schedule) == ("none", "constant")
    assert (job.training.warmup_steps, job.training.min_learning_rate) == (5, pytest.approx(2e-6))
    assert (job.training.beta, job.training.kl) == (0.04, "k3_true")
    assert (job.correction.method, job.correction.high) == ("token_tis", 2.5)
    assert (job.training.dtype, job.model_revision) == ("bfloat16", "abc")
    assert (job.sampling.top_k, job.weight_sync) == (0, "disk")
    assert job.wandb and job.wandb.project == "hone"
    assert job.trackers == ("tensorboard", "trackio")


def test_lora_comes_from_a_switch_from_fields_or_from_pefts_config() -> None:
    assert job_of(max_steps=1).lora is None
    switched = job_of(max_steps=1, use_lora=True).lora
    assert switched and (switched.rank, switched.alpha) == (16, 32)
    given = job_of(max_steps=1, lora_r=4, lora_target_modules=["q_proj"]).lora
    assert given and (given.rank, given.target_modules) == (4, ("q_proj",))
    config = job_of(max_steps=1, peft_config=Adapter(target_modules={"v_proj", "q_proj"})).lora
    assert config and (config.rank, config.alpha) == (8, 16)
    assert config.target_modules == ("q_proj", "v_proj")


def of_trl(**given: Any) -> Job:
    from trl.trainer.grpo_config import GRPOConfig

    config = GRPOConfig("out", use_cpu=True, max_steps=10, **given)
    return job_of(**explicit_parameters(config))


def test_a_whole_config_of_trl_has_its_seed_and_corrects_only_for_vllm() -> None:
    job = of_trl(seed=7, vllm_importance_sampling_mode="token_mask")
    assert (job.seed, job.correction.method) == (7, "auto")
    truncated = job_of(max_steps=1, vllm_importance_sampling_mode="token_truncate").correction
    assert (truncated.method, truncated.high) == ("token_tis", 3.0)  # TRL's bound, not the job's 2
    unbounded = of_trl(use_vllm=True, vllm_importance_sampling_clip_max=None).correction
    assert (unbounded.method, unbounded.high) == ("sequence_mask", 1e9)
    correction = of_trl(use_vllm=True, vllm_importance_sampling_mode="token_mask").correction
    assert (correction.method, correction.low, correction.high) == ("icepop", 0.0, 3.0)


def test_a_config_of_trl_divides_each_of_several_rewards_by_its_deviation() -> None:
    job = of_trl(multi_objective_aggregation="normalize_then_sum", scale_rewards="none")
    assert (job.advantages.combine, job.advantages.std) == ("normalize_then_sum", "group")


@pytest.mark.parametrize(("kind", "steps"), [("constant", 0), ("constant_with_warmup", 4)])
def test_trls_constant_rate_has_no_warmup(kind: str, steps: int) -> None:
    training = of_trl(lr_scheduler_type=kind, warmup_steps=4).training
    assert (training.schedule, training.warmup_steps) == ("constant", steps)


def test_evaluations_with_several_samples_have_the_temperature_of_training() -> None:
    evaluation = job_of(max_steps=1, num_generations_eval=4, temperature=0.8).evaluation
    assert (evaluation.samples, evaluation.temperature) == (4, 0.8)


def test_a_share_of_the_learning_rate_is_of_the_default_too() -> None:
    share = {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    assert job_of(max_steps=1, **share).training.min_learning_rate == pytest.approx(1e-7)
    assert job_of(max_steps=1, use_lora=True, **share).training.min_learning_rate == (
        pytest.approx(1e-6)
    )


def test_a_section_of_the_job_goes_over_other_names() -> None:
    job = job_of(max_steps=3, temperature=0.7, sampling={"temperature": 0.5, "refills": 2})
    assert (job.sampling.temperature, job.sampling.refills) == (0.5, 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_generatins": 4}, "'num_generatins' is unknown; did you mean 'num_generations'?"),
        ({"dataset": []}, "'dataset' is unknown; did you mean 'train_dataset'?"),
        ({"reward_fn": len}, "'reward_fn' is unknown; did you mean 'reward_funcs'?"),
        ({"callbacks": [1]}, r"callbacks is \[1\]: training is in the services"),
        ({"max_steps": "3"}, "max_steps is '3'; expected a whole number"),
        ({"max_steps": 2.5}, "max_steps is 2.5; expected a whole number"),
        ({"per_device_train_batch_size": 0}, "is 0; expected a whole number from 1 on"),
        ({"warmup_ratio": 2}, "warmup_ratio is 2; expected a share from 0 to 1"),
        ({"model_init_kwargs": "x"}, "model_init_kwargs is 'x'; expected a dict"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": "x"}}, "'x'}; expected the number min_lr or"),
        ({"peft_config": {"r": 8}}, "peft_config is {'r': 8}; expected a peft.LoraConfig"),
        ({"use_lora": "no"}, "use_lora is 'no'; expected True or False"),
        ({"report_to": 3}, "report_to is 3; expected a name or a list of names"),
        ({"scale_rewards": [1]}, r"scale_rewards is \[1\]; expected one of True"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1: the trainer's log-probs"),
        ({"scale_rewards": "all"}, "scale_rewards is 'all'; expected one of True, False, 'group'"),
        ({"lr_scheduler_type": "step"}, "lr_scheduler_type is 'step'; expected one of 'constant'"),
        ({"per_device_train_batch_size": 6}, "a batch has 6 completions .* num_generations is 8"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_generations": 4},
            "steps_per_generation is 3 and gradient_accumulation_steps 2; expected a multiple",
        ),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, 'would bound the ratio of "cispo" below 1'),
        ({"delta": 1.1, "epsilon": 0.2}, "delta is 1.1; expected 1 \\+ epsilon_high or more"),
        ({"warmup_ratio": 0.1, "num_train_epochs": 1}, "expected warmup_steps, or max_steps"),
        ({"peft_config": Adapter(use_dora=True)}, "peft_config.use_dora is True; expected False"),
        ({"optim": "lion"}, "optim is 'lion': the optimizer is AdamW"),
        ({"fp16": True}, "fp16 is True: training.dtype is"),
        ({"generation_kwargs": {"beams": 2}}, "generation_kwargs is {'beams': 2}: set them in"),
    ],
)
def test_a_wrong_parameter_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        job_of(**({"max_steps": 1} | given if "num_train_epochs" not in given else given))
