"""Tries a job's rewards on known completions, and reports the values as sentences. So a silently
wrong reward is seen before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.job import RewardSpec
from shared.wire import TriedReward

NEARLY = 0.995
"""From here on a mean shows as 1.00, though not all references have the full mark."""

LIKELY = {
    "math": "likely another column has the answer, or it is neither a number nor a formula",
    "exact_match": "likely another column has the answer",
    "python_value": "likely another column has the value",
    "code_tests": "likely the tests are of another function, or the answer is more than a program",
    "function": "likely your function looks at another column, or expects another form of answer",
}


@dataclass(frozen=True)
class Trial:
    """`summary` says which values were given, and `warnings` what is probably wrong."""

    summary: str
    warnings: tuple[str, ...]


def trial(rewards: Sequence[RewardSpec], tried: Sequence[TriedReward], num_rows: int) -> Trial:
    """Returns the rewards' values for empty completions and reference answers of `num_rows`
    rows."""
    told = "; ".join(map(_told, tried))
    pairs = zip(rewards, tried, strict=True)
    warnings = [_warning(spec, found) for spec, found in pairs if spec.weight > 0]
    return Trial(f"rewards tried on {num_rows} rows: {told}", tuple(filter(None, warnings)))


def _told(found: TriedReward) -> str:
    if found.empty is None and found.reference is None:
        return f"{found.reward}: nothing ({found.why or 'it does not apply'})"
    references = (
        f"reference answers earn {_shown(found.reference)}, "
        if found.num_references
        else "no row has a known answer, "
    )
    return f"{found.reward}: {references}empty completions earn {_shown(found.empty)}"


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.2f}"


def _warning(spec: RewardSpec, found: TriedReward) -> str | None:
    """Returns what is probably wrong with a reward; None if it tells answers apart."""
    name, why = f"reward {found.reward!r}", f" ({found.why})" if found.why else ""
    likely = LIKELY.get(spec.grader, "likely it looks at another column than is meant")
    if found.num_references:
        if found.reference is None:
            return f"{name} gives the rows' own reference answers nothing{why}"
        if found.full_mark is not None and found.reference < NEARLY * found.full_mark:
            return (
                f"{name} gives the rows' own reference answers {found.reference:.2f} of "
                f"{found.full_mark:g}{why}: {likely}"
            )
        if found.empty is not None and found.empty >= found.reference and not spec.shaping:
            return (
                f"{name} gives an empty completion {found.empty:.2f} and the reference answer "
                f"{found.reference:.2f}: it does not tell them apart; {likely}"
            )
    elif found.full_mark is not None and found.empty is not None and found.empty >= found.full_mark:
        return f"{name} gives an empty completion the full mark{why}: {likely}"
    return None
