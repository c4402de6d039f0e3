"""The URLs of the deployed services, asked of Modal."""

from __future__ import annotations

import modal

from deploy.modal.common import SETTINGS
from shared.errors import Unavailable


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
