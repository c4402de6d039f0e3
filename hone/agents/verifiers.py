"""Environments of the package `verifiers` (0.4, its v1 API) as agents, unmodified. They run in its
own environment server, which is started in this process, and call the model through the session of
their episode.

    run = environment(taskset={"id": "my-taskset"})        # in agent.py, for `hone work agent.py`

    python -m hone.agents.verifiers my-taskset > rows.jsonl         # the rows of the job
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Generator
from typing import Any

from hone.agents.working import AgentFailed
from shared.errors import BadRequest

MODEL = "policy"
TASK = "task"
"""The column of a row that has the task."""

_numbers = itertools.count()


class Environment:
    """An agent that runs one rollout of the environment for each episode. `config` is the package's
    `[env]` table."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._client: asyncio.Future[Any] | None = None
        self._server: asyncio.Task[None] | None = None

    async def __call__(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Returns the reward of the environment, and its metrics. Raises AgentFailed where the
        environment did."""
        vf = package()
        if not isinstance(row.get(TASK), dict):
            raise AgentFailed(
                f"the row's column {TASK!r} is {row.get(TASK)!r:.80}; expected a task as "
                "`python -m hone.agents.verifiers` writes it"
            )
        if self._client is None:
            self._client = asyncio.ensure_future(self._serve())
        client = await asyncio.shield(self._client)
        with _variable(api_key) as name:
            calls = vf.EvalClientConfig(base_url=base_url, api_key_var=name)
            episode = await client.run(calls, MODEL, vf.SamplingConfig(), row[TASK])
        return sum_rewards(episode)

    async def _serve(self) -> Any:
        """Returns a client of the server, once it answers."""
        vf, serve = package(), importlib.import_module("verifiers.v1.serve")
        config = vf.resolve_env_config(self._config)
        server = await asyncio.to_thread(serve.EnvServer, config, "tcp://127.0.0.1:0")
        self._server = asyncio.create_task(server.run())
        return serve.EnvClient(server.address)


def environment(**config: Any) -> Environment:
    """Returns the environment of the package's `[env]` table: `taskset={"id": ...}`, and perhaps
    `agent={"harness": {"id": ...}}`, as an agent."""
    return Environment(config)


@contextlib.contextmanager
def _variable(value: str) -> Generator[str]:
    """Yields the name of a variable of the environment, by which the package takes keys."""
    name = f"HONE_SESSION_KEY_{next(_numbers)}"
    os.environ[name] = value
    try:
        yield name
    finally:
        del os.environ[name]


def sum_rewards(episode: Any) -> dict[str, Any]:
    """Returns the sum of the rewards of an episode's traces, and the means of their metrics. Raises
    AgentFailed for an episode in which something else than the policy failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it has no trace"
        raise AgentFailed(f"the environment's episode failed: {why}")
    metrics: dict[str, list[float]] = {}
    for trace in episode.traces:
        for name, value in trace.metrics.items():
            if value is not None:
                metrics.setdefault(name, []).append(float(value))
    return {
        "reward": sum(trace.reward for trace in episode.traces),
        "metrics": {name: sum(found) / len(found) for name, found in metrics.items()},
    }


def package() -> Any:
    """Returns the package's v1 API. Raises BadRequest where it is not installed."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise BadRequest(
            f"verifiers cannot be imported ({error}); expected verifiers 0.4 beside hone, as "
            "`pip install verifiers` installs it"
        ) from error


def rows(taskset: dict[str, Any]) -> Generator[dict[str, Any]]:
    """Yields a row of a job's data for each task: its prompt as messages, and the task itself."""
    vf = package()
    config = vf.resolve_env_config({"taskset": taskset}).taskset
    for task in vf.load_taskset(config):
        data = task.data.model_dump(mode="json")
        system, prompt = data.get("system_prompt"), data.get("prompt") or ""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said = [{"role": "system", "content": system}] if system else []
        yield {"prompt": [*said, *messages], TASK: data}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hone.agents.verifiers", description=__doc__)
    parser.add_argument("taskset", help="its id: the name of an installed package")
    parser.add_argument("--config", default="{}", help="the taskset's own keys, as JSON")
    given = parser.parse_args()
    for row in rows({"id": given.taskset, **json.loads(given.config)}):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
