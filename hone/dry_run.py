"""What `hone submit --dry-run` tries of a job: its rewards on its first rows, on the reward service
alone."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from hone.reward_service import reward_service
from shared.client import Client
from shared.errors import BadRequest
from shared.job import Job
from shared.wire import Prompt, Validated, ValidateRequest

ROWS_TRIED = 8
"""As many as a job's start tries."""

ROWS_READ = 1000
"""For the columns: a row may lack some that others have."""

VALIDATE_DEADLINE_S = 120.0


class DryRun(BaseModel):
    """`rows_tried` is 0 where the rows are not to be read here."""

    job: str
    rewards: tuple[str, ...]
    rows_tried: int
    not_tried: str = ""


def dry_run(job: Job) -> DryRun:
    """Returns what was tried. Raises BadRequest with what is wrong, and Unavailable where no reward
    service can be reached or started."""
    rows = first_rows(job.data.train)
    if rows is None:
        return DryRun(
            job=job.name,
            rewards=tuple(reward.label for reward in job.rewards),
            rows_tried=0,
            not_tried=f"{job.data.train!r} is no .jsonl or .json file here, so neither rewards nor "
            "rows were tried",
        )
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    if job.data.prompt_column not in columns:
        raise BadRequest(
            f"{job.data.train!r} has no column {job.data.prompt_column!r} (data.prompt_column); it "
            f"has {', '.join(sorted(columns))}"
        )
    tried = tuple(
        Prompt(index=index, content="", row={column: row.get(column) for column in columns})
        for index, row in enumerate(rows[:ROWS_TRIED])
    )
    request = ValidateRequest(rewards=job.rewards, columns=columns, prompts=tried)
    with reward_service() as (url, token):
        validated = asyncio.run(_validated(url, token, request))
    return DryRun(job=job.name, rewards=validated.rewards, rows_tried=len(tried))


def first_rows(train: str) -> list[dict[str, Any]] | None:
    """Returns the beginning of a file of problems, None if it is no JSON file here. Raises
    BadRequest for one without problems."""
    path = Path(train)
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            lines = (line for line in file if line.strip())
            data: Any = (
                [json.loads(line) for line in itertools.islice(lines, ROWS_READ)]
                if path.suffix == ".jsonl"
                else json.load(file)
            )
    except (OSError, ValueError) as error:
        raise BadRequest(f"{train!r} cannot be read as JSON: {error}") from error
    if not isinstance(data, list) or not data:
        raise BadRequest(f"{train!r} has no problems; expected at least one row")
    rows = cast(list[Any], data)[:ROWS_READ]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise BadRequest(f"row {number} of {train!r} is {row!r:.80}; expected a JSON object")
    return rows


async def _validated(url: str, token: str | None, request: ValidateRequest) -> Validated:
    async with Client("reward", url, token=token) as client:
        return await client.call(
            "POST", "/graders/validate", request, Validated, deadline_s=VALIDATE_DEADLINE_S
        )
