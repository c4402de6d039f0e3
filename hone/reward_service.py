"""The reward service for a command: the running one, else one started for the call. What needs no
service, the list of graders and a check of rewards, is asked of a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from typing import IO

from pydantic import TypeAdapter

from hone import stack
from hone.stack import check_installed
from shared.errors import BadRequest, Failed, Unavailable
from shared.host.processes import ending_with_parent, free_port
from shared.http.client import Client
from shared.job import RewardSpec
from shared.settings import PREFIX, load_settings
from shared.wire import GraderInfo, GraderList

PING_DEADLINE_S = 1.0
START_DEADLINE_S = 60.0
PAUSE_S = 0.2


async def _ping(url: str, token: str | None) -> None:
    async with Client("reward", url, token=token) as client:
        await client.ping(PING_DEADLINE_S)


@contextlib.contextmanager
def reward_service(sandbox_slots: int | None = 1) -> Generator[tuple[str, str | None]]:
    """Yields a reward service's URL and token. If the environment names one, only that one is
    tried. A service that is started here has so many slots of the sandbox; None: as many as its
    settings say."""
    settings = load_settings()
    named, url = (
        "reward_url" in settings.model_fields_set,
        stack.with_stack_urls(settings).reward_url,
    )
    try:
        asyncio.run(_ping(url, settings.bearer()))
    except Unavailable:
        if named:
            raise
        with start_service(sandbox_slots) as own:
            yield own
    else:
        yield url, settings.bearer()


@contextlib.contextmanager
def start_service(sandbox_slots: int | None = 1) -> Generator[tuple[str, str]]:
    """Yields the URL and token of a service of our own, ended afterwards. Raises BadRequest if its
    packages are missing."""
    check_installed("reward", "reward")
    port = free_port()
    url, token = f"http://127.0.0.1:{port}", secrets.token_hex(16)
    own = {
        "HOST": "127.0.0.1",
        "REWARD_PORT": str(port),
        "TOKEN": token,
        "LOG_LEVEL": "error",
    }
    if sandbox_slots is not None:
        own["SANDBOX_SLOTS"] = str(sandbox_slots)
    environment = os.environ | {PREFIX + name: value for name, value in own.items()}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.reward"],
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=ending_with_parent(),
        )
        try:
            _wait(process, url, token, log)
            yield url, token
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, token: str, log: IO[bytes]) -> None:
    """Returns once the service answers. Raises Failed with the end of its log if it ends before, or
    does not answer in time."""
    end = time.monotonic() + START_DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(Unavailable):
            return asyncio.run(_ping(url, token))
        time.sleep(PAUSE_S)
    log.seek(0)
    raise Failed(
        "no reward service runs, and none could be started here: "
        f"{log.read()[-500:].decode(errors='replace').strip()}"
    )


WRONG = 2


def graders_here() -> tuple[GraderInfo, ...]:
    """Returns the graders of this version of Hone."""
    return GraderList.model_validate_json(_asked().stdout).graders


def check_rewards(rewards: Sequence[RewardSpec]) -> None:
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
