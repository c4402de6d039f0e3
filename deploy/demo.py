"""`make demo`: the main job from nothing, on this machine. Fetches a real chat model, starts the
stack, submits `deploy/jobs/demo.toml` over REST, shows the result, and stops everything that it
started.

The model learns to say which of two numbers is larger. With `--tiny` it is the countdown game and a
random model that is made in seconds (`deploy/jobs/demo_tiny.toml`): two numbers and a target; the
model writes a Python expression, the reward service runs it. With `--agent` it is a guessing game,
in which such a model calls a tool over several turns (`deploy/jobs/demo_agent.toml`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy import local, machine, supervisor
from deploy.plot import plot_learning_curve
from hone import Client, Job, load_job
from hone.reports import prompt_text, shown
from hone.view import Follower, duration
from shared.errors import BadRequest, Failed, HoneError
from shared.host import nvidia
from shared.wire import TERMINAL, JobRecord

JOBS = Path(__file__).with_name("jobs")
SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Demo:
    """A job file, and the module `maker` that writes the job's problems into `folder`/task and
    makes its model there or fetches it; `making` describes that."""

    folder: Path
    job: Path
    maker: str
    making: str

    @property
    def stack(self) -> Path:
        return self.folder / "stack"


LARGER_NUMBER = Demo(
    Path(".hone/demo"),
    JOBS / "demo.toml",
    "deploy.larger_number",
    "fetching SmolLM2-135M-Instruct and writing its problems",
)
COUNTDOWN = Demo(
    Path(".hone/demo-tiny"),
    JOBS / "demo_tiny.toml",
    "deploy.tiny_model",
    "making a tiny model and its problems",
)
GUESSING = Demo(
    Path(".hone/demo-agent"),
    JOBS / "demo_agent.toml",
    "deploy.tool_model",
    "making a tiny model and its problems",
)


def main() -> None:
    arguments = _parser().parse_args()
    demo = GUESSING if arguments.agent else COUNTDOWN if arguments.tiny else LARGER_NUMBER
    console = Console(soft_wrap=True)
    started = time.monotonic()
    machine.exit_on_signals(signal.SIGTERM, signal.SIGHUP)
    try:
        if supervisor.running(demo.stack):
            raise BadRequest(
                f"another demo runs in {demo.stack}; wait for it, or stop it: .venv/bin/hone down "
                f"--dir {demo.stack}"
            )
        if num := nvidia.hide_from_cpu_build():
            console.print(
                f"the {num} GPU(s) are not used: `make cuda` installs the packages that they need"
            )
        console.print(
            f"[bold]1/2[/] {demo.making} (seed {arguments.seed}), while Redis and the four "
            "services start"
        )
        with (
            _model(demo, arguments.seed) as made,
            _stack(demo, arguments.samplers) as url,
        ):
            made()
            console.print(
                f"[bold]2/2[/] training; {url}/ shows it in a browser, and in another terminal "
                f"HONE_ORCHESTRATOR_URL={url} .venv/bin/hone ls"
            )
            job = load_job(demo.job, [f"seed={arguments.seed}", *arguments.overrides])
            with Client(url) as client:
                _cancel_others(client)
                succeeded = _train(client, job, console, started)
    except HoneError as error:
        sys.exit(f"demo: {error.detail}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if succeeded else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the model, the problems and the sampling (default: 0)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        help="a.b=c in the job, may be repeated",
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--tiny", action="store_true", help="the countdown game, by a tiny model")
    task.add_argument(
        "--agent", action="store_true", help="the guessing game: rollouts are conversations"
    )
    parser.add_argument("--samplers", type=int, default=1, help="how many (default: 1)")
    return parser


@contextlib.contextmanager
def _model(demo: Demo, seed: int) -> Generator[Callable[[], None]]:
    """Makes the model and its problems in the background; yields a function that waits for them."""
    shutil.rmtree(demo.folder / "task", ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        demo.maker,
        "--out",
        str(demo.folder / "task"),
        "--seed",
        str(seed),
    ]
    process = subprocess.Popen(command, env=os.environ | {"DS_ACCELERATOR": "cpu"})

    def made() -> None:
        if code := process.wait():
            raise Failed(f"{demo.maker} ended with exit code {code}: see above")

    try:
        yield made
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _stack(demo: Demo, num_samplers: int) -> Generator[str]:
    """Runs a stack for the demo on free ports; yields the orchestrator's URL, and stops everything
    at the end."""
    for name, port in machine.on_free_ports(samplers=num_samplers).items():
        os.environ.setdefault(name, port)
    os.environ["HONE_ROLLOUT_REPLICAS"] = str(num_samplers)
    os.environ.setdefault("HONE_TOOL_PARSER", "hermes")
    folder = demo.stack.resolve()
    state = local.up(folder)
    try:
        yield state["urls"]["orchestrator"]
    finally:
        print("stopping the stack", flush=True)
        local.down(folder)


def _cancel_others(client: Client) -> None:
    """Cancels the jobs of an earlier demo that was killed."""
    for record in client.list().jobs:
        if record.status not in TERMINAL:
            client.cancel(record.id)


def _train(client: Client, job: Job, console: Console, started: float) -> bool:
    """Submits the job and follows it to its end; returns whether it succeeded."""
    record = client.submit(job)
    with Follower(console) as follower:
        for event in client.events(record.id, follow=True, progress=follower.progress):
            follower.show(event)
    record = client.get(record.id)
    if record.status != "succeeded":
        console.print(f"[red]the job {record.status}[/]: {record.error}", highlight=False)
        return False
    _show(client, record, console, time.monotonic() - started)
    return True


def _show(client: Client, record: JobRecord, console: Console, wall_s: float) -> None:
    summary = record.summary or {}
    console.print(_before_and_after(client, record))
    seconds = summary["seconds_per_step"]
    split = ", ".join(
        f"{name} {seconds[name]:.2f}"
        for name in ("generate", "reward", "store", "train", "sync")
        if name in seconds
    )
    console.print(f"\na step took {seconds['step']:.2f} s on average: {split}", highlight=False)
    console.print(
        f"held-out accuracy [bold]{summary['eval_before']:.3f} -> {summary['eval_after']:.3f}[/] "
        f"after {summary['steps']} steps; "
        f"training took {duration(summary['train_s'])}, in total {duration(wall_s)}",
        highlight=False,
    )
    checkpoint, system = summary["checkpoint"], record.job.data.system_prompt
    console.print(f"checkpoint      {checkpoint}", highlight=False)
    console.print(
        f"summary         {Path(record.run_dir).parent / record.name / 'summary.json'}",
        highlight=False,
    )
    console.print("drawing the learning curve; a machine's first picture takes half a minute")
    rows = list(client.metrics(record.id).rows)
    picture = plot_learning_curve(rows, Path(record.run_dir) / "learning_curve.png", record.name)
    console.print(f"learning curve  {picture}", highlight=False)
    if system:
        console.print(
            "chat with it    .venv/bin/python -m deploy.chat "
            f"{Path(checkpoint).resolve()} --single-turn --system {shlex.quote(system)}",
            highlight=False,
        )


def _before_and_after(client: Client, record: JobRecord) -> Table:
    """Returns the model's greedy answers to the first held-out problems, before training and at
    the end."""
    before, after = client.held_out(record.id, 0), client.held_out(record.id)
    table = Table("held-out problem", "before", "right", f"after step {after.step}", "right")
    for old, new in list(zip(before.rollouts, after.rollouts, strict=True))[:SHOWN_PROBLEMS]:
        answers = ((shown(each.completion), _mark(each.reward)) for each in (old, new))
        table.add_row(shown(prompt_text(new)), *itertools.chain.from_iterable(answers))
    return table


def _mark(reward: float | None) -> str:
    return "?" if reward is None else "yes" if reward >= 1 else "no"


if __name__ == "__main__":
    main()
