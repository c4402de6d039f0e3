"""What `hone doctor` says of services that run: the real sampler over HTTP, with an engine at the
`Engine` seam."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from hone.commands.doctor import Check, examine_stack
from shared.settings import Settings
from tests.support.rollout_bench import RolloutBench
from tests.support.running import served
from tests.support.served_stack import served_stack

NOBODY = "http://127.0.0.1:9"


async def test_a_sampler_whose_engine_starts_is_no_fault(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path)
    bench.may_start.clear()
    async with served(bench.service.server(0)) as url:
        starting = asyncio.create_task(bench.put())
        while not await bench.sampler.unready():
            await asyncio.sleep(0.001)
        found = await sampler_at(url)
        assert found.state == "starting"
        since = r"since \d\d:\d\d:\d\d UTC \(\d+ s\)"
        assert re.fullmatch(f"{url} engine: starting the engine for 'tiny', {since}", found.detail)
        bench.may_start.set()
        await starting
        assert (await sampler_at(url)).state == "ok"
        bench.engine.dead = True
        assert (await sampler_at(url)).state == "fault"


async def sampler_at(url: str) -> Check:
    settings = Settings(
        rollout_url=url, trainer_url=NOBODY, reward_url=NOBODY, orchestrator_url=NOBODY
    )
    checks = await examine_stack(settings)
    return next(check for check in checks if check.name == "rollout")


async def test_a_silent_service_is_a_fault_only_beside_a_running_orchestrator(
    tmp_path: Path,
) -> None:
    """They listen at ports of their own, and nothing is at the default ones. Where the orchestrator
    runs `hone up` would refuse to start them: a stack runs already."""
    with served_stack(tmp_path) as stack:
        checks = await examine_stack(Settings(orchestrator_url=stack.url))
        away = await alone_at(stack.url)
    found = {check.name: check for check in checks}
    without = await alone_at(NOBODY)
    assert found["orchestrator"].state == away["orchestrator"].state == "ok"
    for service in ("trainer", "rollout", "reward"):
        assert found[service].state == "ok", found[service]
        assert found[service].detail.endswith(" answers, as the orchestrator says")
        assert away[service].state == "fault"
        assert away[service].detail.startswith(
            f"not running at {NOBODY} (ConnectError); the orchestrator runs, and its jobs wait for "
            "this service; "
        )
    assert without["trainer"].state == "note"
    assert without["trainer"].detail.endswith("; `hone up` starts it")


async def alone_at(url: str) -> dict[str, Check]:
    """Returns the checks by name where at most the orchestrator answers."""
    settings = Settings(
        rollout_url=NOBODY, trainer_url=NOBODY, reward_url=NOBODY, orchestrator_url=url
    )
    return {check.name: check for check in await examine_stack(settings)}
