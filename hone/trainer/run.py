"""A job in hand: what a Trainer returns with `detach=True`, and `hone.attach` finds again."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rich.console import Console

from hone import stack
from hone.async_client import NotEnded
from hone.trainer.modes import Address
from hone.view import Follower, columns_of
from shared.errors import BadRequest, Failed, NotFound, how_to_install
from shared.explain import elide

if TYPE_CHECKING:
    from hone.client import Client
    from shared.wire import Event, GradedRollout, JobProgress, JobRecord, MetricsRow


class TrainOutput(NamedTuple):
    """How training ended: the fields of the output of transformers' `Trainer.train`. `metrics` are
    the last step's, and the run's summary."""

    global_step: int
    training_loss: float | None
    metrics: dict[str, float]

    @classmethod
    def of(
        cls, rows: Sequence[MetricsRow], summary: Mapping[str, Any], step: int | None = None
    ) -> Self:
        """Returns the output of a run with these rows of metrics, after `step` steps; None: the
        step of the last row."""
        last = dict(rows[-1].metrics) if rows else {}
        numbers = {
            name: value
            for name, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        losses = [row.metrics["loss"] for row in rows if "loss" in row.metrics]
        if step is None:
            step = rows[-1].step if rows else 0
        return cls(step, fmean(losses) if losses else None, last | numbers)


class Detached(KeyboardInterrupt):
    """Ctrl-C left a job running. The message says how to come back to it."""

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook's cell shows: nothing went wrong, so there is no traceback."""
        return [str(self)]


def attach(job: str, url: str | None = None, *, token: str | None = None) -> Run:
    """Returns the job of this id or name, at the orchestrator `url`; without it, of the stack that
    this folder or the environment names. Waits for an orchestrator that is unreachable, as each
    call does. Raises NotFound if there is no such job."""
    own_url, own_token = stack.orchestrator()
    address = Address(url or own_url, token or own_token, shares_files=url is None)
    with address.connect() as client:
        return Run(client.get(job).id, address)


class MetricsRun:
    """A run whose steps have metrics."""

    def __init__(self, id: str) -> None:
        self.id = id

    def _rows(self) -> Sequence[MetricsRow]:
        raise NotImplementedError

    def _no_checkpoint(self, step: int | None) -> NotFound:
        wanted = "" if step is None else f" of step {step}"
        return NotFound(f"{self.id!r} has no checkpoint{wanted}")

    def metrics(self) -> Any:
        """Returns a pandas DataFrame with a row for each step, and a column for each metric."""
        try:
            import pandas  # pyright: ignore
        except ImportError as error:
            raise BadRequest("metrics() returns a DataFrame: pip install pandas") from error
        rows = [{"step": row.step, **row.metrics} for row in self._rows()]
        frame = pandas.DataFrame(rows)  # pyright: ignore
        return frame.set_index("step") if rows else frame  # pyright: ignore

    def plot(self, *metrics: str) -> Any:
        """Returns a matplotlib Figure of these metrics over the steps; by default the reward of the
        steps and of held-out problems."""
        try:
            from hone.trainer.plotting import curves
        except ImportError as error:
            why = f"plot() draws with matplotlib: {how_to_install('plot')}"
            raise BadRequest(why) from error
        return curves(self._rows(), metrics, self.id)


