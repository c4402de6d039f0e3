"""`make compose-test`: the stack of `compose.cpu.yaml` on a real Docker daemon.

    python -m tests.compose [--base IMAGE] [--redis IMAGE] [--steps 40] [--only built,up]

Images are built, the stack comes up, and weights reach two samplers by shared memory and from
container to container. The job of `make demo-tiny` is submitted from outside, trains with both and
learns something, while each container's process is killed once. Every attack on the sandbox runs in
the reward container. Then everything is taken down, and nothing is left.

`--base` and `--redis` name images of this machine where none can be pulled: Debian with Python
3.11, and a Redis whose user is 999. Of what is left out with `--only` the state is that of the run
before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from hone import Client, Job, load_job
from shared.errors import HoneError
from shared.wire import TERMINAL, JobRecord
from tests.compose import attacks
from tests.compose.stack import (
    IMAGES,
    PROJECT,
    ROOT,
    SERVICES,
    Failed,
    Missing,
    Stack,
    docker,
)

NAME = "compose-test"
PORT = 18_000
HEALTHY_S = 420.0
RESTARTED_S = 300.0
JOB_S = 1800.0

NO_ROUTE = """
import socket
try:
    socket.create_connection(("1.1.1.1", 53), timeout=3)
except OSError:
    print("no route")
"""

RIGHTS = """
import os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
try:
    open("/written", "w")
except OSError as error:
    print(os.getuid(), int(status["CapEff"], 16), status["NoNewPrivs"].strip(),
          status["Seccomp"].strip(), error.strerror)
"""


def built(stack: Stack, _steps: int) -> None:
    """Every image is built; rollout and trainer have compiled kernels in their builds."""
    stack.compose("build", "init", *SERVICES)
    for name, image in IMAGES.items():
        size_mb = int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6
        print(f"    {name}: {size_mb:,.0f} MB")


def up(stack: Stack, _steps: int) -> None:
    """The stack comes up, and all of it is healthy."""
    stack.compose("up", "-d", "--no-build", within_s=HEALTHY_S)
    waited_s = stack.wait_healthy(("redis", *SERVICES), HEALTHY_S)
    print(f"    healthy {waited_s:.0f} s after `up` returned")


def guarded(stack: Stack, _steps: int) -> None:
    """No one is let in without the token, and no container may do more than it has to."""
    if (code := _status(f"http://127.0.0.1:{stack.port}/v1/jobs")) != 401:
        raise Failed(f"the jobs API answered {code} without a token; expected 401")
    for name in (*SERVICES, "redis"):
        for container in stack.containers(name):
            ports = container["NetworkSettings"]["Ports"] or {}  # pyright: ignore
            open_at = {at["HostIp"] for published in ports.values() for at in published or ()}
            expected = {"127.0.0.1"} if name == "orchestrator" else set[str]()
            if open_at != expected:
                raise Failed(f"{name} can be reached at {open_at}; expected {expected}")
    for name in SERVICES:
        if (shown := stack.python(name, RIGHTS)) != "10001 0 1 2 Read-only file system":
            raise Failed(f"{name} has other rights than it should: {shown}")
    (reward,) = stack.containers("reward")
    for network in reward["NetworkSettings"]["Networks"]:  # pyright: ignore
        if docker("network", "inspect", "--format", "{{.Internal}}", network).strip() != "true":
            raise Failed(f"the reward service is on {network}, which is not internal")
    if (shown := stack.python("reward", NO_ROUTE)) != "no route":
        raise Failed("the reward service has a route out")
    if "refused" not in stack.inside("rollout", "sh", "-c", "touch /weights/x || echo refused"):
        raise Failed("the sampler can write to the trainer's weights")


def isolated(stack: Stack, _steps: int) -> None:
    """Every attack on the sandbox ends as it must, in the reward container."""
    *wrong, last = stack.python("reward", attacks.program()).splitlines()
    print(f"    {last} attacks ended as they must")
    if wrong:
        raise Failed("\n".join(wrong))


def synced(stack: Stack, _steps: int) -> None:
    """Weights reach both samplers through the volume that they share with the trainer, and by
    "nccl", which is gloo between CPUs, from container to container."""
    _scale_up(stack)
    with Client(f"http://127.0.0.1:{stack.port}", token=stack.token()) as client:
        for asked, expected in (("auto", "shm"), ("nccl", "nccl")):
            record = client.submit(_job(2, f"weight_sync={asked}", f"name={NAME}-{asked}"))
            record = _wait_ended(client, record.id)
            if record.status != "succeeded":
                raise Failed(f"the job {record.status}: {record.error}")
            for event in client.events(record.id, follow=False):
                if "weights go by" in event.message:
                    print(f"    {event.message}; found out in {event.data['seconds']} s")
            rows = map(json.loads, stack.python("orchestrator", _syncs_of(record)).splitlines())
            ways = [(row["method"], len(row["samplers"])) for row in rows]
            print(f'    weight_sync "{asked}": versions went by {ways}', flush=True)
            if ways != [(expected, 2)] * 3:
                raise Failed(f"expected three versions by {expected!r} to two samplers")


def learns(stack: Stack, steps: int) -> None:
    """The job of `make demo-tiny`, with two samplers, continues automatically after each
    container's process was killed, and learns."""
    _scale_up(stack)
    with Client(f"http://127.0.0.1:{stack.port}", token=stack.token()) as client:
        record = client.submit(_job(steps))
        for name in ("rollout", "reward", "trainer", "redis", "orchestrator"):
            done = _wait_for_step(client, record.id, after=_step(client, record.id))
            stack.kill(name)
            _wait_restarted(stack, name)
            went_on = _wait_for_step(client, record.id, after=done)
            print(f"    {name} killed after step {done}; step {went_on} done", flush=True)
        record = _wait_ended(client, record.id)
    if record.status != "succeeded" or record.summary is None:
        raise Failed(f"the job {record.status}: {record.error}")
    before, after = record.summary["eval_before"], record.summary["eval_after"]
    print(f"    {steps} steps, 2 samplers, held-out {before:.3f} -> {after:.3f}")
    if not after > before:
        raise Failed(f"the job learned nothing: {before:.3f} -> {after:.3f}")


