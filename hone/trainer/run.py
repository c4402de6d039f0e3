"""A job in hand: what a Trainer returns with `detach=True`, and `hone.attach` finds again."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rich.console import Console

from hone import stack
from hone.async_client import NotEnded
from hone.trainer.modes import Address
from hone.view import Follower
from shared.errors import BadRequest, Failed, NotFound, how_to_install
from shared.explain import elide

if TYPE_CHECKING:
    from hone.client import Client
    from shared.wire import Event, GradedRollout, JobRecord, MetricsRow


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


CURVES = {"reward": "reward of the steps", "eval/reward": "held out"}
"""The metrics that are drawn by default, and their labels."""


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
        """Returns a matplotlib Figure of these metrics over the steps, which a notebook shows; by
        default the reward of the steps and of held-out problems. Raises BadRequest for a metric
        that no step has."""
        try:
            from matplotlib.figure import Figure  # pyright: ignore
        except ImportError as error:
            why = f"plot() draws with matplotlib: {how_to_install('plot')}"
            raise BadRequest(why) from error

        class Curves(Figure):  # pyright: ignore
            """A notebook shows a plain Figure only after an import of pyplot."""

            def _repr_png_(self) -> bytes:
                image = io.BytesIO()
                self.savefig(image, format="png")  # pyright: ignore
                return image.getvalue()

        figure, rows = Curves(figsize=(8, 4.5)), self._rows()
        axes: Any = figure.subplots()  # pyright: ignore
        for name in metrics or CURVES:
            points = [(row.step, row.metrics[name]) for row in rows if name in row.metrics]
            if points:
                axes.plot(*zip(*points, strict=True), label=CURVES.get(name, name))
            elif metrics:
                raise BadRequest(
                    f"no step of job {self.id} has the metric {name!r}; metrics().columns lists "
                    "them"
                )
        axes.set(xlabel="step", title=self.id)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        return figure


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
            with self.client as client, Follower(Console()) as view:
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
