"""The compose files and Dockerfiles: what Compose accepts, and what each container may do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from deploy import supervisor
from services.trainer.processes import launcher
from shared.settings import PREFIX, Settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GPU, CPU, SAMPLERS = "compose.yaml", "compose.cpu.yaml", "compose.samplers.yaml"
BASE, HOSTS, TLS = "docker/services.yaml", "compose.hosts.yaml", "docker/tls.yaml"
OPENENV = "examples/openenv/compose.yaml"
STACKS = [[GPU], [CPU], [SAMPLERS], [GPU, HOSTS], [CPU, HOSTS], [GPU, TLS]]
SERVICES = ("orchestrator", "rollout", "trainer", "reward")
DOCKERFILES = [f"docker/{name}.Dockerfile" for name in SERVICES]
NEEDED = {
    "PRIVATE_ADDRESS": "10.0.0.1",
    "TRAINER_ADDRESS": "10.0.0.2",
    "DOMAIN": "hone.test",
    "HONE_TOKEN": "chosen",
    "OPENENV_IMAGE": "echo-env:1.0",
}

REFUSED = {
    (): {"name", "include", "version"},
    ("services", "*"): {"gpus", "develop", "post_start", "pre_stop", "attach", "annotations"},
    ("services", "*", "depends_on", "*"): {"restart", "required"},
    ("services", "*", "healthcheck"): {"start_interval"},
    ("services", "*", "build"): {"secrets", "additional_contexts"},
    ("configs", "*"): {"content"},
    ("secrets", "*"): {"environment"},
}
"""Keys that Compose 1.29 refuses, or that its successor warns of."""


def document(file: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / file).read_text())


def merged(below: Any, above: Any) -> Any:
    """Returns what Compose makes of two values of a key."""
    if isinstance(below, dict) and isinstance(above, dict):
        shared = {key: merged(below[key], above[key]) for key in below.keys() & above.keys()}
        return below | above | shared
    return [*below, *above] if isinstance(below, list) and isinstance(above, list) else above


def services(files: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the services of a stack, with what they extend."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for name, service in document(file)["services"].items():
            if extends := service.pop("extends", None):
                service = merged(document(extends["file"])["services"][extends["service"]], service)
            found[name] = merged(found.get(name, {}), service)
    return found


def own(files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the services that are ours."""
    yield from ((name, it) for name, it in services(files).items() if name in SERVICES)


def at(path: tuple[str, ...], value: Any) -> Iterator[dict[str, Any]]:
    """Yields the tables at a path, in which "*" is any key."""
    if not isinstance(value, dict):
        return
    if not path:
        yield value
        return
    for key in value if path[0] == "*" else [path[0]]:
        yield from at(path[1:], value.get(key))


@pytest.mark.parametrize("file", [GPU, CPU, SAMPLERS, BASE, HOSTS, TLS, OPENENV])
def test_a_compose_file_is_one_by_its_schema(file: str) -> None:
    jsonschema.Draft7Validator(get_builtin_schema("vendor.compose-spec")).validate(document(file))


@pytest.mark.parametrize("file", [GPU, CPU, SAMPLERS, BASE, HOSTS, TLS, OPENENV])
def test_a_compose_file_has_no_key_that_an_old_compose_refuses(file: str) -> None:
    for path, refused in REFUSED.items():
        for table in at(path, document(file)):
            assert not refused & table.keys(), (file, path)
    if file == BASE:
        assert not any("depends_on" in service for service in document(file)["services"].values())


def whole(files: list[str], given: dict[str, str]) -> dict[str, Any]:
    """Returns the one document that Compose makes of a stack's files, `given` being its variables.
    Raises KeyError for a variable that has to be given."""
    sections: dict[str, Any] = {}
    for section in ("networks", "volumes"):
        sections[section] = {
            key: value for file in files for key, value in document(file).get(section, {}).items()
        }
    return json.loads(interpolated(json.dumps(sections | {"services": services(files)}), given))


