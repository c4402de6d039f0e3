"""From the flags of `modal run deploy/modal/train.py` to the job, and to where its parts run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deploy.machine import plan
from deploy.modal.flags import OVERRIDES, Flags, job_of, one_container, placement_of
from shared.errors import BadRequest
from shared.job import LoraSpec
from shared.settings import Settings

GSM8K = "deploy/jobs/gsm8k.toml"


def flags(**given: Any) -> Flags:
    return Flags(**{"job": GSM8K} | given)


REACHES = [
    ({"model": "org/m"}, lambda job: job.model, "org/m"),
    ({"max_steps": 7}, lambda job: job.steps, 7),
    ({"batch_size": 5}, lambda job: job.sampling.prompts_per_step, 5),
    ({"num_generations": 6}, lambda job: job.sampling.group_size, 6),
    ({"max_tokens": 99}, lambda job: job.sampling.max_tokens, 99),
    ({"max_model_len": 2048}, lambda job: job.max_model_len, 2048),
    ({"learning_rate": 2e-05}, lambda job: job.training.learning_rate, 2e-05),
    ({"save_steps": 3}, lambda job: job.checkpoints.every, 3),
    ({"sync_weights_every": 1}, lambda job: (job.sync_every, job.max_staleness), (1, 0)),
    ({"sync_weights_every": 3}, lambda job: (job.sync_every, job.max_staleness), (3, 2)),
    ({"weight_sync_method": "restart"}, lambda job: job.weight_sync, "restart"),
    ({"weight_sync_method": "auto"}, lambda job: job.weight_sync, "disk"),
    ({"weight_sync_method": "shm", "simple_mode": True}, lambda job: job.weight_sync, "shm"),
    ({"simple_mode": True}, lambda job: job.weight_sync, "auto"),
    ({"use_lora": True}, lambda job: job.lora, LoraSpec()),
    ({}, lambda job: job.lora, None),
    ({}, lambda job: job.weight_sync, "disk"),
]


@pytest.mark.parametrize(("given", "key", "value"), REACHES)
def test_each_flag_reaches_the_job(given: dict[str, Any], key: Any, value: Any) -> None:
    assert key(job_of(flags(**given))) == value


def test_there_is_a_case_for_each_flag() -> None:
    tried = {name for given, _, _ in REACHES for name in given}
    placed = {"num_rollout_workers", "vllm_mode", "job"}
    assert tried | placed == {field.name for field in dataclasses.fields(Flags)}
    assert {*OVERRIDES} <= tried


def test_what_is_not_given_is_as_the_file_has_it() -> None:
    job = job_of(flags())
    assert (job.steps, job.sampling.max_tokens, job.model) == (
        200,
        512,
        "Qwen/Qwen2.5-1.5B-Instruct",
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weight_sync_method": "http"}, "'http' and the samplers are in containers of their own"),
        ({"weight_sync_method": "magic"}, "'magic' and the samplers"),
        ({"sync_weights_every": 2, "simple_mode": True}, "max_staleness is 1 and trainer and"),
        ({"max_steps": -1}, "--set 'steps=-1': 'steps': got -1"),
        ({"job": "deploy/jobs/none.toml"}, "no job file at 'deploy/jobs/none.toml'"),
    ],
)
def test_a_flag_that_cannot_be_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        job_of(flags(**given))


def test_a_file_of_this_machine_is_refused_and_one_of_the_volume_is_not(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    text = 'name = "a"\nmodel = "m"\nsteps = 1\nrewards = [{grader = "length"}]\n[data]\ntrain = '
    (tmp_path / "here.toml").write_text(f'{text}"{tmp_path}/train.jsonl"\n')
    (tmp_path / "there.toml").write_text(f'{text}"/volumes/data/train.jsonl"\n')
    with pytest.raises(BadRequest, match=r"has to name it: /volumes/data/train\.jsonl"):
        job_of(flags(job=str(tmp_path / "here.toml")))
    job = job_of(flags(job=str(tmp_path / "there.toml")))
    assert job.data.train == "/volumes/data/train.jsonl"


ALL = ("reward", "trainer", "rollout", "orchestrator")


@pytest.mark.parametrize(
    ("given", "gpu", "container", "services", "turns", "ranks", "samplers"),
    [
        ({"simple_mode": True}, "A100", "A100", ALL, "1", "1", 0),
        ({"simple_mode": True, "vllm_mode": "colocate"}, "H100:2", "H100:2", ALL, "1", "2", 0),
        ({"simple_mode": True, "vllm_mode": "serve"}, "A100", "A100:2", ALL, "0", "1", 0),
        ({"simple_mode": True, "vllm_mode": "serve"}, "H100:2", "H100:3", ALL, "0", "2", 0),
        ({"num_rollout_workers": 3}, "A100", "A100", ALL[:2] + ALL[3:], None, "1", 3),
        ({}, "H100:4", "H100:4", ALL[:2] + ALL[3:], None, "4", 2),
    ],
)
def test_where_the_parts_of_a_run_are(
    given: dict[str, Any],
    gpu: str,
    container: str,
    services: tuple[str, ...],
    turns: str | None,
    ranks: str,
    samplers: int,
) -> None:
    found = placement_of(flags(**given), gpu)
    assert (found.gpu, found.services, found.num_samplers) == (container, services, samplers)
    assert found.environment.get("HONE_COLOCATE") == turns
    assert found.environment["HONE_TRAINER_RANKS"] == ranks


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_rollout_workers": 2, "simple_mode": True}, "is 2 with --simple-mode; expected 1"),
        ({"num_rollout_workers": 9}, "is 9; expected 1 to 8"),
        ({"num_rollout_workers": 0}, "is 0; expected 1 to 8"),
        ({"vllm_mode": "serve"}, "is 'serve' without --simple-mode"),
        ({"vllm_mode": "both", "simple_mode": True}, "is 'both'; expected colocate or serve"),
    ],
)
def test_placements_that_cannot_be_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        placement_of(flags(**given), "A100")


def test_of_several_gpus_of_a_trial_the_sampler_has_one() -> None:
    one, three = one_container(1), one_container(3)
    assert (one["HONE_COLOCATE"], one["HONE_TRAINER_RANKS"]) == ("1", "1")
    assert (three["HONE_COLOCATE"], three["HONE_TRAINER_RANKS"]) == ("0", "2")
    settings = Settings(trainer_ranks=2, tensor_parallel_size=1, colocate=False)
    found = plan(("0", "1", "2"), settings)
    assert found and (found.rollout, found.trainer) == (("0",), ("1", "2"))


@pytest.mark.parametrize("mode", ["colocate", "serve"])
def test_one_container_never_reloads_the_volume_that_it_alone_writes(mode: str) -> None:
    """Modal would refuse: Redis and the logs keep files of it open."""
    run = placement_of(flags(simple_mode=True, vllm_mode=mode), "A100")
    assert run.environment["HONE_RUNS_REFRESH"] == "true"
    assert one_container(1)["HONE_RUNS_REFRESH"] == "true"
    assert "HONE_RUNS_REFRESH" not in placement_of(flags(), "A100").environment
