"""What Modal's client deploys without a word although Modal's documentation forbids it, and what
this project does not allow itself: found in what a control plane was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deploy.modal.common import DAY_S, GPU_TYPES, MAX_GPUS

LABEL = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
REGIONS = ("us-east", "us-west", "eu-west", "ap-south")
MAX_GRACE_S = 30
CRON_MOST = (59, 23, 31, 12, 7)
"""The largest number in each field of a cron line."""


def faults(name: str, function: dict[str, Any]) -> list[str]:
    """Returns a sentence for each fault of a deployed function or Server."""
    return [f"{name}: {fault}" for fault in _faults(function)]


def _faults(function: dict[str, Any]) -> Iterator[str]:
    gpu = function["resources"].get("gpu_config", {})
    kind, count = gpu.get("gpu_type"), gpu.get("count", 0)
    web, http = function.get("webhook_config"), function.get("http_config")
    if kind and kind not in GPU_TYPES:
        yield f"no GPU is called {kind!r}"
    elif kind and count > MAX_GPUS.get(kind, 8):
        yield f"no machine has {count} {kind}"
    if function["timeout_secs"] > DAY_S:
        yield f"timeout {function['timeout_secs']} s, expected at most {DAY_S}"
    if "_experimental_group_size" in function:
        if web:
            yield "a clustered function is no web function"
        if count % 8:
            yield f"clustered with {count} GPUs, expected whole machines of 8"
    if kind and not {"milli_cpu", "memory_mb"} <= function["resources"].keys():
        yield "a GPU without CPU cores and memory of the host"
    if kind and function.get("scheduler_placement", {}).get("nonpreemptible"):
        yield "every function with a GPU is preemptible"
    if (cron := function.get("schedule", {}).get("cron")) and not _is_cron(cron["cron_string"]):
        yield f"no cron line: {cron['cron_string']!r}"
    if web:
        if not web.get("requires_proxy_auth"):
            yield "a web function without proxy authentication"
        if (label := web.get("requested_suffix")) and not LABEL.fullmatch(label):
            yield f"no label of a host: {label!r}"
    if http:
        if http.get("unauthenticated"):
            yield "a Server without proxy authentication"
        if http.get("exit_grace_period", 0) > MAX_GRACE_S:
            yield f"exit_grace_period {http['exit_grace_period']} s, expected at most {MAX_GRACE_S}"
        for region in http["proxy_regions"]:
            if region not in REGIONS:
                yield f"no routing region is called {region!r}"


def _is_cron(line: str) -> bool:
    fields = line.split()
    return len(fields) == len(CRON_MOST) and all(
        int(number) <= most
        for field, most in zip(fields, CRON_MOST, strict=True)
        for number in re.findall(r"\d+", field)
    )