def interpolated(text: str, given: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, otherwise, default = match["name"], match["otherwise"], match["default"]
        return given[name] if otherwise == ":?" else given.get(name, default)

    return re.sub(r"\$\{(?P<name>\w+)(?P<otherwise>:[-?])(?P<default>[^}]*)\}", value, text)


@pytest.mark.parametrize("files", [*STACKS, [CPU, OPENENV]], ids=" ".join)
def test_a_stack_is_one_by_the_schema_and_names_nothing_that_is_not_there(files: list[str]) -> None:
    """What `config` of Compose would find, without Compose."""
    stack = whole(files, NEEDED)
    assert "$" not in json.dumps(stack), "a variable in a form that is not used here"
    jsonschema.Draft7Validator(get_builtin_schema("vendor.compose-spec")).validate(stack)
    for name, service in stack["services"].items():
        assert {*service.get("networks", ())} <= stack["networks"].keys(), name
        assert service.get("depends_on", {}).keys() <= stack["services"].keys(), name
        assert not ("network_mode" in service and "networks" in service), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in stack["volumes"] or source.startswith("/"), (name, volume)
        if build := service.get("build"):
            assert (ROOT / build["dockerfile"]).is_file(), name
    with pytest.raises(KeyError):
        whole([SAMPLERS], {})


@pytest.mark.parametrize("files", [*STACKS, [CPU, OPENENV]], ids=" ".join)
def test_compose_itself_accepts_the_files(files: list[str]) -> None:
    command = compose()
    if command is None:
        pytest.skip("neither `docker compose` nor `docker-compose` is installed here")
    arguments = [part for file in files for part in ("-f", file)]
    done = subprocess.run(
        [*command, *arguments, "config", "-q"],
        cwd=ROOT,
        env=os.environ | NEEDED,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def compose() -> list[str] | None:
    """Returns the command of whichever Compose there is."""
    if shutil.which("docker"):
        asked = subprocess.run(["docker", "compose", "version"], capture_output=True)
        if asked.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


@pytest.mark.parametrize("files", STACKS, ids=" ".join)
def test_every_container_may_do_as_little_as_it_can(files: list[str]) -> None:
    for name, service in services(files).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["tmpfs"] == ["/tmp:mode=1777"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert not {"privileged", "pid", "ipc", "devices"} & service.keys(), name
        if name != "proxy":
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
            assert "cap_add" not in service, name
            assert service["pids_limit"] > 0 and service["init"] is True, name
        assert service["restart"] == ("no" if name == "init" else "unless-stopped"), name


@pytest.mark.parametrize("files", STACKS, ids=" ".join)
def test_every_service_is_asked_whether_it_is_ready(files: list[str]) -> None:
    for name, service in own(files):
        assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "deploy.probe"], name
        assert re.fullmatch(r"\d+m", service["healthcheck"]["start_period"]), name


@pytest.mark.parametrize("file", [GPU, CPU])
def test_only_the_orchestrator_is_reached_and_only_from_this_machine(file: str) -> None:
    published = {name: it["ports"] for name, it in services([file]).items() if "ports" in it}
    assert published == {"orchestrator": ["127.0.0.1:${HONE_ORCHESTRATOR_PORT:-8000}:8000"]}


def test_the_example_s_server_reaches_the_orchestrator_alone() -> None:
    found, networks = services([CPU, OPENENV]), document(OPENENV)["networks"]
    assert networks["environments"]["internal"] is True
    beside = [name for name, it in found.items() if "environments" in it.get("networks", ())]
    assert sorted(beside) == ["openenv", "orchestrator"]
    assert found["openenv"]["networks"] == ["environments"]
    assert found["openenv"]["cap_drop"] == ["ALL"] and "ports" not in found["openenv"]
    assert found["orchestrator"]["environment"]["HONE_ALLOWED_ENVIRONMENTS"] == "openenv:8000"


@pytest.mark.parametrize("file", [GPU, CPU])
def test_untrusted_code_has_no_route_out(file: str) -> None:
    reward, networks = services([file])["reward"], document(file)["networks"]
    assert reward["networks"] == ["grading"]
    assert networks["grading"] == {"internal": True}
    assert services([file])["redis"]["networks"] == ["store"]
    assert networks["store"] == {"internal": True}
    for name in ("reward", "redis"):  # else Docker's DNS asks for it, by the host's route
        assert services([file])[name]["dns"] == ["127.0.0.1"]
    (profile,) = [it for it in reward["security_opt"] if it.startswith("seccomp:")]
    rules = json.loads((ROOT / profile.removeprefix("seccomp:")).read_text())
    assert rules["defaultAction"] == "SCMP_ACT_ERRNO"
    assert reward["volumes"] == ["secrets:/run/hone/secrets:ro"]
    others = (it for name, it in services([file]).items() if name != "reward")
    assert not any("seccomp" in option for it in others for option in it["security_opt"])


@pytest.mark.parametrize("file", [GPU, CPU])
def test_only_the_trainer_writes_weights_and_only_init_the_token(file: str) -> None:
    mounted = {name: it.get("volumes", []) for name, it in services([file]).items()}
    assert "weights:/weights" in mounted["trainer"]
    assert "weights:/weights:ro" in mounted["rollout"]
    for name in ("trainer", "rollout"):  # where weight_sync "shm" puts them, and looks for them
        assert "HONE_SHM_DIR=/weights" in (ROOT / f"docker/{name}.Dockerfile").read_text()
    assert "runs:/runs:ro" in mounted["rollout"]
    for name in SERVICES:
        assert "secrets:/run/hone/secrets:ro" in mounted[name]
    declared = document(file)["volumes"].keys()
    named = {volume.partition(":")[0] for volumes in mounted.values() for volume in volumes}
    assert named - {"${DATA"} <= declared <= named | {"data"}


@pytest.mark.parametrize("files", STACKS, ids=" ".join)
def test_no_one_writes_to_a_folder_of_the_user(files: list[str]) -> None:
    mounted = {name: it.get("volumes", []) for name, it in services(files).items()}
    given = {name: volume for name, it in mounted.items() for volume in it if "DATA" in volume}
    assert {*given} == {"rollout", "trainer", "orchestrator"} & mounted.keys()
    assert {*given.values()} == {"${DATA:-data}:/data:ro"}


@pytest.mark.parametrize("file", [GPU, CPU])
def test_what_was_accepted_survives_redis(file: str) -> None:
    redis = services([file])["redis"]
    assert {"--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction"} <= {
        *redis["command"]
    }
    assert redis["volumes"] == ["redis:/data"]


def test_the_trainer_is_given_the_time_that_a_checkpoint_may_take() -> None:
    minutes = int(services([GPU])["trainer"]["stop_grace_period"].removesuffix("m"))
    needed_s = launcher.SAVE_S + 2 * launcher.STOP_S
    assert minutes * 60 >= needed_s and needed_s <= supervisor.TRAINER_STOP_DEADLINE_S
    line = next(
        line
        for line in (ROOT / "docs/docker.md").read_text().splitlines()
        if line.startswith("| `trainer` |")
    )
    assert f"{launcher.SAVE_S / 60:g} of its {minutes} minutes" in line


def test_samplers_elsewhere_have_the_token_and_port_of_the_trainers_machine() -> None:
    stack = services([SAMPLERS])
    assert stack["init"]["environment"]["HONE_TOKEN"].startswith("${HONE_TOKEN:?")
    url = stack["rollout"]["environment"]["HONE_ORCHESTRATOR_URL"]
    assert url.startswith("http://${TRAINER_ADDRESS:?")
    assert url.endswith("}:${HONE_ORCHESTRATOR_PORT:-8000}")


def test_the_two_stacks_differ_in_gpus_and_memory_only() -> None:
    of_gpus = {"build", "image", "deploy", "ulimits", "shm_size", "environment"}
    on_gpus, on_cpu = services([GPU]), services([CPU])
    assert on_gpus.keys() == on_cpu.keys()
    for name, service in on_gpus.items():
        differing = {
            key
            for key in service.keys() | on_cpu[name]
            if service.get(key) != on_cpu[name].get(key)
        }
        assert differing <= (of_gpus if name in ("rollout", "trainer") else set()), name
    for name in ("rollout", "trainer"):
        (device,) = on_gpus[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert "deploy" not in on_cpu[name] and "ulimits" not in on_cpu[name]
        assert on_gpus[name]["shm_size"] == "${SHM_SIZE:-16g}"


@pytest.mark.parametrize("files", STACKS, ids=" ".join)
def test_every_variable_of_a_service_is_a_setting(files: list[str]) -> None:
    settings = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name, service in services(files).items():
        for variable in service.get("environment", {}):
            if variable.startswith(PREFIX):
                assert variable.removesuffix("_FILE") in settings, (name, variable)


def test_every_variable_of_the_compose_files_is_documented() -> None:
    page = (ROOT / "docs/docker.md").read_text()
    for file in (GPU, CPU, SAMPLERS, BASE, HOSTS, TLS):
        for variable in re.findall(r"\$\{(\w+)", (ROOT / file).read_text()):
            assert f"`{variable}`" in page, (file, variable)


@pytest.mark.parametrize("file", [GPU, CPU, BASE, TLS])
def test_every_image_that_is_pulled_is_pinned_by_digest(file: str) -> None:
    for name, service in services([file]).items():
        if not service["image"].startswith("hone-"):
            assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", service["image"]), name


@pytest.mark.parametrize("files", STACKS, ids=" ".join)
def test_no_image_is_built_by_two_services_at_once(files: list[str]) -> None:
    names = [it["image"] for it in services(files).values() if "build" in it]
    assert len(names) == len(set(names)), names


@pytest.mark.parametrize("file", DOCKERFILES)
def test_a_dockerfile_has_a_pinned_base_one_extra_and_no_root(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"ARG BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert [line for line in lines if line.startswith("FROM")] == [
        "FROM ${BASE} AS build",
        "FROM build AS hone",
        "FROM ${BASE}",
    ]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = Path(file).stem
    assert f"ARG EXTRAS={name}" in lines and name in extras["optional-dependencies"]
    last = len(lines) - 1 - lines[::-1].index("FROM ${BASE}")
    assert "USER 10001:10001" in lines[last:]
    assert lines[-1] == f'CMD ["python", "-m", "deploy.container", "{name}"]'


def test_all_images_have_the_same_base() -> None:
    bases = {
        re.findall(r"^ARG BASE=.*", (ROOT / file).read_text(), re.M)[0] for file in DOCKERFILES
    }
    assert len(bases) == 1


def test_what_compiles_at_run_time_is_shown_to_compile_in_the_build() -> None:
    text = (ROOT / "docker/rollout.Dockerfile").read_text()
    as_user = text[text.index("USER 10001") :]
    assert "python /check/check_kernels.py" in as_user
    assert "install --yes --no-install-recommends g++" in text


@pytest.mark.parametrize("name", ["rollout", "trainer"])
def test_what_is_compiled_at_run_time_is_loaded_from_a_volume_and_not_from_tmp(name: str) -> None:
    """A tmpfs of Docker is noexec unless it says otherwise: a library in it cannot be loaded."""
    service = services([CPU])[name]
    assert service["tmpfs"] == ["/tmp:mode=1777"]
    assert f"{name}-cache:/cache" in service["volumes"]
    environment = image_environment(name)
    for variable in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert environment[variable].split("/")[1] == "cache", variable


def image_environment(name: str) -> dict[str, str]:
    text = (ROOT / f"docker/{name}.Dockerfile").read_text().replace("\\\n", " ")
    (last,) = [line for line in text.splitlines() if line.startswith("ENV ")]
    return dict(item.split("=", 1) for item in last.removeprefix("ENV ").split())


def test_dockerfiles_pass_their_linter() -> None:
    hadolint = Path(sysconfig.get_path("scripts"), "hadolint")
    if not hadolint.is_file():
        pytest.skip("hadolint is not installed here (it comes with the extra `dev`)")
    done = subprocess.run([hadolint, *DOCKERFILES], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
