"""Runs the rollout service: `python -m services.rollout`. It listens within a second; vLLM is
imported behind it."""

from __future__ import annotations

import sys

from services.rollout.app import build
from services.rollout.sampler import Sampler
from services.rollout.starter import VllmStarter, local_folder
from shared import logs
from shared.config import load_settings
from shared.errors import HoneError


def main() -> None:
    try:
        settings = load_settings()
        logs.configure("rollout", settings)
        if settings.rollout_model:
            local_folder(settings.rollout_model)
        starter = VllmStarter(settings)
        sampler = Sampler(starter.find_model, starter.start, (settings.shm_dir, settings.runs_dir))
        build(settings, sampler, before=starter.preload, after=starter.close).run(
            settings.rollout_port
        )
    except HoneError as error:
        sys.stderr.write(f"hone rollout: {error.detail}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
