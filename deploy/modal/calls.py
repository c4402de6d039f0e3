"""Requests the last call of the trainer's Function and its outcome, and the URLs of deployed
services, from Modal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import modal

from deploy.modal.common import DAY_S, SETTINGS
from shared.errors import Failed, HoneError, Unavailable

APP = f"{SETTINGS.modal_name}-trainer"
LAST = "work"

OF_MODAL = (
    modal.exception.AuthError,
    modal.exception.ClientClosed,
    modal.exception.ConnectionError,
    modal.exception.InternalError,
    modal.exception.PermissionDeniedError,
    modal.exception.ResourceExhaustedError,
    modal.exception.ServiceError,
)
"""Errors of requests to Modal, not of the call itself: the request is repeated."""


@dataclass(frozen=True)
class Call:
    """The last call. `failure` is why it failed, if it did: Modal has retried it and given up.
    `called_at` is in Unix seconds."""

    is_running: bool
    failure: str | None = None
    called_at: float = 0.0


NONE = Call(is_running=False)


@contextlib.contextmanager
def as_hone_errors() -> Generator[None]:
    """Converts every exception of the Function's work to an error of Hone, so that it differs from
    Modal's own errors. A request for the call raises the Function's exception again, but also
    Modal's errors: a TimeoutError while the call runs, and OF_MODAL if Modal cannot answer."""
    try:
        yield
    except HoneError:
        raise
    except Exception as error:  # catches everything: only the class changes
        raise Failed(f"{type(error).__name__}: {error}") from error


async def start() -> None:
    call = await modal.Function.from_name(APP, "work").spawn.aio()
    await _kept().put.aio(LAST, (call.object_id, time.time()))


async def last() -> Call:
    """Returns the last call. Raises one of OF_MODAL if Modal cannot answer. The call's own
    exception is never one of these: see `as_hone_errors`."""
    known = await _kept().get.aio(LAST)
    if known is None:
        return NONE
    id, called_at = known
    try:
        await modal.FunctionCall.from_id(id).get.aio(timeout=0)
    except TimeoutError:
        return Call(is_running=True, called_at=called_at)
    except modal.exception.OutputExpiredError:
        return NONE
    except modal.exception.FunctionTimeoutError as error:  # a long job or a start is under way
        return NONE if time.time() - called_at > DAY_S else Call(False, str(error), called_at)
    except OF_MODAL:
        raise
    except HoneError as error:
        return Call(False, error.detail, called_at)
    except Exception as error:  # an error of Modal about a container that failed before `work`
        return Call(False, f"{type(error).__name__}: {error}", called_at)
    return NONE


async def forget() -> None:
    """Forgets the last call."""
    await _kept().pop.aio(LAST, None)


def _kept() -> Any:
    return modal.Dict.from_name(f"{SETTINGS.modal_name}-calls", create_if_missing=True)


def places() -> dict[str, str]:
    """Returns the settings that name the reward service and the samplers. Raises Unavailable if one
    is not deployed."""
    name = SETTINGS.modal_name
    samplers = [
        url(f"{name}-rollout", f"Sampler{number}") for number in range(SETTINGS.modal_rollouts)
    ]
    return {
        "HONE_REWARD_URL": url(f"{name}-reward", "Reward"),
        "HONE_ROLLOUT_URL": ",".join(samplers),
    }


def url(app: str, server: str) -> str:
    """Returns the URL of a Server."""
    try:
        found = modal.Server.from_name(app, server).get_url()
    except modal.exception.NotFoundError as error:
        raise Unavailable(
            f"no Server {server!r} of the app {app!r} is deployed on Modal; `hone modal up` "
            "deploys all"
        ) from error
    if not found:
        raise Unavailable(f"the Server {server!r} of the app {app!r} has no URL on Modal")
    return found