def down(stack: Stack, _steps: int) -> None:
    """`down` leaves no container and no network, and with --volumes no volume."""
    stack.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={PROJECT}"
    for kind in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")):
        if left := docker(*kind, "--filter", label).split():
            raise Failed(f"docker {' '.join(kind)} still shows {left}")


STAGES: tuple[Callable[[Stack, int], None], ...] = (
    built,
    up,
    guarded,
    isolated,
    synced,
    learns,
    down,
)


def _scale_up(stack: Stack) -> None:
    """Has two samplers, registered, and the model of `make demo-tiny`."""
    stack.compose("up", "-d", "--no-build", "--scale", "rollout=2", within_s=HEALTHY_S)
    stack.wait_healthy(SERVICES, HEALTHY_S)
    model = "test -d /models/demo || python -m deploy.tiny_model --out /models/demo --seed 0"
    stack.inside("trainer", "sh", "-c", model)
    if (registered := _num_samplers(stack)) != 2:
        raise Failed(f"{registered} samplers are registered; expected 2")


def _syncs_of(record: JobRecord) -> str:
    return f"print(open({record.run_dir + '/weights.jsonl'!r}).read(), end='')"


def _job(steps: int, *more: str) -> Job:
    folder = "/models/demo"
    changes = [
        f"name={NAME}",
        f"steps={steps}",
        f"model={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.eval={folder}/test.jsonl",
        *more,
    ]
    return load_job(ROOT / "deploy/jobs/demo_tiny.toml", changes)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def _num_samplers(stack: Stack) -> int:
    headers = {"authorization": f"Bearer {stack.token()}"}
    request = urllib.request.Request(f"http://127.0.0.1:{stack.port}/v1/samplers", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return len(json.load(answer)["samplers"])


def _record(client: Client, job_id: str) -> JobRecord | None:
    try:
        return client.get(job_id)
    except HoneError:  # the orchestrator, or Redis, is being started again
        return None


def _step(client: Client, job_id: str) -> int:
    record = _record(client, job_id)
    return record.step if record else 0


def _wait_for_step(client: Client, job_id: str, after: int) -> int:
    """Returns the step that is done once it is a later one, or the job has succeeded."""
    until = time.monotonic() + JOB_S
    while time.monotonic() < until:
        record = _record(client, job_id)
        if record and (record.step > after or record.status == "succeeded"):
            return record.step
        if record and record.status in (*TERMINAL, "paused"):
            raise Failed(f"the job {record.status} after step {record.step}: {record.error}")
        time.sleep(0.5)
    raise Failed(f"no step after {after} was done within {JOB_S:g} s")


def _wait_ended(client: Client, job_id: str) -> JobRecord:
    until = time.monotonic() + JOB_S
    while time.monotonic() < until:
        record = _record(client, job_id)
        if record and record.status in (*TERMINAL, "paused"):
            return record
        time.sleep(0.5)
    raise Failed(f"the job had not ended after {JOB_S:g} s")


def _wait_restarted(stack: Stack, name: str) -> None:
    until = time.monotonic() + RESTARTED_S
    while stack.restarts(name) == 0:
        if time.monotonic() > until:
            raise Failed(f"{name} was not started again within {RESTARTED_S:g} s")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--base", help="image of Debian and Python, instead of the pinned one")
    parser.add_argument("--redis", help="image of Redis, instead of the pinned one")
    parser.add_argument("--steps", type=int, default=40, help="of the job (default: 40)")
    parser.add_argument("--only", help="stages, with commas between them (default: all)")
    arguments = parser.parse_args()
    named = arguments.only.split(",") if arguments.only else [it.__name__ for it in STAGES]
    if unknown := set(named) - {it.__name__ for it in STAGES}:
        parser.error(f"no stage {min(unknown)!r}; there are {[it.__name__ for it in STAGES]}")
    try:
        stack = Stack(arguments.base, arguments.redis, PORT)
        for stage in STAGES:
            if stage.__name__ in named:
                began = time.monotonic()
                print(f"{stage.__name__}: {' '.join((stage.__doc__ or '').split())}", flush=True)
                stage(stack, arguments.steps)
                print(f"    ok after {time.monotonic() - began:.0f} s", flush=True)
    except Missing as error:
        sys.exit(f"compose-test cannot run here: {error}")
    except Failed as error:
        sys.exit(f"compose-test failed: {error}")


if __name__ == "__main__":
    main()
