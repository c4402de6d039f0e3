"""Whether a sampler holds the trainer's weights, by what both give a fixed sequence.

The digest that a sampler answers is of the files it read. What its engine then computes with is
another thing: a load that did nothing, that left a tensor out or put it into another's place. So
trainer and sampler each give log-probs of the same sequence, which have to agree as far as the
rounding of their dtypes allows.
"""

from __future__ import annotations

from statistics import pstdev

from services.orchestrator.errors import SyncFailed
from shared.errors import HoneError
from shared.host.logs import get_logger
from shared.http.client import Client
from shared.wire import (
    Canary,
    CheckedWeights,
    NoBody,
    Published,
    ServingWeights,
    WeightsRef,
)

EPSILONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number: what rounding comes to is a multiple of it."""

LEAST = {"float32": 1e-3, "float16": 0.005, "bfloat16": 0.02}
"""Nats by which log-probs may differ on average over the sequence in any case. Two right
implementations differ by about 1e-6 in float32; in bfloat16 by 0.02 in two layers."""

NOISES = 2.0
"""How many times the trainer's own noise the difference may be. vLLM's was 0.5 to 1.0 times that in
models of 2 to 48 layers (`services/trainer/learning/noise.py`)."""

MOST = 0.5
"""Share of the log-probs' standard deviation that a difference may be in any case, whatever the
noise: an unrelated model's differs by 0.96 to 1.1 times that."""

EXPERTS = ".experts."
"""What the names of a mixture's experts have in them, as checkpoints call them."""

CHECK_S = 120.0
"""Seconds for reading an engine's tensors back, which only names what is wrong."""

ROUNDING = 0.1
"""Share of the log-probs' standard deviation that rounding to 16 bits may make them differ by."""


def difference(canary: Canary, serving: ServingWeights) -> float:
    """Returns the mean absolute difference of the log-probs, in nats; infinity if they are not of
    the same tokens."""
    return _mean_gap(list(canary.logprobs), list(serving.canary_logprobs))


def _mean_gap(ours: list[float], theirs: list[float]) -> float:
    if len(ours) != len(theirs):
        return float("inf")
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(gaps) / len(gaps)
    return mean if mean == mean else float("inf")  # NaN: the sampler's are not finite


def change(before: Published | None, after: Published) -> float | None:
    """Returns how far the steps between two versions moved the trainer's log-probs of the canary:
    the mean absolute difference in nats, per step. None: it is not known."""
    if before is None or before.canary is None or after.canary is None:
        return None
    num_steps = after.version - before.version
    if num_steps < 1 or before.canary.token_ids != after.canary.token_ids:
        return None
    moved = _mean_gap(list(before.canary.logprobs), list(after.canary.logprobs)) / num_steps
    return moved if moved < float("inf") else None


def tolerance(canary: Canary, serving: ServingWeights) -> float:
    """Returns the nats that rounding may come to: `NOISES` times the trainer's own noise, in the
    less precise dtype of the two, but at most `MOST` of the log-probs' standard deviation: where
    rounding errors grow without bound, as in sharp attention, the noise is no measure. A load that
    did nothing is detected here if the new weights moved the log-probs by more than this; if the
    log-probs are the same bits as before, or have hardly moved, the sampler itself detects it."""
    dtype = max(canary.dtype, serving.dtype, key=_epsilon)
    coarser = _epsilon(dtype) / _epsilon(canary.dtype)
    expected = min(NOISES * canary.noise * coarser, MOST * pstdev(canary.logprobs))
    return max(LEAST.get(dtype, max(LEAST.values())), expected)


def _epsilon(dtype: str) -> float:
    return EPSILONS.get(dtype, max(EPSILONS.values()))


def fault(canary: Canary, serving: ServingWeights) -> str | None:
    """Returns why the sampler cannot hold the trainer's weights, or None."""
    found, allowed = difference(canary, serving), tolerance(canary, serving)
    if found <= allowed:
        return None
    return (
        f"the log-probs of the canary differ by {found:.4g} nats on average, expected at most "
        f"{allowed:.3g} in {canary.dtype}"
    )


def may_be_rounding(canary: Canary, serving: ServingWeights) -> bool:
    """Returns whether the rounding of 16 bits, which grows with the layers and with the spread of
    the logits, may alone have made the difference. It says nothing of which weights these are: a
    query matrix of another layer changes as little."""
    if canary.dtype == serving.dtype == "float32":
        return False
    return difference(canary, serving) <= ROUNDING * pstdev(canary.logprobs)


async def prove(sampler: Client, published: WeightsRef, serving: ServingWeights) -> None:
    """Raises SyncFailed unless the sampler serves what was published."""
    ref = published.root
    if (serving.version, serving.digest) != (ref.version, ref.digest):
        raise SyncFailed(
            f"weight sync: the trainer published version {ref.version} with digest "
            f"{ref.digest[:12]}, but the sampler serves version {serving.version} with digest "
            f"{str(serving.digest)[:12]}"
        )
    if not ref.canary or not serving.canary_logprobs:
        return
    if problem := fault(ref.canary, serving):
        checked = await _read_back(sampler)
        if _holds_all(checked, ref) and may_be_rounding(ref.canary, serving):
            get_logger().warning(
                "the canary differs, but no tensor that was read back from the engine does",
                version=ref.version,
                unread=0 if isinstance(checked, HoneError) else len(checked.unread),
                difference=difference(ref.canary, serving),
            )
            return
        raise SyncFailed(
            f"weight sync: the sampler does not compute with version {ref.version}: {problem} "
            f"({_describe(checked, ref)})"
        )


async def _read_back(sampler: Client) -> CheckedWeights | HoneError:
    """Returns which tensors of the engine are wrong, or why they could not be read back."""
    try:
        return await sampler.call(
            "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=CHECK_S
        )
    except HoneError as error:
        return error


def _is_of_another(checked: CheckedWeights, ref: Published) -> bool:
    """Whether a job that shares the sampler has loaded a version meanwhile, which was read back."""
    return checked.job_id is not None and checked.job_id != ref.job_id


def _holds_all(checked: CheckedWeights | HoneError, ref: Published) -> bool:
    """Returns whether every tensor of the version was read back, and none differs. A mixture's
    experts need not be: some kernels keep them in an order that the sampler does not know."""
    if not isinstance(checked, CheckedWeights) or checked.differing:
        return False
    if _is_of_another(checked, ref):
        return False
    return all(EXPERTS in name for name in checked.unread)


def _describe(checked: CheckedWeights | HoneError, ref: Published) -> str:
    if isinstance(checked, HoneError):
        return f"its tensors could not be read back: {checked.detail}"
    if _is_of_another(checked, ref):
        return "a job that shares the sampler has loaded a version meanwhile"
    if not checked.differing:
        read = checked.num_tensors - len(checked.unread)
        return f"the {read} tensors of the engine that could be read back are those published"
    return (
        f"{len(checked.differing)} of {checked.num_tensors} tensors of the engine are not those "
        f"published, the first is {checked.differing[0]!r}"
    )
