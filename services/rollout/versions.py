"""The label that vLLM writes beside every token: which life of a job's weights, and which version.

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


def label(life: str, version: int) -> str:
    return f"{life}/{version}"


def spans(labelled: Iterable[Labelled], life: str) -> tuple[Span, ...]:
    """Returns which weight versions sampled a completion, oldest first; none for weights that no
    job has published. Raises Conflict, code "stale", if `life` is a job's and some were another's.
    """
    found: list[Span] = []
    for span in labelled:
        of, separator, version = span.version.rpartition("/")
        if life and of != life:
            raise Conflict(
                f"tokens from {span.start} on were sampled by weights of {span.version!r}, "
                f"expected {life!r}",
                code="stale",
            )
        if separator:
            found.append(Span(version=int(version), start=span.start))
    return tuple(found)
