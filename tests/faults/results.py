"""What was measured, kept in a file to which every fault is added as it is over, so that a run that
is cut continues where it was; and the table of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Figure
from tests.faults.plan import KINDS, STAGES, Fault
from tests.faults.trial import Struck, Trial

EVALUATED_EVERY = 2
CHECKPOINT_EVERY = 3


@dataclass(frozen=True)
class Measured:
    """One fault as it was: `on_time`, if its stage was still the one that had begun last; `lost_s`
    beyond what its steps take otherwise; `sound` says whether the job that it struck came to the
    same as undisturbed, None before that was looked at."""

    number: int
    job_id: str
    kind: str
    stage: str
    on_time: bool
    lost_s: float
    hands: tuple[str, ...]
    sound: bool | None

    @property
    def is_done(self) -> bool:
        """Whether it need not be struck again."""
        return bool(self.sound) and not self.hands


class Results:
    """Of one seed, in one file: a JSON object per line."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._seed = seed

    def add_fault(self, job_id: str, struck: Struck) -> None:
        fault = struck.fault
        self._add(
            fault=fault.number,
            job=job_id,
            kind=fault.kind,
            stage=fault.stage,
            began_last=struck.while_,
            gap_s=round(struck.gap_s, 3),
            steps=struck.steps,
            hands=struck.hands,
        )

    def add_trial(self, trial: Trial) -> None:
        usual = {str(step): round(seconds, 3) for step, seconds in trial.usual.items()}
        self._add(job=trial.job_id, usual=usual, problems=trial.problems, **trial.record)

    def add_failure(self, fault: Fault | None, why: str) -> None:
        self._add(failed=fault and fault.number, why=why)

    def measured(self) -> list[Measured]:
        """Returns each fault that was over, as it was the last time it was struck."""
        lines = [*self._lines()]
        jobs = {line["job"]: line for line in lines if "usual" in line}
        usual_s = _usual(jobs.values())
        found: dict[int, Measured] = {}
        for line in lines:
            if "fault" not in line:
                continue
            job = jobs.get(line["job"])
            lost_s = line["gap_s"] - sum(usual_s(step) for step in line["steps"])
            found[line["fault"]] = Measured(
                line["fault"],
                line["job"],
                line["kind"],
                line["stage"],
                line["began_last"] == line["stage"],
                max(lost_s, 0.0),
                tuple(line["hands"]),
                None if job is None else not job["problems"],
            )
        return [found[number] for number in sorted(found)]

    def failures(self) -> list[str]:
        """Returns why jobs did not continue after faults that were not struck again since."""
        since = {each.number for each in self.measured() if each.is_done}
        failed = (line for line in self._lines() if "why" in line)
        return [line["why"] for line in failed if line["failed"] not in since]

    def problems(self) -> list[str]:
        jobs = {each.job_id for each in self.measured()}
        return [
            f"{line['job']}: {problem}"
            for line in self._lines()
            if line.get("job") in jobs
            for problem in line.get("problems", ())
        ]

    def num_jobs(self) -> int:
        return len({each.job_id for each in self.measured()})

    def _add(self, **line: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"seed": self._seed, **line}) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = map(json.loads, self._path.read_text().splitlines())
        return [line for line in lines if line["seed"] == self._seed]


def _usual(jobs: Iterable[dict[str, Any]]) -> Any:
    """Returns what gives the seconds that a step takes undisturbed: the median of the steps
    that are evaluated and saved as it is."""
    found: dict[tuple[bool, bool], list[float]] = {}
    for job in jobs:
        for step, seconds in job["usual"].items():
            found.setdefault(_class(int(step)), []).append(seconds)
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    middle = statistics.median(medians.values()) if medians else 0.0
    return lambda step: medians.get(_class(step), middle)


def _class(step: int) -> tuple[bool, bool]:
    return step % EVALUATED_EVERY == 0, step % CHECKPOINT_EVERY == 0


def figures(results: Results, wanted: Collection[int]) -> list[Figure]:
    """Returns what was measured of the wanted faults, with the goals."""
    measured = [each for each in results.measured() if each.number in wanted]
    sound = [each for each in measured if each.sound]
    lost = sorted(each.lost_s for each in measured) or [0.0]
    return [
        Figure("faults after which the job was as undisturbed", len(sound), goal=len(wanted)),
        Figure("faults that needed a hand", sum(bool(m.hands) for m in measured), "", 0, "max"),
        Figure("faults after which a job did not continue", len(results.failures()), "", 0, "max"),
        Figure("faults that met their stage", sum(each.on_time for each in measured)),
        Figure("jobs", results.num_jobs()),
        Figure("steps lost or doubled, weights that differ", len(results.problems()), "", 0, "max"),
        Figure("lost by a fault, median", statistics.median(lost), "s"),
        Figure("lost by a fault, most", lost[-1], "s"),
    ]


def markdown(measured: Sequence[Measured]) -> str:
    """Returns the table of kind by stage by seconds lost, of several faults the most."""
    by_loss = sorted(measured, key=lambda each: each.lost_s)
    cells = {(each.kind, each.stage): f"{each.lost_s:.1f}" for each in by_loss}
    kinds = dict.fromkeys([f"{what}: {how}" for how, what in KINDS] + [kind for kind, _ in cells])
    stages = dict.fromkeys([*STAGES, *(stage for _, stage in cells)])
    met = [kind for kind in kinds if any(kind == of for of, _ in cells)]
    rows = [
        ("fault", *stages),
        ("---", *("---:" for _ in stages)),
        *((kind, *(cells.get((kind, stage), "") for stage in stages)) for kind in met),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
