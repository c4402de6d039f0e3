"""The calls of the trainer's Function: the last one, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import modal

from deploy.modal.common import DAY_S, SETTINGS

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
"""Errors of the question, which say nothing of the call: it is asked again."""


@dataclass(frozen=True)
class Call:
    """`failure` is why it ended, if it failed: Modal has retried it then, and gave up."""

    is_running: bool
    failure: str | None = None


NONE = Call(is_running=False)


async def start() -> None:
    call = await modal.Function.from_name(APP, "work").spawn.aio()
    await _kept().put.aio(LAST, (call.object_id, time.time()))


async def last() -> Call:
    """Raises one of OF_MODAL where Modal does not say how it is."""
    known = await _kept().get.aio(LAST)
    if known is None:
        return NONE
    id, called_at = known
    try:
        await modal.FunctionCall.from_id(id).get.aio(timeout=0)
    except TimeoutError:
        return Call(is_running=True)
    except modal.exception.OutputExpiredError:
        return NONE
    except modal.exception.FunctionTimeoutError as error:  # of a long job, or of a start
        return NONE if time.time() - called_at > DAY_S else Call(False, str(error))
    except OF_MODAL:
        raise
    except Exception as error:  # Modal raises what it raised, and errors of its own about that
        return Call(is_running=False, failure=f"{type(error).__name__}: {error}")
    return NONE


async def forget() -> None:
    """The last call is as if it had not been."""
    await _kept().pop.aio(LAST, None)


def _kept() -> Any:
    return modal.Dict.from_name(f"{SETTINGS.modal_name}-calls", create_if_missing=True)
