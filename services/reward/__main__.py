"""`python -m services.reward`: grading and the sandbox, at HONE_REWARD_PORT."""

from __future__ import annotations

from shared.host.processes import run_main
from shared.settings import Settings


def main(settings: Settings) -> None:
    from services.reward.app import create_service

    create_service(settings).run(settings.reward_port)


if __name__ == "__main__":
    run_main("reward", main)
