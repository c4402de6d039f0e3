"""Why sampler and trainer disagree, by small experiments with a sampler that serves the job's
newest version. Pure: what was measured, and what follows; probing.py measures.

The trainer's side is the canary of that version: a fixed sequence with the trainer's log-probs,
which every sync brings. So each cause is told apart by what still agrees:

| experiment   | the same in both                | differs only if                               |
|--------------|---------------------------------|-----------------------------------------------|
| version      |                                 | the sampler serves older weights              |
| tensors      | version                         | a load went wrong in the engine               |
| dtype        |                                 | one of them rounds more coarsely              |
| same_tokens  | tokens, temperature 1, no cache | weights, dtype, quantization or model code do |
| decoding     | engine, weights, temperature 1  | its kernels for one token and for many do     |
| prefix_cache | engine, weights, tokens, seed   | what it cached is of other weights            |

Where all of them agree, what is left is how the job samples: temperature and masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.orchestrator.samplers.canary import tolerance
from services.orchestrator.store.folder import Proof
from shared.wire import (
    CheckedWeights,
    Experiment,
    ExperimentReport,
    ServingWeights,
)

LATER = 3.0
"""How many times as far the second half of the canary may differ as the first: positions that are
counted wrongly show with distance."""


@dataclass(frozen=True)
class Measured:
    """What a sampler answered. `again` are its log-probs `[T - 1]` of the canary, read in one pass
    without a cache. `sampled` and `reread` are log-probs of tokens that it sampled at temperature
    1: while it sampled, and read in one pass afterwards. `cold` and `warm` are of the same tokens
    of one prompt, before and after it was cached. None: it was not measured, and `why_not` says
    why, by the experiment's name."""

    serving: ServingWeights
    checked: CheckedWeights | None = None
    again: Sequence[float] | None = None
    sampled: Sequence[float] | None = None
    reread: Sequence[float] | None = None
    cold: Sequence[float] | None = None
    warm: Sequence[float] | None = None
    why_not: dict[str, str] | None = None


def judge(newest: Proof, measured: Measured) -> list[Experiment]:
    """Returns the experiments with their results, in the order in which they are read."""
    found = {
        "version": _version(newest, measured),
        "tensors": _tensors(measured),
        "dtype": _dtype(newest, measured),
        "same_tokens": _same_tokens(newest, measured),
        "decoding": _decoding(newest, measured),
        "prefix_cache": _prefix_cache(newest, measured),
    }
    whys = measured.why_not or {}
    return [
        experiment
        or Experiment(
            name=name, sampler=measured.serving.replica, agrees=None, detail=whys.get(name, "")
        )
        for name, experiment in found.items()
    ]


def report(job_id: str, version: int, experiments: Sequence[Experiment]) -> ExperimentReport:
    """Returns the report, with the causes that are left."""
    return ExperimentReport(
        job_id=job_id,
        version=version,
        experiments=tuple(experiments),
        causes=tuple(dict.fromkeys(_causes(experiments))),
    )


def _causes(experiments: Sequence[Experiment]) -> Iterator[str]:
    differs = {one.name for one in experiments if one.agrees is False}
    agrees = {one.name for one in experiments if one.agrees} - differs
    if "version" in differs:
        yield "stale weights: a sampler does not serve the newest version"
    if "tensors" in differs:
        yield "a load went wrong: the engine's tensors differ from the published ones"
    if "dtype" in differs:
        yield 'another dtype: name one for both by training.dtype, in place of "auto"'
    if "same_tokens" in differs and not differs & {"version", "tensors", "dtype"}:
        right = "the tensors are right, so " if "tensors" in agrees else ""
        yield (
            f"{right}the sampler computes the model otherwise: quantization, a kernel, or model "
            "code of another version"
        )
    if "decoding" in differs:
        yield "the engine's kernels for one token and for many disagree with each other"
    if "prefix_cache" in differs:
        yield "the prefix cache: what is read from it is not what these weights compute"
    if not differs and {"version", "same_tokens", "decoding"} <= agrees:
        yield (
            "none of these: weights, dtype, kernels and decoding agree at temperature 1, so what "
            "is left is how the job samples (sampling.temperature, top_p, top_k, min_p) or "
            "staleness"
        )


def _version(newest: Proof, measured: Measured) -> Experiment:
    serving = measured.serving
    agrees = (serving.version, serving.digest) == (newest.version, newest.digest)
    detail = (
        f"it serves version {serving.version}, digest {str(serving.digest)[:12]}; the newest is "
        f"version {newest.version}, digest {newest.digest[:12]}"
    )
    return Experiment(name="version", sampler=serving.replica, agrees=agrees, detail=detail)


def _tensors(measured: Measured) -> Experiment | None:
    checked = measured.checked
    if checked is None:
        return None
    read = checked.num_tensors - len(checked.unread)
    detail = f"{read} of {checked.num_tensors} tensors were read back from the engine"
    if checked.differing:
        detail += f", and {len(checked.differing)} differ, the first is {checked.differing[0]!r}"
    agrees = None if not read else not checked.differing
    return Experiment(
        name="tensors", sampler=measured.serving.replica, agrees=agrees, detail=detail
    )


def _dtype(newest: Proof, measured: Measured) -> Experiment:
    ours, theirs = newest.canary.dtype, measured.serving.dtype
    return Experiment(
        name="dtype",
        sampler=measured.serving.replica,
        agrees=ours == theirs,
        detail=f"the trainer computes in {ours}, the sampler in {theirs}",
    )


def _same_tokens(newest: Proof, measured: Measured) -> Experiment | None:
    if measured.again is None:
        return None
    ours = list(newest.canary.logprobs)
    allowed, gaps = _allowed(newest, measured), _gaps(ours, measured.again)
    half = len(gaps) // 2
    detail = f"the trainer's and the sampler's log-probs of {len(gaps)} tokens"
    if half and _mean(gaps[half:]) > max(LATER * _mean(gaps[:half]), allowed):
        detail += (
            f"; later tokens differ more ({_mean(gaps[:half]):.2g}, then "
            f"{_mean(gaps[half:]):.2g} nats): look at positions (RoPE) and attention"
        )
    return _compared("same_tokens", measured, gaps, allowed, detail)


def _decoding(newest: Proof, measured: Measured) -> Experiment | None:
    if measured.sampled is None or measured.reread is None:
        return None
    gaps = _gaps(measured.sampled, measured.reread)
    detail = f"the sampler's log-probs of {len(gaps)} tokens, as it sampled and as it read them"
    return _compared("decoding", measured, gaps, _allowed(newest, measured), detail)


def _prefix_cache(newest: Proof, measured: Measured) -> Experiment | None:
    if measured.cold is None or measured.warm is None:
        return None
    gaps = _gaps(measured.cold, measured.warm)
    detail = f"the sampler's log-probs of {len(gaps)} tokens, before and after it had the prompt"
    return _compared("prefix_cache", measured, gaps, _allowed(newest, measured), detail)


def _allowed(newest: Proof, measured: Measured) -> float:
    """Returns the nats that rounding may come to, as at a sync."""
    return tolerance(newest.canary, measured.serving)


def _gaps(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(ours, theirs, strict=True)]


def _mean(gaps: Sequence[float]) -> float:
    return sum(gaps) / len(gaps) if gaps else 0.0


def _compared(
    name: str, measured: Measured, gaps: Sequence[float], allowed: float, detail: str
) -> Experiment:
    return Experiment(
        name=name,
        sampler=measured.serving.replica,
        agrees=_mean(gaps) <= allowed,
        difference=round(_mean(gaps), 8),
        allowed=round(allowed, 8),
        detail=detail,
    )
