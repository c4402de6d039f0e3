"""The Kubernetes manifests: what their schemas accept, and what each pod may do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.trainer.processes import launcher
from shared.settings import PREFIX, Settings

ROOT = Path(__file__).parents[3]
BASE = ROOT / "deploy/kubernetes/base"
PAGE = ROOT / "docs/kubernetes.md"
VERSION = "1.31"
SERVICES = {"orchestrator": 8000, "rollout": 8001, "trainer": 8002, "reward": 8003}
PODS = (*SERVICES, "redis")
OF_KUSTOMIZE = "kustomization.yaml"
VARIANTS = sorted(BASE.parent.glob(f"*/{OF_KUSTOMIZE}"))
MANIFESTS = [
    pytest.param(document, id=f"{file.name}-{number}")
    for file in sorted(BASE.glob("*.yaml"))
    if file.name != OF_KUSTOMIZE
    for number, document in enumerate(yaml.safe_load_all(file.read_text()))
]


def workload(name: str) -> dict[str, Any]:
    """Returns the Deployment or StatefulSet of a service."""
    documents = yaml.safe_load_all((BASE / f"{name}.yaml").read_text())
    (found,) = (it for it in documents if it["kind"] in ("Deployment", "StatefulSet"))
    return found


def pod(name: str) -> dict[str, Any]:
    return workload(name)["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return only


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_is_one_by_its_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_schemas_refuse_a_field_that_is_not_kubernetes() -> None:
    wrong = workload("trainer") | {"replica": 1}
    with pytest.raises(kubernetes_validate.ValidationError, match="'replica' was unexpected"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_every_manifest_is_applied_and_every_image_has_its_place() -> None:
    kustomization = yaml.safe_load((BASE / OF_KUSTOMIZE).read_text())
    assert {*kustomization["resources"], OF_KUSTOMIZE} == {it.name for it in BASE.glob("*.yaml")}
    assert {it["name"] for it in kustomization["images"]} == {f"hone-{it}" for it in SERVICES}
    for image in kustomization["images"]:
        assert image["newTag"] not in ("", "latest")


@pytest.mark.parametrize("name", PODS)
def test_a_pod_may_do_as_little_as_it_can(name: str) -> None:
    spec, security = pod(name), pod(name)["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
    expected = "Localhost" if name == "reward" else "RuntimeDefault"
    assert security["seccompProfile"]["type"] == expected
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "limits" in container(name)["resources"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert not any("hostPath" in volume for volume in spec["volumes"])
    mounted = {mount["name"] for mount in container(name)["volumeMounts"]}
    declared = {volume["name"] for volume in spec["volumes"]}
    claimed = {
        it["metadata"]["name"] for it in workload(name)["spec"].get("volumeClaimTemplates", ())
    }
    assert mounted == declared | claimed


@pytest.mark.parametrize(("name", "port"), SERVICES.items())
def test_a_pod_is_probed_where_it_listens(name: str, port: int) -> None:
    asked = {
        kind: container(name)[f"{kind}Probe"]["httpGet"]
        for kind in ("startup", "readiness", "liveness")
    }
    paths = {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}
    assert asked == {kind: {"path": path, "port": port} for kind, path in paths.items()}
    startup = container(name)["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30 * 60
    assert container(name)["ports"] == [{"containerPort": port}]


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_of_a_pod_is_a_setting(name: str) -> None:
    settings = {f"{PREFIX}{setting.upper()}" for setting in Settings.model_fields}
    names = {variable["name"] for variable in container(name)["env"]}
    own = {variable for variable in names if variable.startswith(PREFIX)}
    assert own - {"HONE_TOKEN_FILE"} <= settings
    assert "HONE_TOKEN_FILE" in own


def test_a_trainer_has_a_rank_and_a_sampler_a_shard_for_each_gpu() -> None:
    for name, variable in (
        ("trainer", "HONE_TRAINER_RANKS"),
        ("rollout", "HONE_TENSOR_PARALLEL_SIZE"),
    ):
        values = {it["name"]: it.get("value") for it in container(name)["env"]}
        limits = container(name)["resources"]["limits"]
        assert values[variable] == str(limits["nvidia.com/gpu"])


def test_only_who_has_to_reaches_a_pod_and_untrusted_code_has_no_route_out() -> None:
    policies = {
        it["metadata"]["name"]: it["spec"]
        for it in yaml.safe_load_all((BASE / "network.yaml").read_text())
    }
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert policies.keys() == {"nobody", *PODS}
    who = {
        name: {
            peer["podSelector"]["matchLabels"]["app"]
            for rule in policies[name]["ingress"]
            for peer in rule["from"]
        }
        for name in PODS
    }
    assert who == {
        "orchestrator": {"rollout"},
        "rollout": {"orchestrator", "trainer"},
        "trainer": {"orchestrator", "rollout", "trainer"},
        "reward": {"orchestrator"},
        "redis": {"orchestrator"},
    }
    for name in ("reward", "redis"):
        assert policies[name]["egress"] == [] and "Egress" in policies[name]["policyTypes"]


def test_redis_asks_the_orchestrator_for_a_password_and_its_probes_have_it() -> None:
    """A network policy keeps others out only where the network plugin knows policies."""
    redis = container("redis")
    secret = {"secretKeyRef": {"name": "hone", "key": "redis-password"}}
    assert {"name": "REDISCLI_AUTH", "valueFrom": secret} in redis["env"]
    assert redis["args"][redis["args"].index("--requirepass") + 1] == "$(REDISCLI_AUTH)"
    assert "--protected-mode" not in redis["args"]
    names = [it["name"] for it in container("orchestrator")["env"]]
    assert names.index("REDIS_PASSWORD") < names.index("HONE_REDIS_URL"), "a later one is no value"
    values = {it["name"]: it for it in container("orchestrator")["env"]}
    assert values["REDIS_PASSWORD"]["valueFrom"] == secret
    assert values["HONE_REDIS_URL"]["value"] == "redis://:$(REDIS_PASSWORD)@redis:6379/0"
    assert "--from-literal=redis-password=" in PAGE.read_text()


def test_a_registry_is_written_into_all_variants_by_one_command(tmp_path: Path) -> None:
    ((script, files),) = re.findall(r"sed -i (\S+) (deploy/\S+)", PAGE.read_text())
    base, cpu, other = (BASE.parent / it / OF_KUSTOMIZE for it in ("base", "cpu", "runtime-class"))
    assert [base, cpu, other] == VARIANTS == sorted(ROOT.glob(files))
    assert "images" not in yaml.safe_load(other.read_text()), "it has the base's"
    copies = [tmp_path / "base", tmp_path / "cpu"]
    for file, copy in zip((base, cpu), copies, strict=True):
        copy.write_text(file.read_text())
    subprocess.run(["sed", "-i", script, *copies], check=True)
    in_base, in_cpu = (yaml.safe_load(copy.read_text())["images"] for copy in copies)
    pushed = {image["newName"] for image in (*in_base, *in_cpu)}
    assert {name.partition("/")[0] for name in pushed} == {"YOUR_REGISTRY"}
    assert {image["name"] for image in in_cpu} <= {image["newName"] for image in in_base}


def test_a_new_sampler_waits_for_the_gpu_of_the_one_that_it_replaces() -> None:
    """As a pod of a set does: its name is free again when the old one is gone."""
    assert workload("rollout")["kind"] == "StatefulSet"
    assert "updateStrategy" not in workload("rollout")["spec"]


@pytest.mark.parametrize("name", ["trainer", "rollout"])
def test_what_is_compiled_outlives_a_pod_and_is_shared_with_none(name: str) -> None:
    spec = workload(name)["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["metadata"] == {"name": "cache"}
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert {"name": "cache", "mountPath": "/cache"} in container(name)["volumeMounts"]
    assert "cache" not in {volume["name"] for volume in pod(name)["volumes"]}
    assert spec["serviceName"] == name
    services = yaml.safe_load_all((BASE / f"{name}.yaml").read_text())
    (service,) = (it for it in services if it["kind"] == "Service")
    assert service["metadata"]["name"] == name and service["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("name", ["trainer", "rollout"])
def test_every_cache_of_an_image_is_on_a_volume_that_outlives_the_pod(name: str) -> None:
    """HOME counts too: FlashInfer's kernels and vLLM's graphs are below it."""
    image = (ROOT / f"docker/{name}.Dockerfile").read_text()
    environment = dict(re.findall(r"(\w*(?:HOME|CACHE)\w*)=(/\S+)", image.partition("USER ")[0]))
    assert {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} <= (
        environment.keys()
    )
    for variable, path in environment.items():
        assert path.startswith(("/cache", "/models", "/opt/venv")), variable
    claimed = {it["name"] for it in pod(name)["volumes"] if "persistentVolumeClaim" in it}
    kept = claimed | {
        it["metadata"]["name"] for it in workload(name)["spec"]["volumeClaimTemplates"]
    }
    assert {"cache", "models"} <= kept


def test_pods_with_gpus_are_let_onto_nodes_that_keep_others_off() -> None:
    has_gpus = {it for it in PODS if "nvidia.com/gpu" in container(it)["resources"]["limits"]}
    assert has_gpus == {"trainer", "rollout"}
    tolerated = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {it: pod(it).get("tolerations") for it in PODS} == {
        it: tolerated if it in has_gpus else None for it in PODS
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("variant", [it.parent.name for it in VARIANTS])
def test_a_variant_is_built_as_its_schemas_accept_it(variant: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", BASE.parent / variant], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    manifests = list(yaml.safe_load_all(built.stdout))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    sets = {it["metadata"]["name"]: it for it in manifests if it["kind"] == "StatefulSet"}
    for name in ("trainer", "rollout"):
        spec = sets[name]["spec"]["template"]["spec"]
        (only,) = spec["containers"]
        expected = "nvidia" if variant == "runtime-class" else None
        assert spec.get("runtimeClassName") == expected
        assert ("nvidia.com/gpu" in only["resources"]["limits"]) is (variant != "cpu")


def test_who_reads_data_has_the_claim_of_data() -> None:
    for name in ("orchestrator", "rollout", "trainer"):
        (mount,) = [it for it in container(name)["volumeMounts"] if it["name"] == "data"]
        assert mount == {"name": "data", "mountPath": "/data", "readOnly": True}
        assert {"name": "data", "persistentVolumeClaim": {"claimName": "data"}} in pod(name)[
            "volumes"
        ]
    claims = yaml.safe_load_all((BASE / "volumes.yaml").read_text())
    assert {it["metadata"]["name"] for it in claims} == {"runs", "models", "data"}


def test_the_namespace_admits_the_sandbox() -> None:
    labels = yaml.safe_load((BASE / "namespace.yaml").read_text())["metadata"]["labels"]
    assert labels == {"pod-security.kubernetes.io/enforce": "privileged"}


def test_the_trainer_is_given_the_time_that_a_checkpoint_may_take_here_too() -> None:
    needed_s = launcher.SAVE_S + 2 * launcher.STOP_S
    assert pod("trainer")["terminationGracePeriodSeconds"] >= needed_s
