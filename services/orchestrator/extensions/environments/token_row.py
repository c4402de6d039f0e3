"""The tokens of a conversation after its prompt, as they come: answers as they were sampled, and
between them what tools and users said."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shared.wire import FinishReason, Logprobs, Mask, Message, Rollout, Span, TokenIds


class TokenRow:
    """Columns `[T]` as in `Rollout`."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._sampled = array("B")
        self._kept_ids = array("i")
        self._kept_counts = array("i")
        self._turns = array("i")
        self._spans: list[Span] = []
        self._prompt_end: str | None = None

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        return self._token_ids

    @property
    def size_bytes(self) -> int:
        columns = (
            self._token_ids,
            self._logprobs,
            self._sampled,
            self._kept_ids,
            self._kept_counts,
            self._turns,
        )
        return sum(len(column) * column.itemsize for column in columns)

    def add_given(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that were not sampled."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend([0.0] * len(token_ids))
        self._sampled.extend([0] * len(token_ids))
        self._kept_counts.extend([0] * len(token_ids))

    def add(self, rollout: Rollout) -> None:
        """Appends an answer, or a whole row."""
        start, length = len(self), len(rollout.token_ids)
        self._token_ids.extend(rollout.token_ids)
        self._logprobs.extend(rollout.logprobs)
        self._sampled.extend(rollout.sampled or [1] * length)
        self._kept_ids.extend(rollout.kept_ids)
        self._kept_counts.extend(rollout.kept_counts or [0] * length)
        self._prompt_end = rollout.prompt_end
        self._turns.extend(start + first for first in rollout.turns or (0,))
        for span in rollout.spans:
            if not self._spans:  # tokens before it are context, of no version
                self._spans.append(Span(version=span.version, start=0))
            elif self._spans[-1].version != span.version:
                self._spans.append(Span(version=span.version, start=start + span.start))

    def rollout(
        self, text: str, finish_reason: FinishReason, messages: Sequence[Message]
    ) -> Rollout:
        """Returns all as one rollout, whose last answer is `text`."""
        return Rollout(
            text=text,
            token_ids=TokenIds(self._token_ids),
            logprobs=Logprobs(self._logprobs),
            finish_reason=finish_reason,
            prompt_end=self._prompt_end,
            spans=tuple(self._spans),
            sampled=Mask(self._sampled),
            kept_ids=TokenIds(self._kept_ids),
            kept_counts=TokenIds(self._kept_counts if self._kept_ids else ()),
            messages=tuple(messages),
            turns=TokenIds(self._turns),
        )
