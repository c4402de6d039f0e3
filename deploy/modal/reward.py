"""The reward service on Modal: `modal deploy deploy/modal/reward.py`.

Programs that a model wrote run in Modal Sandboxes, a container for each, with its network blocked.
The service itself has a network: judges and the Sandboxes are called over it.
"""

from __future__ import annotations

import modal

from deploy.modal import inside
from deploy.modal.common import SETTINGS, image, secrets, server_options

app = modal.App(f"{SETTINGS.modal_name}-reward")


@app.server(
    image=image("reward", "modal"),
    cpu=2.0,
    memory=4096,
    secrets=secrets("judge"),
    **server_options("reward"),
)
class Reward:
    @modal.enter()
    def start(self) -> None:
        inside.start(["reward"], {"HONE_HOST": "0.0.0.0"})

    @modal.exit()
    def stop(self) -> None:
        inside.stop()
