"""An example's numbers as arrays, and checks that it fits the model.

Token ids and log-probs stay bytes; they are never converted to Python numbers one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest
from shared.wire import Example, Logprobs, TokenIds

UNKNOWN = -1
"""The version of unknown weights."""

PER_TOKEN = (
    *("context_ids", "ratio_mask", "old_logprobs", "advantages"),
    *("sampled", "kept_counts"),
)
"""The fields that an example has either for each of the completion's tokens or not at all."""

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def integers(packed: TokenIds) -> NDArray[np.int32]:
    return np.frombuffer(packed.data, "<i4")


def floats(packed: Logprobs) -> NDArray[np.float32]:
    return np.frombuffer(packed.data, "<f4")


def read_ids(example: Example) -> NDArray[np.int32]:
    """Returns the token ids that the model reads, prompt and completion."""
    completion = example.context_ids or example.token_ids
    return np.concatenate([integers(example.prompt_token_ids), integers(completion)])


def sampled_positions(example: Example) -> NDArray[np.intp]:
    """Returns the positions of the completion's tokens that the policy sampled, ascending. Its
    other tokens are context."""
    if not example.sampled:
        return np.arange(len(example.token_ids))
    return np.flatnonzero(np.frombuffer(example.sampled.data, np.uint8))


def num_sampled(example: Example) -> int:
    """Returns how many of the completion's tokens the policy sampled."""
    return len(sampled_positions(example)) if example.sampled else len(example.token_ids)


def versions(example: Example) -> NDArray[np.int64]:
    """Returns for each of the completion's tokens `[T]` the version of the weights that sampled it,
    or `UNKNOWN`."""
    if not example.spans:
        return np.full(len(example.token_ids), UNKNOWN)
    lengths = np.diff([*(span.start for span in example.spans), len(example.token_ids)])
    return np.repeat([span.version for span in example.spans], lengths)


def allowed_versions(version: int | None, max_staleness: int) -> range | None:
    """Returns the versions that may have sampled the examples for the weights of `version`; None:
    any, because `version` is not known."""
    if version is None:
        return None
    return range(max(version - max_staleness, 0), version + 1)


def check(
    examples: Sequence[Example],
    vocab_size: int,
    sampled_by: range | None = None,
    *,
    window: int | None = None,
) -> None:
    """Raises BadRequest, naming the example, if the trainer could not compute its log-probs, its
    loss would not be finite, or a version outside `sampled_by` sampled it (None: any version may).
    `window`: the model's context length in tokens, if it is limited."""
    for index, example in enumerate(examples):
        problem = (
            _problem(example, vocab_size)
            or _too_long(example, window)
            or _wrong_versions(example, sampled_by)
        )
        if problem:
            raise BadRequest(f"example {index} of {len(examples)} {problem}")


def _problem(example: Example, vocab_size: int) -> str | None:
    return (
        _wrong_length(example)
        or _wrong_masks(example)
        or _wrong_ids(example, vocab_size)
        or _not_finite(example)
        or _wrong_kept(example)
    )


def _wrong_length(example: Example) -> str | None:
    num_prompt, num_tokens = len(example.prompt_token_ids), len(example.token_ids)
    begins_with_context = example.sampled.data[:1] == b"\0"
    if not num_tokens or not (num_prompt or begins_with_context):
        return (
            f"has {num_prompt} prompt tokens and {num_tokens} completion tokens; expected at least "
            "1 completion token, and a token before the first sampled one"
        )
    for name in PER_TOKEN:
        length = len(getattr(example, name))
        if length not in (0, num_tokens):
            return f"has {length} {name}, expected {num_tokens}, one per completion token, or none"
    return None


def _wrong_masks(example: Example) -> str | None:
    for name in ("sampled", "ratio_mask"):
        mask = np.frombuffer(getattr(example, name).data, np.uint8)
        if len(bad := np.flatnonzero(mask > 1)):
            return f"has {name} {mask[bad[0]]} at completion token {bad[0]}, expected 0 or 1"
    if not num_sampled(example):
        return f"has no sampled token among {len(example.token_ids)}, expected at least 1"
    in_ratio = np.frombuffer(example.ratio_mask.data, np.uint8)
    if len(in_ratio) and not in_ratio[sampled_positions(example)].any():
        return "has a ratio_mask that marks no sampled token, expected at least 1"
    return None


def _too_long(example: Example, window: int | None) -> str | None:
    length = len(example.prompt_token_ids) + int(sampled_positions(example)[-1]) + 1
    if window is None or length <= window:
        return None
    return (
        f"has {length} tokens up to the last sampled one, expected at most {window}, the model's "
        "context length"
    )


def _wrong_versions(example: Example, sampled_by: range | None) -> str | None:
    if not example.spans:
        return None
    bounds = [*(span.start for span in example.spans), len(example.token_ids)]
    if bounds[0] != 0 or any(start >= end for start, end in pairwise(bounds)):
        return (
            f"has spans that start at tokens {bounds[:-1]}, expected 0 first, then ascending "
            f"starts below {bounds[-1]}"
        )
    for span in example.spans:
        if sampled_by is not None and span.version not in sampled_by:
            return (
                f"has tokens that version {span.version} sampled, from {span.start} on; expected "
                f"versions {sampled_by[0]} to {sampled_by[-1]}"
            )
    return None


def _wrong_ids(example: Example, vocab_size: int) -> str | None:
    for place, packed in (
        ("prompt token", example.prompt_token_ids),
        ("completion token", example.token_ids),
        ("context token", example.context_ids),
        ("kept id", example.kept_ids),
    ):
        ids = integers(packed)
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(bad):
            return (
                f"has token id {ids[bad[0]]} at {place} {bad[0]}, expected 0 to {vocab_size - 1} "
                "(the model's vocabulary)"
            )
    return None


def _not_finite(example: Example) -> str | None:
    if abs(example.advantage) > MAX_FLOAT32:
        return f"has advantage {example.advantage:g}, expected at most {MAX_FLOAT32:g}, a float32"
    positions = sampled_positions(example)
    for name in ("old_logprobs", "advantages"):
        packed = getattr(example, name)
        if not packed:
            continue
        values = floats(packed)[positions]
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            return (
                f"has {name} {values[bad[0]]} at completion token {positions[bad[0]]}, expected a "
                "finite number"
            )
    return None


def _wrong_kept(example: Example) -> str | None:
    counts, ids = integers(example.kept_counts), integers(example.kept_ids)
    if len(bad := np.flatnonzero(counts < 0)):
        return f"has kept_counts {counts[bad[0]]} at completion token {bad[0]}, expected 0 or more"
    if counts.sum() != len(ids):
        return f"has {len(ids)} kept_ids, expected {counts.sum()}, the sum of its kept_counts"
    owners = np.repeat(np.arange(len(counts)), counts)
    is_listed = np.zeros(len(counts), dtype=bool)
    is_listed[owners[integers(example.token_ids)[owners] == ids]] = True
    positions = sampled_positions(example) if len(counts) else np.arange(0)
    missing = positions[(counts[positions] > 0) & ~is_listed[positions]]
    if len(missing):
        return (
            f"has completion token {missing[0]} outside its own kept_ids, expected it among the "
            "tokens that could be sampled"
        )
    return None
