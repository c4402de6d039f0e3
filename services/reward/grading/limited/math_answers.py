"""Compares mathematical answers by math-verify."""

from __future__ import annotations

import logging


def prepare() -> None:
    import math_verify  # noqa: F401

    logging.disable()


def same(wanted: str, given: str) -> bool:
    r"""Returns whether two texts with an answer each, such as `\boxed{x^2}`, mean the same."""
    from math_verify import parse, verify

    golds = parse(wanted, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    answers = parse(given, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return bool(golds and answers and verify(golds, answers, timeout_seconds=None))
