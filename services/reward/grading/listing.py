"""`python -m services.reward.grading.listing`: the graders as `GET /graders` lists them, without a
service. `hone explain` and docs/graders.md are made of it. With `--check` it reads a JSON list of
rewards from stdin, and says in a sentence which of them names no grader, or a param that it does
not have; it then exits 2, as `hone plan` does."""

from __future__ import annotations

import sys

from pydantic import TypeAdapter

from services.reward import graders
from services.reward.grading import registry
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import GraderList

WRONG = 2


def main() -> None:
    graders.load()
    if sys.argv[1:] != ["--check"]:
        sys.stdout.write(GraderList(graders=registry.infos()).model_dump_json())
        return
    try:
        for spec in TypeAdapter(list[RewardSpec]).validate_json(sys.stdin.read()):
            registry.params_of(spec)
    except BadRequest as error:
        sys.stdout.write(error.detail)
        raise SystemExit(WRONG) from error


if __name__ == "__main__":
    main()
