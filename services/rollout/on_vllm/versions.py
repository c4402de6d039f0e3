"""The label that vLLM writes beside every token: whose weights sampled it (`fencing.owner_of`), and
which version of them.

Versions alone would not do: after a rewind the same number names other weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shared.errors import Conflict
from shared.wire import Span


class Labelled(Protocol):
    """vLLM's WeightVersionSpan: tokens from `start` on were sampled under the label `version`."""

    version: str
    start: int


def label(owner: str, version: int) -> str:
    return f"{owner}/{version}"


def spans(labelled: Iterable[Labelled], owner: str) -> tuple[Span, ...]:
    """Returns which weight versions sampled a completion, oldest first; none for weights that no
    job has published. Raises Conflict, code "stale", if `owner` is a job's and some were another's.
    """
    found: list[Span] = []
    for span in labelled:
        of, separator, version = span.version.rpartition("/")
        if owner and of != owner:
            raise Conflict(
                f"tokens from {span.start} on were sampled by weights of {span.version!r}, "
                f"expected {owner!r}",
                code="stale",
            )
        if separator:
            found.append(Span(version=int(version), start=span.start))
    return tuple(found)
