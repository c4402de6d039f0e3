"""A stack on one machine: its services, their ports, and their GPUs. Several trainers and samplers
are possible. If another stack of Hone has a port that this stack needs, `port_error` names it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from shared.errors import BadRequest
from shared.host import nvidia
from shared.host.disk import user_name
from shared.host.processes import free_port
from shared.http.urls import url_at
from shared.plan.planning import SHARED_UTILIZATION, TURNS_UTILIZATION
from shared.settings import PREFIX, Settings

SERVICES = ("reward", "trainer", "rollout", "orchestrator")
"""The services in the order of starting; they stop in reverse order."""

Url = Callable[[int], str]
"""Returns the URL of a service by its port."""

ANSWER_S = 2.0
"""Seconds for the program at the port to answer."""

LISTENING = "0A"
"""The state of a socket that listens, in /proc/net/tcp."""

STACK_LINK = "of-stack"
"""Name of the link to a stack's folder, beside its weights in shared memory."""


def exit_on_signals(*signals: signal.Signals) -> None:
    """Lets each of the signals raise SystemExit in the main thread, with 128 plus its number as the
    exit code, so that a program ends what it started and removes its temporary files."""
    for each in signals:
        signal.signal(each, lambda number, _: sys.exit(128 + number))


@dataclass(frozen=True)
class Slot:
    """A trainer and its samplers, by their ports; `number` counts from 0."""

    number: int
    trainer: int
    samplers: range


def slots(settings: Settings) -> list[Slot]:
    each, first = settings.rollout_replicas, settings.rollout_port
    return [
        Slot(
            number,
            settings.trainer_port + number,
            range(first + number * each, first + (number + 1) * each),
        )
        for number in range(settings.trainers)
    ]


def ports(settings: Settings) -> dict[str, int]:
    """Returns the port of each service, by the name of its process. Raises BadRequest if two have
    the same port."""
    trainers = [slot.trainer for slot in slots(settings)]
    samplers = [port for slot in slots(settings) for port in slot.samplers]
    found = {name: int(getattr(settings, f"{name}_port")) for name in SERVICES}
    found |= {process_name("trainer", port): port for port in trainers[1:]}
    found |= {process_name("rollout", port): port for port in samplers[1:]}
    owners: dict[int, str] = {}
    for name, port in found.items():
        if (other := owners.setdefault(port, name)) != name:
            first = f"{PREFIX}{name.partition('-')[0].upper()}_PORT"
            raise BadRequest(
                f"port {port} would be taken by both {other} and {name}; expected {first} to "
                "begin where enough consecutive ports are free"
            )
    return found


def on_free_ports(*, trainers: int = 1, samplers: int = 1) -> dict[str, str]:
    """Returns the variables that put a stack on free ports, for so many trainers and samplers."""
    counts = {"trainer": trainers, "rollout": samplers}
    return {
        f"{PREFIX}{name.upper()}_PORT": str(free_port(counts.get(name, 1))) for name in SERVICES
    }


def process_name(service: str, port: int) -> str:
    """Returns the name of a trainer or sampler, and so of its log, if it is not the first."""
    return f"{service}-{port}"


def places(chosen: Sequence[Slot], url: Url, services: Sequence[str] = SERVICES) -> dict[str, str]:
    """Returns the settings with the URLs of these trainers and their samplers, for the kinds among
    `services`."""
    found = {
        "trainer_url": ";".join(url(slot.trainer) for slot in chosen),
        "rollout_url": ";".join(",".join(map(url, slot.samplers)) for slot in chosen),
    }
    return {name: text for name, text in found.items() if name.removesuffix("_url") in services}


def variables(
    chosen: Sequence[Slot], url: Url, services: Sequence[str] = SERVICES
) -> dict[str, str]:
    found = places(chosen, url, services)
    return {f"{PREFIX}{name.upper()}": text for name, text in found.items()}


# --- another stack ----------------------------------------------------------------------------


def port_error(settings: Settings, port: int) -> BadRequest | None:
    """Returns the error for a port that a service of Hone has, with what to do; None if no service
    of Hone has it."""
    url = url_at(settings.host, port)
    service = _service_at(url)
    if service is None:
        return None
    user, folder = _user(port), _folder(settings, url)
    whose = (f" of {user}" if user else "") + (f" in {folder}" if folder else "")
    stop = f"`hone down --dir {folder}` stops it" if folder else "its owner can stop it"
    ports = ", ".join(f"{PREFIX}{name.upper()}_PORT" for name in SERVICES)
    return BadRequest(
        f"port {port} is taken by the {service} service of another Hone stack{whose}: "
        f"{_reach(settings, folder)}{stop}, or let this stack have ports of its own ({ports})"
    )


def _reach(settings: Settings, folder: Path | None) -> str:
    """Returns how to reach the other stack: its orchestrator's URL, if known."""
    url = _urls(folder).get("orchestrator") if folder else None
    own = url_at(settings.host, settings.orchestrator_port)
    if url is None and _service_at(own) == "orchestrator":
        url = own
    return f"{PREFIX}ORCHESTRATOR_URL={url} leads to it, " if url else ""


def _service_at(url: str) -> str | None:
    """Returns the service of Hone that answers at the URL; None if none does."""
    try:
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:
            said: Any = client.get(f"{url}/version").json()
    except (httpx.HTTPError, ValueError):
        return None
    is_hone = isinstance(said, dict) and "hone" in said and said.get("service") in SERVICES
    return said["service"] if is_hone else None


