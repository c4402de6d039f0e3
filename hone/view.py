"""How the command shows things: tables for people, the same data as JSON for programs, one live
line for a running job."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from shared.wire import (
        DryRun,
        Event,
        JobProgress,
        JobRecord,
        JobSummary,
        MetricsList,
        MetricsRow,
        Obstacle,
        PreviewedPrompt,
    )

COLUMNS = {
    "reward": "reward",
    "group std": "group_reward_std",
    "flat groups": "frac_reward_zero_std",
    "held-out": "eval/reward",
    "pass@1": "eval/pass@1",
    "held-out loss": "eval/loss",
    "tokens": "completions/mean_length",
    "loss": "loss",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
    "grad norm": "grad_norm",
    "seconds": "time/step",
}
"""Columns of `hone metrics`, heading to metric. A column is shown if some row has its metric;
`-o json` has all metrics."""

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {
    "queued": "yellow",
    "running": "cyan",
    "paused": "bright_yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "magenta",
}
SILENT_S = 2.5
"""Seconds without output after which a line says what the job does, where there is no live line.
The stream reports every two seconds, so a user waits less than five. Each further line waits twice
as long as the one before, up to STEADY_S: a model loads for minutes, and a log keeps the lines."""

STEADY_S = 30.0
"""The same once steps are running."""

STAGES = ("wait_for_batch", "generate", "reward", "store", "train", "sync")


def duration(seconds: float) -> str:
    """Returns for example `42 s`, `3 m 05 s` or `2 h 10 m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


def sparkline(values: list[float]) -> str:
    """Returns the last 24 values as bars between their least and greatest."""
    shown = values[-24:]
    low, high = min(shown), max(shown)
    return "".join(
        BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in shown
    )


def conversations(metrics: dict[str, float]) -> str:
    """Returns what a step's conversations took in the mean, and how long samplers had nothing to
    sample; "" for a job of single answers."""
    if (turns := metrics.get("conversations/mean_turns")) is None:
        return ""
    parts = [f"{turns:.1f} turns"]
    if errors := metrics.get("conversations/mean_tool_errors"):
        parts.append(f"{errors:.1f} tool errors")
    if (seconds := metrics.get("conversations/mean_environment_s")) is not None:
        parts.append(f"environment {seconds:.1f} s")
    if (busy := metrics.get("utilization/rollout")) is not None:
        parts.append(f"samplers idle {1 - busy:.0%}")
    return f"  {', '.join(parts)}"


SHOWN_SHARE = 0.1
"""Least share of tokens that a shared prefix saved for a step's line to say so."""


def shared_tokens(metrics: dict[str, float]) -> str:
    """Returns how much of the step's tokens were computed once for several sequences; "" if
    little."""
    share = metrics.get("tokens/shared_fraction", 0.0)
    return f"  {share:.0%} of tokens shared" if share >= SHOWN_SHARE else ""


def unchanged(metrics: dict[str, float]) -> str:
    """Returns why the step changed no weight; "" if it changed some."""
    from shared.wire import MetricsRow

    why = MetricsRow(step=1, metrics=metrics).why_unchanged
    return f"  no weight changed: {why}" if why else ""


def time_split(metrics: dict[str, float]) -> str:
    """Returns the seconds of a step by stage, for example `generate 0.6 reward 0.2 train 0.3 sync
    0.1 s`."""
    shown = [(stage, metrics[f"time/{stage}"]) for stage in STAGES if f"time/{stage}" in metrics]
    if any(stage == "generate" for stage, _ in shown):
        shown = [(stage, seconds) for stage, seconds in shown if stage != "wait_for_batch"]
    return " ".join(f"{stage} {seconds:.2f}" for stage, seconds in shown) + " s"


def job_list(records: Sequence[JobSummary]) -> Group:
    """Returns the table of jobs, and below it who shares a trainer, what jobs wait for, why no
    trainer takes queued jobs, and why paused jobs need an operator."""
    paused = [record for record in records if record.status == "paused" and record.error]
    why = [f"{record.id} is paused: {record.error}" for record in paused]
    waits = [f"{record.id} waits: {record.waits}" for record in records if record.waits]
    none: Mapping[str, Obstacle] = {}
    taken = next((record.waits_for for record in records if record.waits_for), none)
    return Group(
        job_table(records),
        *(Text(line, style=COLOURS["running"]) for line in _sharing(records)),
        *(Text(line, style=COLOURS["queued"]) for line in (*_obstacles(taken), *waits)),
        *(Text(line, style=COLOURS["paused"]) for line in why),
    )


def _sharing(records: Sequence[JobSummary]) -> list[str]:
    groups = {(r.trainer, *sorted((r.id, *r.shares_with))) for r in records if r.shares_with}
    return [
        f"{', '.join(jobs[:-1])} and {jobs[-1]} share the trainer {trainer}"
        for trainer, *jobs in sorted(groups, key=str)
    ]


def _obstacles(waits_for: Mapping[str, Obstacle]) -> list[str]:
    return [f"the trainer {trainer} {each.why}" for trainer, each in sorted(waits_for.items())]


def job_table(records: Iterable[JobSummary]) -> Table:
    headings = ("job", "status", "step", "reward", "age", "ETA", "model", "rate")
    table = Table(*headings, box=None, pad_edge=False)
    for record in records:
        eta = (
            duration(record.eta_s)
            if record.status == "running" and record.eta_s is not None
            else ""
        )
        table.add_row(
            record.id,
            Text(_status(record), style=COLOURS[record.status]),
            _step(record),
            "" if record.reward is None else f"{record.reward:.3f}",
            duration(time.time() - record.created_at),
            eta,
            escape(record.model.rstrip("/").rpartition("/")[2]),
            "" if record.learning_rate is None else f"{record.learning_rate:g}",
        )
    return table


def _step(record: JobSummary) -> str:
    from shared.job import ENDLESS

    if not record.steps:
        return "evaluates"
    return str(record.step) if record.steps == ENDLESS else f"{record.step}/{record.steps}"


def _status(record: JobSummary) -> str:
    return record.status if record.place is None else f"{record.status} ({record.place})"


def job_details(record: JobRecord) -> Group:
    """Returns the job's record as a table, and below it the report of a job of 0 steps."""
    from hone import long_calls, reports

    table = Table("", "", box=None, show_header=False, pad_edge=False)
    rows: dict[str, Any] = {
        "job": record.id,
        "status": record.status,
        "step": _step(record),
        "reward": record.reward,
        "priority": record.job.priority or None,
        "place in the queue": record.place,
        "waits because": "; ".join(_obstacles(record.waits_for)) or None,
        "submitted by": record.submitted_by,
        "trainer": record.trainer,
        "shares it with": ", ".join(record.shares_with) or None,
        "doing": record.doing,
        "waits for": record.waits,
        "model": record.job.model,
        "run folder": record.run_dir,
        "paused because" if record.status == "paused" else "error": record.error,
        "cost so far": None if record.cost is None else f"{record.cost:.2f} {record.currency}",
        "recoveries": record.recoveries or None,
        **{
            name: value
            for name, value in (record.summary or {}).items()
            if isinstance(value, int | float | str)
        },
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, escape(str(value)))
    report = long_calls.report_in(record)
    return Group(table, *(["", reports.evaluation_report(report)] if report else []))


def what_next(record: JobRecord) -> Text:
    """Returns commands that the user may run next with the job's results."""
    from hone.long_calls import trained_dtype

    checkpoint = (record.summary or {}).get("checkpoint")
    commands: dict[str, str] = {}
    if record.status == "succeeded" and not record.steps:
        commands[f"hone ls {record.id} -o json"] = "the report as JSON, in its summary"
    elif record.status == "succeeded":
        commands[f"hone metrics {record.id} --plot"] = "its learning curve"
        commands[f"hone rollouts {record.id}"] = "what it answers, and what that earned"
        if checkpoint and record.job.evaluates and record.job.rewards:
            compared = f"{shlex.quote(record.job.model)} {record.id}"
            commands[f"hone eval {compared} --job {record.id}"] = "compares it with what it was"
        if checkpoint:
            commands[f"hone download {record.id}"] = "its checkpoint, as transformers loads it"
            dtype = trained_dtype(record)
            serve = f"vllm serve {shlex.quote(str(checkpoint))}"
            commands[f"{serve} --dtype {dtype}" if dtype else serve] = "serves it as OpenAI's API"
    elif record.status == "paused":
        commands[f"hone resume {record.id}"] = "continues where it was"
    else:
        commands[f"hone logs {record.id}"] = "what happened"
    width = max(map(len, commands))
    return Text("\n".join(f"  {line:<{width}}    {what}" for line, what in commands.items()))


def dry_run(tried: DryRun) -> Text:
    """Returns the text of a dry run: the job's data, and its first prompts as the model would read
    them."""
    from hone.reports import plan_lines

    train = "a stream of problems" if tried.num_train is None else f"{tried.num_train} problems"
    if not tried.job.trains:
        train = f"it evaluates {len(tried.job.evaluated_models)} model(s)"
    sources = ", ".join(f"{name} {version}" for name, version in tried.data.items())
    lines = [
        f"job {tried.job.name!r} is valid: {train}, {tried.num_held_out} held out; nothing was "
        "submitted",
        *(f"warning: {warning}" for warning in tried.warnings),
        f"columns: {', '.join(tried.columns)}",
        *([f"data: {sources}"] if sources else []),
        *([f"tokens are not counted: {tried.not_counted}"] if tried.not_counted else []),
        *(plan_lines(tried.plan) if tried.plan else [f"not planned: {tried.not_planned}"]),
        *tried.trial,
    ]
    for prompt in tried.prompts:
        size = "" if prompt.num_tokens is None else f", {prompt.num_tokens} tokens"
        lines += ["", f"row {prompt.index}{size}:", _shown(prompt)]
        names = ("answer",) if len(prompt.answers) < 2 else ("chosen", "rejected")
        for name, answer in zip(names, prompt.answers, strict=False):
            text = answer if isinstance(answer, str) else answer.get("content") or ""
            lines += [f"{name}: {text}"]
    return Text("\n".join(lines))


def _shown(prompt: PreviewedPrompt) -> str:
    if prompt.text is not None:
        return prompt.text
    if isinstance(prompt.content, str):
        return prompt.content
    return "\n".join(f"{said['role']}: {said.get('content')}" for said in prompt.content)


def columns_of(rows: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Returns the COLUMNS that any of the rows of metrics has: supervised steps have no reward."""
    present = {name for row in rows for name in row}
    return {heading: name for heading, name in COLUMNS.items() if name in present}


def metrics_table(rows: Iterable[MetricsRow], columns: Mapping[str, str]) -> Table:
    """Returns the table of the metrics `columns`, by their headings, without rows that have none of
    them, as step 0 does where only the evaluation of the untrained model was stored."""
    table = Table("step", *columns, box=None, pad_edge=False)
    for row in rows:
        values = [row.metrics.get(name) for name in columns.values()]
        if any(value is not None for value in values):
            cells = ("" if value is None else f"{value:.4g}" for value in values)
            table.add_row(str(row.step), *cells)
    return table


def side_by_side(jobs: Mapping[str, MetricsList], names: Sequence[str]) -> Table:
    """Returns the table of several jobs' metrics `names` by step, a column for each job."""
    found = {
        (name, job): {row.step: row.metrics[name] for row in listed if name in row.metrics}
        for name in names
        for job, listed in jobs.items()
    }
    table = Table("step", *(f"{name}\n{job}" for name, job in found), box=None, pad_edge=False)
    for step in sorted({step for values in found.values() for step in values}):
        cells = [values.get(step) for values in found.values()]
        table.add_row(str(step), *("" if cell is None else f"{cell:.4g}" for cell in cells))
    return table


class Follower:
    """Shows a job's events as they come: one live line on a terminal, elsewhere one line per
    event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=8, transient=True)
            if console.is_terminal
            else None
        )
        self._values = defaultdict[str, list[float]](list)
        self._step = ""
        self._said_at = time.monotonic()
        self._silent_s = SILENT_S

    def __enter__(self) -> Follower:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, event: Event) -> None:
        steady = event.type in ("step", "eval", "checkpoint")
        self._silent_s = STEADY_S if steady else SILENT_S
        if event.type == "step" and self._live:
            self._step = self._step_line(event)
            self._update("")
        else:
            line = self._step_line(event) if event.type == "step" else event.message
            style = {"error": "red", "warning": "yellow"}.get(event.level, "")
            self._print(event.time, line, style)

    def progress(self, told: JobProgress) -> None:
        """Shows what the job does: in the live line, elsewhere as a line after a while of
        silence."""
        if self._live:
            self._update(told.message)
        elif time.monotonic() - self._said_at > self._silent_s:
            self._print(told.time, f"... {told.message}", "dim")
            self._silent_s = min(2 * self._silent_s, STEADY_S)

    def _update(self, doing: str) -> None:
        assert self._live
        lines = [(self._step, ""), (doing, "dim")]
        shown = [
            Text(text, style, overflow="ellipsis", no_wrap=True) for text, style in lines if text
        ]
        self._live.update(Group(*shown))

    def _print(self, at: float, line: str, style: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(at))
        self._console.print(Text(f"{stamp} {line}", style=style), soft_wrap=True)
        self._said_at = time.monotonic()

    def _step_line(self, event: Event) -> str:
        metrics: dict[str, float] = event.data["metrics"]
        name = "loss" if "supervised" in metrics else "reward"
        value, values = metrics.get(name), self._values[name]
        if value is not None:
            values.append(value)
        curve = f" {sparkline(values)}" if self._live and len(values) > 1 else ""
        shown = "none" if value is None else f"{value:.3f}"
        eta = event.data.get("eta_s")
        left = f"  ETA {duration(eta)}" if eta is not None else ""
        step = f"step {event.data['step']}/{event.data['steps']}"
        played = conversations(metrics) + shared_tokens(metrics) + unchanged(metrics)
        return f"{step}  {name} {shown}{curve}{played}  {time_split(metrics)}{left}"


HEIGHT, WIDTH = 12, 72
MARKS, LETTERS = "·●", "abcdefghijklmnopqrstuvwxyz"


def learning_curve(jobs: Mapping[str, MetricsList]) -> str:
    """Returns the mean reward and the held-out reward of a job over the steps; without either, the
    loss of supervised steps. Of several jobs, returns their held-out rewards in one picture if all
    have some, else the rewards of their steps. If there are more steps than columns, a column is
    the mean of several. Without any of them, returns a sentence."""
    rewards = {job: _by_step(listed, "reward") for job, listed in jobs.items()}
    held_out = {job: _by_step(listed, "eval/reward") for job, listed in jobs.items()}
    if len(jobs) > 1:
        if all(held_out.values()):
            return _curves(held_out, "held-out reward", LETTERS)
        return _curves(rewards, "reward of the steps", LETTERS)
    ((job, listed),) = jobs.items()
    series = {"reward of the steps": rewards[job], "held-out reward": held_out[job]}
    losses = _by_step((row for row in listed if "supervised" in row.metrics), "loss")
    return _curves(series if any(series.values()) or not losses else {"loss": losses}, job, MARKS)


def _by_step(rows: Iterable[MetricsRow], name: str) -> dict[int, float]:
    return {row.step: row.metrics[name] for row in rows if name in row.metrics}


def _curves(series: Mapping[str, Mapping[int, float]], title: str, marks: str) -> str:
    """Returns a picture of each series of values by step, with a mark of its own."""
    every = [value for values in series.values() for value in values.values()]
    if not every:
        return f"{title}: no step has a reward yet"
    low, high = min(0.0, *every), max(1.0, *every)
    last = max(step for values in series.values() for step in values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark, values in zip(marks, series.values(), strict=False):
        for column, value in _by_column(values, last).items():
            grid[round((high - value) / (high - low) * (HEIGHT - 1))][column] = mark
    shown = [f"{_at(line, low, high)} {''.join(cells).rstrip()}" for line, cells in enumerate(grid)]
    axis = f"{'':>6} 0{f'step {last}':>{WIDTH - 1}}"
    named = zip(marks, series.items(), strict=False)
    key = "   ".join(f"{mark} {name}" for mark, (name, values) in named if values)
    return "\n".join([title, *shown, axis, key])


def _by_column(values: Mapping[int, float], last: int) -> dict[int, float]:
    columns: dict[int, list[float]] = {}
    for step, value in values.items():
        columns.setdefault(round(step / max(last, 1) * (WIDTH - 1)), []).append(value)
    return {column: sum(several) / len(several) for column, several in columns.items()}


def _at(line: int, low: float, high: float) -> str:
    """Returns the reward at a line, for the first, the middle and the last line."""
    if line not in (0, HEIGHT // 2, HEIGHT - 1):
        return " " * 6
    return f"{high - line / (HEIGHT - 1) * (high - low):6.2f}"