class Run(MetricsRun):
    """A job that was submitted. Its methods work from any process that reaches its
    orchestrator."""

    def __init__(self, id: str, address: Address) -> None:
        super().__init__(id)
        self._address = address

    def __repr__(self) -> str:
        return f"hone.attach({self.id!r}, {self._address.url!r})"

    @property
    def client(self) -> Client:
        """A client of the job's orchestrator, to be closed by the caller."""
        return self._address.connect()

    @property
    def record(self) -> JobRecord:
        """The job's present record."""
        with self.client as client:
            return client.get(self.id)

    @property
    def status(self) -> str:
        return self.record.status

    def wait(self, timeout_s: float | None = None) -> JobRecord:
        """Returns the record once the job has ended or is paused. Raises NotEnded after
        `timeout_s`."""
        with self.client as client:
            return client.wait(self.id, timeout_s=timeout_s)

    def follow(self) -> TrainOutput:
        """Shows progress until the job's end, and returns what it came to. Ctrl-C raises Detached
        and leaves the job running. Raises Failed for a job that has failed or was cancelled, and
        NotEnded for a paused job."""
        try:
            with self.client as client, view_here() as view:
                for event in client.events(self.id, follow=True, progress=view.progress):
                    view.show(event)
        except KeyboardInterrupt:
            raise Detached(
                f"detached; job {self.id} continues. {self!r} returns to it, .follow() shows it, "
                ".cancel() stops it"
            ) from None
        return self.output()

    def output(self) -> TrainOutput:
        """Returns what the job came to. Raises as `follow`."""
        record = self.record
        if record.status == "paused":
            raise NotEnded(
                f"job {self.id} is paused: {record.error}; {self!r}.resume() continues where it was"
            )
        if record.status in ("queued", "running"):
            raise NotEnded(f"job {self.id} is {record.status}; wait() returns at its end")
        if record.status != "succeeded":
            why = f": {record.error}" if record.error else ""
            raise Failed(f"job {self.id} is {record.status}{why}")
        return TrainOutput.of(self._rows(), record.summary or {}, record.step)

    def logs(self, last: int | None = None, *, follow: bool = False) -> Iterator[Event]:
        """Yields the job's events, or the newest `last`; with `follow` also new ones."""
        with self.client as client:
            yield from client.events(self.id, last=last, follow=follow)

    def _rows(self) -> Sequence[MetricsRow]:
        with self.client as client:
            return client.metrics(self.id).rows

    def rollouts(self, step: int | None = None) -> Sequence[GradedRollout]:
        """Returns the graded rollouts of `step`, or of the newest step."""
        with self.client as client:
            return client.rollouts(self.id, step).rollouts

    def cancel(self) -> None:
        with self.client as client:
            client.cancel(self.id)

    def pause(self) -> None:
        with self.client as client:
            client.pause(self.id)

    def resume(self, changes: Sequence[str] = ()) -> None:
        """Lets a paused job continue, with changes such as "memory.micro_batch_tokens=4096"."""
        with self.client as client:
            client.resume(self.id, changes)

    def checkpoint(self, to: str | Path | None = None, *, step: int | None = None) -> Path:
        """Returns the folder of the newest checkpoint, or of `step`, as `transformers` loads it. It
        is downloaded into `to`, unless the job's run folder is on this machine and `to` is None."""
        with self.client as client:
            if to is None and self._address.shares_files:
                kept = [each for each in client.checkpoints(self.id) if step in (None, each.step)]
                if not kept:
                    raise self._no_checkpoint(step)
                path = Path(kept[-1].path)
                if path.is_dir():
                    return path
            return client.download(self.id, to, step=step).folder

    def chat(self, said: str | Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """Returns the answer of the job's policy to a message or a conversation: the weights that
        serve now while it runs and until another job takes the samplers; an adapter for as long as
        it is served. `sampling` are parameters of OpenAI's chat completions. Raises NotFound if no
        sampler has its weights."""
        if not said or not isinstance(said, str | Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BadRequest(f"the message is {elide(said)}; expected text, or a list of messages")
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        with self.client as client:
            return client.chat(self.id, messages, **sampling)


# --- what a person sees --------------------------------------------------------------------------

ROWS = 12
"""Steps in the notebook's table: the newest."""

WIDTH, HEIGHT = 640, 120
MIN_UPDATE_S = 0.3
REWARD_COLOUR, HELD_OUT_COLOUR = "#1f5fa8", "#c2410c"


def view_here() -> Notebook | Follower:
    """Returns the view that fits where the code runs."""
    return Notebook() if in_notebook() else Follower(Console())


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code."""
    try:
        from IPython.core.getipython import get_ipython  # pyright: ignore
    except ImportError:
        return False
    return type(get_ipython()).__name__ == "ZMQInteractiveShell"  # pyright: ignore


class Notebook:
    """A table in a cell's output, with the curve of the rewards."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, dict[str, float]]] = []
        self._held_out: list[tuple[int, float]] = []
        self._said: list[str] = []
        self._doing = "submitted"
        self._of = 0
        self._handle: Any = None
        self._shown_at = 0.0

    def __enter__(self) -> Notebook:
        from IPython.display import HTML, display  # pyright: ignore

        self._handle = display(HTML(self.html()), display_id=True)  # pyright: ignore
        return self

    def __exit__(self, *_: object) -> None:
        self._update(now=True)

    def show(self, event: Event) -> None:
        if event.type == "step":
            self._of = event.data["steps"]
            self._steps.append((event.data["step"], event.data["metrics"]))
        elif event.type == "eval" and "eval/reward" in event.data.get("metrics", {}):
            self._held_out.append((event.data["step"], event.data["metrics"]["eval/reward"]))
        elif event.level in ("warning", "error"):
            self._said = [*self._said, event.message][-5:]
        self._doing = event.message
        self._update(now=event.type != "step")

    def progress(self, told: JobProgress) -> None:
        self._doing = told.message
        self._update(now=False)

    def _update(self, *, now: bool) -> None:
        if self._handle is None or not (now or time.monotonic() - self._shown_at > MIN_UPDATE_S):
            return
        from IPython.display import HTML  # pyright: ignore

        self._handle.update(HTML(self.html()))
        self._shown_at = time.monotonic()

    def html(self) -> str:
        """Returns what the cell shows."""
        step = self._steps[-1][0] if self._steps else 0
        bar = f'<progress value="{step}" max="{self._of or 1}" style="width: {WIDTH}px"></progress>'
        said = "".join(f"<div>{html.escape(line)}</div>" for line in self._said)
        is_said = not self._of or self._doing.startswith("step ")
        steps = "" if is_said else f"step {step} of {self._of}: "
        return (
            f"<div>{bar}<div>{steps}{html.escape(self._doing)}</div>{said}"
            f"{self._curve()}{self._table()}</div>"
        )

    def _curve(self) -> str:
        rewards = [(step, row["reward"]) for step, row in self._steps if "reward" in row]
        lines = [(REWARD_COLOUR, "reward", rewards), (HELD_OUT_COLOUR, "held out", self._held_out)]
        lines = [line for line in lines if line[2]]
        if not lines:
            return ""
        values = [value for _, _, points in lines for _, value in points]
        low, high = min(0.0, *values), max(1.0, *values)
        last = max(self._of, *(step for _, _, points in lines for step, _ in points), 1)
        drawn = "".join(_polyline(colour, points, last, low, high) for colour, _, points in lines)
        names = " ".join(
            f'<span style="color: {colour}">{name} {points[-1][1]:.3f}</span>'
            for colour, name, points in lines
        )
        return (
            f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="rewards by step">'
            f"{drawn}</svg><div>{names}</div>"
        )

    def _table(self) -> str:
        columns = columns_of(metrics for _, metrics in self._steps)
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", *columns))
        names = columns.values()
        rows = "".join(_row(step, metrics, names) for step, metrics in self._steps[-ROWS:])
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row(step: int, metrics: dict[str, float], names: Iterable[str]) -> str:
    cells = (f"{metrics[name]:.4g}" if name in metrics else "" for name in names)
    return f"<tr><td>{step}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _polyline(
    colour: str, points: Sequence[tuple[int, float]], last: int, low: float, high: float
) -> str:
    at = " ".join(
        f"{step / last * (WIDTH - 4) + 2:.1f},"
        f"{(high - value) / ((high - low) or 1) * (HEIGHT - 8) + 4:.1f}"
        for step, value in points
    )
    return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"/>'
