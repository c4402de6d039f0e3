"""The graders of this machine's reward service, asked in a process of its own: no service has to
run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from pydantic import TypeAdapter

from shared.errors import BadRequest, Failed
from shared.job import RewardSpec
from shared.wire import GraderInfo, GraderList

WRONG = 2


def listed() -> tuple[GraderInfo, ...]:
    """Returns the graders of this version of Hone."""
    return GraderList.model_validate_json(_asked().stdout).graders


def check(rewards: Sequence[RewardSpec]) -> None:
    """Raises BadRequest for a grader that does not exist, or a param that it does not have."""
    given = TypeAdapter(list[RewardSpec]).dump_json(list(rewards)).decode()
    done = _asked("--check", given=given)
    if done.returncode == WRONG:
        raise BadRequest(done.stdout)


def _asked(*options: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.reward.grading.listing", *options]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode not in (0, WRONG):
        why = done.stderr.strip().rpartition("\n")[2]
        raise Failed(f"the graders cannot be listed on this machine: {why}")
    return done
