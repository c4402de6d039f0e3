"""The samplers on Modal: `modal deploy deploy/modal/rollout.py`.

Each sampler is a Server of its own, because each has weights of its own: if several shared a URL, a
sync would reach only one. The maximum number of Servers is always deployed. A Server without
requests has no container; HONE_MODAL_ROLLOUTS is the number of Servers in use.
"""

from __future__ import annotations

import modal

from deploy.modal import inside
from deploy.modal.common import (
    CACHES,
    ROLLOUT_GPU,
    RUNS,
    SETTINGS,
    caches,
    image,
    runs,
    sampler_resources,
    secrets,
    server_options,
)

MAX_SAMPLERS = 8

app = modal.App(f"{SETTINGS.modal_name}-rollout")
IMAGE = image("rollout", cuda=True)


class Sampler:
    @modal.enter()
    def start(self) -> None:
        inside.start(["rollout"], {"HONE_HOST": "0.0.0.0"})

    @modal.exit()
    def stop(self) -> None:
        inside.stop()


def _server(number: int) -> modal.Server:
    own = type(f"Sampler{number}", (Sampler,), {"__module__": __name__})
    return app.server(
        image=IMAGE,
        gpu=ROLLOUT_GPU,
        **sampler_resources(ROLLOUT_GPU),
        volumes={RUNS: runs.with_mount_options(read_only=True), CACHES: caches},
        secrets=secrets("huggingface"),
        env={"HONE_ROLLOUT_REPLICA": own.__name__.lower()},
        **server_options("rollout"),
    )(own)


servers = [_server(number) for number in range(MAX_SAMPLERS)]
globals().update({f"Sampler{number}": server for number, server in enumerate(servers)})
