"""`python -m services.reward`: serves grading and the sandbox at HONE_REWARD_PORT."""

from __future__ import annotations

import sys

from shared import logs
from shared.config import load_settings
from shared.errors import HoneError


def main() -> None:
    try:
        settings = load_settings()
        logs.configure("reward", settings)
        from services.reward.app import build

        build(settings).run(settings.reward_port)
    except HoneError as error:
        sys.stderr.write(f"{error.detail}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
