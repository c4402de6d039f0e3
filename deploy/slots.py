"""The services of a stack on one machine, and their ports. Trainers and samplers may be several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.errors import BadRequest
from shared.host.processes import free_port
from shared.settings import PREFIX, Settings

SERVICES = ("reward", "trainer", "rollout", "orchestrator")
"""In the order of starting; they stop in reverse order."""

Url = Callable[[int], str]
"""Returns the URL of a service by its port."""


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
    found |= {beside("trainer", port): port for port in trainers[1:]}
    found |= {beside("rollout", port): port for port in samplers[1:]}
    owners: dict[int, str] = {}
    for name, port in found.items():
        if (other := owners.setdefault(port, name)) != name:
            first = f"{PREFIX}{name.partition('-')[0].upper()}_PORT"
            raise BadRequest(
                f"port {port} would be taken by both {other} and {name}; expected {first} to begin "
                "where as many ports in a row are free"
            )
    return found


def on_free_ports(*, trainers: int = 1, samplers: int = 1) -> dict[str, str]:
    """Returns the variables that put a stack on free ports, for so many trainers and samplers."""
    counts = {"trainer": trainers, "rollout": samplers}
    return {
        f"{PREFIX}{name.upper()}_PORT": str(free_port(counts.get(name, 1))) for name in SERVICES
    }


def beside(service: str, port: int) -> str:
    """Returns the name of a trainer or sampler, and so of its log, if it is not the first."""
    return f"{service}-{port}"


def places(chosen: Sequence[Slot], url: Url, services: Sequence[str] = SERVICES) -> dict[str, str]:
    """Returns the settings that name these trainers and their samplers, as far as they are among
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
