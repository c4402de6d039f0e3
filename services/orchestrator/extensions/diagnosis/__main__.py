"""`python -m services.orchestrator.extensions.diagnosis RUN_FOLDER`: the findings of a run folder
as JSON, without a stack. `hone doctor RUN_FOLDER` runs it in a process of its own, because `hone`
imports no service."""

from __future__ import annotations

import sys
from pathlib import Path

from services.orchestrator.extensions.diagnosis.diagnosing import findings_of
from services.orchestrator.extensions.diagnosis.facts import alone
from shared.errors import HoneError

WRONG = 2
"""The exit code for a folder that cannot be read; its reason is on stderr."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        facts, record = alone(Path(sys.argv[1]))
    except HoneError as error:
        sys.stderr.write(error.detail)
        sys.exit(WRONG)
    sys.stdout.write(findings_of(facts, record).model_dump_json())


if __name__ == "__main__":
    main()
