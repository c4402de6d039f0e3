"""Starts a service in a container, `python -m deploy.container rollout`: takes its GPUs, publishes
the service's URL, and becomes the service.

A container sees all GPUs of its machine. HONE_ROLLOUT_DEVICES and HONE_TRAINER_DEVICES assign them,
as under `hone up`. Samplers are copies of one container, so each takes the first free place: a
share of the GPUs, and a port.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path

from deploy import machine
from deploy.machine import SERVICES
from deploy.probe import URL
from shared.errors import BadRequest, HoneError, Unavailable
from shared.http.urls import url_at
from shared.settings import Settings, load_settings

PLACES = Path("/run/hone/places")
"""A folder that all samplers of a machine see. Each locks a file in it; the kernel releases the
lock when the sampler ends."""

MAX_PLACES = 64
"""Most samplers on a machine without GPUs."""


def main() -> None:
    try:
        name = sys.argv[1] if len(sys.argv) > 1 else ""
        if name not in SERVICES:
            raise BadRequest(f"{name!r} is not a service; expected one of {', '.join(SERVICES)}")
        settings, visible = load_settings(), machine.visible_devices()
        if name == "rollout":
            place = take_place(PLACES, num_places(settings, visible))
            host = os.environ.get("ADVERTISE_HOST") or socket.gethostname()
            os.environ.update(of_sampler(settings, visible, place, host))
        if name == "trainer":
            os.environ.update(of_trainer(settings, visible))
        URL.write_text(own_url(name, load_settings()))
    except HoneError as error:
        sys.exit(error.detail)
    os.execv(sys.executable, [sys.executable, "-m", f"services.{name}"])


def own_url(name: str, settings: Settings) -> str:
    """Returns the service's URL from inside its container."""
    return url_at(settings.host, getattr(settings, f"{name}_port"))


def of_trainer(settings: Settings, visible: tuple[str, ...]) -> dict[str, str]:
    """Returns the trainer's environment variables: a rank for each of its GPUs, unless
    HONE_TRAINER_RANKS is set."""
    if settings.trainer_devices and "trainer_ranks" not in settings.model_fields_set:
        settings = settings.model_copy(update={"trainer_ranks": len(settings.trainer_devices)})
    plan = machine.plan(visible, settings)
    if plan is None:
        return {}
    return plan.environment("trainer") | {"HONE_TRAINER_RANKS": str(settings.trainer_ranks)}


def of_sampler(
    settings: Settings, visible: tuple[str, ...], place: int, host: str
) -> dict[str, str]:
    """Returns the environment variables of the sampler at `place`. The orchestrator reaches it by
    the name `host`."""
    port = settings.rollout_port + place
    variables = {"HONE_ROLLOUT_PORT": str(port)}
    if settings.rollout_advertise_url is None:
        variables["HONE_ROLLOUT_ADVERTISE_URL"] = f"http://{host}:{port}"
    if not visible:
        return variables
    size = settings.tensor_parallel_size
    own = (settings.rollout_devices or visible)[place * size : (place + 1) * size]
    return variables | machine.plan_sampler(own, settings).environment("rollout")


def num_places(settings: Settings, visible: tuple[str, ...]) -> int:
    """Returns for how many samplers the machine has GPUs."""
    if not visible:
        return MAX_PLACES
    return max(len(settings.rollout_devices) // settings.tensor_parallel_size, 1)


def take_place(folder: Path, num: int) -> int:
    """Returns the first free place of `num`, and keeps it as long as this process lives. Raises
    Unavailable if none is free."""
    for place in range(num):
        lock = os.open(folder / str(place), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        os.set_inheritable(lock, True)  # the service that this process becomes keeps the lock
        return place
    raise Unavailable(
        f"all {num} places of samplers on this machine are taken; expected at most that many "
        "samplers (--scale rollout), or more GPUs in HONE_ROLLOUT_DEVICES"
    )


if __name__ == "__main__":
    main()