def _folder(settings: Settings, url: str) -> Path | None:
    """Returns the folder of this user's stack with the service, if shared memory has a link to
    it."""
    folders = (link.readlink() for link in settings.shm_dir.glob(f"*/{STACK_LINK}"))
    return next((folder for folder in folders if url in _urls(folder).values()), None)


def _urls(folder: Path) -> dict[str, str]:
    """Returns the URLs of the services of the stack in the folder; none if it does not run."""
    try:
        return dict(json.loads((folder / "stack.json").read_text())["urls"])
    except (OSError, ValueError, KeyError):
        return {}


def _user(port: int) -> str | None:
    """Returns the user whose socket listens at the port, if the kernel shows it."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
                return user_name(int(uid))
    return None


# --- GPUs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The devices of each service, as CUDA_VISIBLE_DEVICES names them, and the share of a device's
    memory that the sampler takes."""

    rollout: tuple[str, ...]
    trainer: tuple[str, ...]
    gpu_memory_utilization: float

    def environment(self, service: str) -> dict[str, str]:
        """Returns the environment variables for a service."""
        devices = {"rollout": self.rollout, "trainer": self.trainer}.get(service)
        if devices is None:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
            "HONE_GPU_MEMORY_UTILIZATION": str(self.gpu_memory_utilization),
            "HONE_ROLLOUT_DEVICES": ",".join(self.rollout),
            "HONE_TRAINER_DEVICES": ",".join(self.trainer),
        }


def plan(visible: tuple[str, ...], settings: Settings) -> Plan | None:
    """Returns the plan for the `visible` devices; None on a machine without any. Devices that the
    settings name are used. Otherwise the sampler gets the first `tensor_parallel_size` and the
    trainer the `trainer_ranks` after them, or the last ones if there are too few for both. Only a
    sampler that shares a device takes less of its memory, unless the setting says how much. With
    `colocate` both get the same devices. Raises BadRequest if a service needs more devices than
    exist, or if services that take turns name different devices.
    """
    if not visible:
        return None
    num_rollout, num_trainer = settings.tensor_parallel_size, settings.trainer_ranks
    rollout = settings.rollout_devices
    trainer = settings.trainer_devices
    if settings.colocate:
        rollout = trainer = _same(rollout, trainer) or visible[: max(num_rollout, num_trainer)]
    if not rollout:
        free = tuple(device for device in visible if device not in trainer)
        rollout = (free if len(free) >= num_rollout else visible)[:num_rollout]
    if not trainer:
        free = tuple(device for device in visible if device not in rollout)
        trainer = free[:num_trainer] if len(free) >= num_trainer else visible[-num_trainer:]
    _check_enough(rollout, num_rollout, "HONE_ROLLOUT_DEVICES", "HONE_TENSOR_PARALLEL_SIZE")
    _check_enough(trainer, num_trainer, "HONE_TRAINER_DEVICES", "HONE_TRAINER_RANKS")
    return Plan(rollout, trainer, _utilization(rollout, trainer, settings))


def plan_sampler(own: tuple[str, ...], settings: Settings) -> Plan:
    """Returns the plan of a sampler with its `own` part of HONE_ROLLOUT_DEVICES.

    It shares devices that are in HONE_TRAINER_DEVICES too; that is not set on a machine without a
    trainer. With `colocate` it takes turns on its own devices. Raises BadRequest if it needs more
    devices than it has.
    """
    _check_enough(
        own, settings.tensor_parallel_size, "HONE_ROLLOUT_DEVICES", "HONE_TENSOR_PARALLEL_SIZE"
    )
    trainer = settings.trainer_devices
    if settings.colocate:
        _same(settings.rollout_devices, trainer)
        trainer = own
    return Plan(own, trainer, _utilization(own, trainer, settings))


def _utilization(rollout: tuple[str, ...], trainer: tuple[str, ...], settings: Settings) -> float:
    if "gpu_memory_utilization" in settings.model_fields_set or not set(rollout) & set(trainer):
        return settings.gpu_memory_utilization
    return TURNS_UTILIZATION if settings.colocate else SHARED_UTILIZATION


def _same(rollout: tuple[str, ...], trainer: tuple[str, ...]) -> tuple[str, ...]:
    if rollout and trainer and rollout != trainer:
        raise BadRequest(
            f"HONE_COLOCATE is set, and HONE_ROLLOUT_DEVICES ({','.join(rollout)}) are not "
            f"HONE_TRAINER_DEVICES ({','.join(trainer)}): expected the same for both"
        )
    return rollout or trainer


def _check_enough(devices: tuple[str, ...], needed: int, names: str, count: str) -> None:
    if len(devices) < needed:
        raise BadRequest(
            f"{count} is {needed}, and there are {len(devices)} device(s) for it "
            f"({', '.join(devices)}); lower it, or name more in {names}"
        )


def visible_devices(folder: Path = nvidia.DEVICES) -> tuple[str, ...]:
    """Returns the NVIDIA devices that a process started now would see."""
    named = os.environ.get(nvidia.VISIBLE)
    if named in nvidia.HIDDEN:
        return ()
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    return tuple(map(str, range(nvidia.num_cards(folder))))
