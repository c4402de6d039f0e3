"""The Kubernetes manifests: what their schemas accept, and what each pod may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import PREFIX, Settings

ROOT = Path(__file__).parents[3]
BASE = ROOT / "deploy/kubernetes/base"
VERSION = "1.31"
SERVICES = {"orchestrator": 8000, "rollout": 8001, "trainer": 8002, "reward": 8003}
PODS = (*SERVICES, "redis")
OF_KUSTOMIZE = "kustomization.yaml"
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
    validate = pytest.importorskip(
        "kubernetes_validate", reason="`pip install kubernetes-validate==1.37.0` has the schemas"
    )
    validate.validate(manifest, VERSION, strict=True)


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
    assert mounted - {"data"} == declared


@pytest.mark.parametrize(("name", "port"), SERVICES.items())
def test_a_pod_is_probed_where_it_listens(name: str, port: int) -> None:
    asked = {kind: container(name)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness")}
    assert asked == {kind: {"path": "/readyz", "port": port} for kind in asked}
    assert container(name)["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port}
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


def test_the_trainer_is_given_time_for_a_checkpoint_here_too() -> None:
    assert pod("trainer")["terminationGracePeriodSeconds"] > Settings().sync_deadline_s
