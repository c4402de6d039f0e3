"""Records a conversation as tokens: a tree of turns, and the rows that are made of it. The tokens
are the sampler's, and are never made again from text. Conversations with an environment and agents'
sessions are both recorded here.

A session's request whose messages begin with an earlier turn's messages and answer continues from
that turn; so does one whose token ids begin with that turn's. Any other request is a new root; so
is a turn whose history the sampler had to render again. A row is the path from a root to a leaf:

    root   prompt | answer | given | answer      the newest leaf's row: the rollout
                       `--- given' | answer      its own answer is sampled here; before it, a prompt

Each answer is sampled in one row: in the other rows it is a part of the prompt.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.orchestrator.samplers.services import AnswerOptions
from shared.wire import (
    Branch,
    ConversationPrefix,
    FinishReason,
    Message,
    Rollout,
    RolloutGroup,
    Span,
)
from shared.wire.packed import Logprobs, Mask, TokenIds

COMPARED = ("role", "content", "name", "tool_calls", "tool_call_id")
"""The fields that are compared to find equal messages. Clients add and drop other fields."""

READ = (*COMPARED, "reasoning", "reasoning_content", "task")
"""The fields of a message that vLLM passes to templates."""


@dataclass(frozen=True)
class TurnRequest:
    """The request of a turn: messages, a text, or token ids. `name` is a `digest`, equal for equal
    requests. `max_tokens`, `stop` and `stop_token_ids` limit its answer; the job sets all other
    sampling options."""

    name: str
    messages: tuple[Message, ...] = ()
    options: AnswerOptions = field(default_factory=AnswerOptions)
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(eq=False, frozen=True)
class Turn:
    """A turn: an answer, and the tokens `given` before it since the end of `parent`'s answer, which
    for a root are the whole prompt. `because` says why the turn does not continue from the turn
    before. `began` and `ended` number the events of the session in order. `created` is in Unix
    seconds."""

    id: str
    asked: TurnRequest
    parent: Turn | None
    given: TokenIds
    rollout: Rollout
    message: Message
    because: str
    began: int
    ended: int
    created: int

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return list(self.message.get("tool_calls") or ())

    @property
    def num_messages(self) -> int:
        """The number of messages up to and with the turn's answer."""
        return len(self.asked.messages) + 1

    @property
    def way(self) -> list[Turn]:
        """The turns on the path from the root to this turn."""
        found = list[Turn]()
        turn: Turn | None = self
        while turn:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def prompt_token_ids(self) -> list[int]:
        """All tokens before the turn's answer."""
        return [*(self.parent.token_ids if self.parent else ()), *self.given]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of the turn's answer."""
        return [id for turn in self.way for ids in turn.added for id in ids]

    @property
    def num_tokens(self) -> int:
        """The number of tokens after the root's prompt."""
        way = self.way
        return sum(len(ids) for turn in way for ids in turn.added) - len(way[0].given)

    @property
    def known(self) -> ConversationPrefix:
        """The conversation so far, for the sampler's next request."""
        return ConversationPrefix(
            num_messages=self.num_messages, token_ids=TokenIds(self.token_ids)
        )

    @property
    def added(self) -> tuple[TokenIds, TokenIds]:
        """The tokens that the turn adds: given, and sampled."""
        return self.given, self.rollout.token_ids


def digest(request: str) -> str:
    """Returns a digest that identifies the request."""
    return hashlib.sha256(request.encode(errors="surrogatepass")).hexdigest()


def read_fields(message: Message) -> Message:
    """Returns the message with only the fields that templates read; sessions keep all messages."""
    return {name: value for name, value in message.items() if name in READ}


class Recording:
    """The turns of one conversation, in the order in which they were answered. `taken` has the ids
    of the answers that a client has received."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.taken: set[Turn] = set()
        self._replica = ""
        self._clock = 0

    def tick(self) -> int:
        """Returns the number of the next event."""
        self._clock += 1
        return self._clock

    def add(
        self,
        id: str,
        asked: TurnRequest,
        parent: Turn | None,
        group: RolloutGroup,
        *,
        began: int,
        because: str = "",
    ) -> Turn:
        """Records the group's only rollout as an answer, and returns its turn."""
        if group.forked:
            parent, because = None, group.forked
        (rollout,) = group.rollouts
        turn = Turn(
            id=id,
            asked=asked,
            parent=parent,
            given=TokenIds(group.prompt_token_ids[len(parent.token_ids) if parent else 0 :]),
            rollout=rollout,
            message=next(iter(rollout.messages), {"role": "assistant", "content": rollout.text}),
            because=because,
            began=began,
            ended=self.tick(),
            created=int(time.time()),
        )
        self.turns.append(turn)
        self._replica = group.replica or self._replica
        return turn

    def before(self, asked: TurnRequest) -> Turn | None:
        """Returns the longest turn that the request continues; of several, the newest."""
        fits = _has_tokens if asked.token_ids is not None else _has_messages
        continued: dict[Turn | None, int] = {None: 0}
        for turn in self.turns:  # parents stand before their children
            at = continued.get(turn.parent)
            if at is not None and (end := fits(turn, asked, at)) is not None:
                continued[turn] = end
        del continued[None]
        return max(reversed(continued), key=lambda turn: continued[turn], default=None)

    def why(self, asked: TurnRequest, parent: Turn | None) -> str:
        """Returns why the request does not continue from the newest turn; "" if it does."""
        if not self.turns or parent is self.turns[-1]:
            return ""
        newest = self.turns[-1]
        ours = (*newest.asked.messages, newest.message)
        if not asked.messages or not newest.asked.messages:
            return "its tokens do not begin with the recorded ones"
        if other := _other_template(newest.asked, asked):
            return f"{other} differ from the turn before"
        num_same = _num_same(ours, asked.messages)
        if num_same >= len(asked.messages):
            return f"message {len(asked.messages) - 1}, the request's last, was answered before"
        if num_same == len(ours):
            return "the chat template rendered its earlier messages differently"
        theirs, own = _compared(asked.messages[num_same]), _compared(ours[num_same])
        names = [name for name in COMPARED if theirs[name] != own[name]]
        return f"message {num_same} has another {' and '.join(names)} than the one recorded"

    def leaves(self) -> list[Turn]:
        """Returns the last turn of each row, oldest first. An answer without continuation is left
        out if no client received it, or if the same request was answered again after it."""
        parents = {turn.parent for turn in self.turns}
        last_began: dict[str, int] = {}
        for turn in self.turns:
            name = turn.asked.name
            last_began[name] = max(turn.began, last_began.get(name, 0))
        kept = [
            turn
            for turn in self.turns
            if turn in parents or (turn in self.taken and last_began[turn.asked.name] < turn.ended)
        ]
        parents = {turn.parent for turn in kept}
        return [turn for turn in kept if turn not in parents]

    def rows(self) -> list[tuple[Turn, list[Turn], list[Turn]]]:
        """Returns each row as its last turn, the turns that other rows have sampled, and its own
        turns. The newest row is the last, and owns all of its turns."""
        taken: set[Turn] = set()
        found: list[tuple[Turn, list[Turn], list[Turn]]] = []
        for leaf in reversed(self.leaves()):
            way = leaf.way
            shared = [turn for turn in way if turn in taken]
            found.append((leaf, shared, way[len(shared) :]))
            taken |= set(way)
        return found[::-1]

    def group(
        self, finish_reason: FinishReason | None = None, messages: Sequence[Message] | None = None
    ) -> RolloutGroup:
        """Returns the conversation as a group of one: its newest row, and the others as branches.
        `messages`: the messages after the prompt, if there are more than in the turns."""
        *others, (leaf, _, own) = self.rows()
        found = row_of(
            _parts(own),
            leaf.rollout.text,
            finish_reason or leaf.rollout.finish_reason,
            self._said(own) if messages is None else messages,
        )
        branches = tuple(self._branch(*each) for each in others)
        return RolloutGroup(
            prompt_token_ids=own[0].given,
            rollouts=(found.model_copy(update={"branches": branches}),),
            replica=self._replica,
        )

    def _said(self, own: Sequence[Turn]) -> list[Message]:
        """Returns the messages of the newest row after the first prompt, or after its own prompt if
        that differs. Requests of text or tokens have no messages but their answers."""
        leaf, first = own[-1], self.turns[0].asked.messages
        messages = leaf.asked.messages
        if not messages:
            return [turn.message for turn in own]
        num_prompt = _num_same(first, messages)
        if num_prompt < len(first):
            num_prompt = len(own[0].asked.messages)
        return [*messages[num_prompt:], leaf.message]

    def _branch(self, leaf: Turn, shared: Sequence[Turn], own: Sequence[Turn]) -> Branch:
        before = shared[-1].token_ids if shared else []
        later = self.turns[self.turns.index(leaf) + 1 :]
        because = next((turn.because for turn in later if turn.because), "")
        return branch(TokenIds([*before, *own[0].given]), row_of(_parts(own)), because)


def branch(prompt_token_ids: TokenIds, row: Rollout, because: str) -> Branch:
    """Returns a row as a branch."""
    columns = row.model_dump(include=set(Branch.model_fields))
    return Branch(**{**columns, "prompt_token_ids": prompt_token_ids, "because": because})


Part = tuple[Sequence[int], Rollout]
"""Tokens that were not sampled, and the answer after them, or a whole row."""


def _parts(own: Sequence[Turn]) -> list[Part]:
    """Returns the turns as parts. The tokens before the first one belong to the prompt."""
    return [(turn.given if number else (), turn.rollout) for number, turn in enumerate(own)]


def row_of(
    parts: Iterable[Part],
    text: str = "",
    finish_reason: FinishReason = "stop",
    messages: Sequence[Message] = (),
) -> Rollout:
    """Returns the parts as one rollout, whose last answer is `text`."""
    token_ids, sampled, turns = array("i"), array("B"), array("i")
    logprobs, kept_ids, kept_counts = array("f"), array("i"), array("i")
    spans: list[Span] = []
    prompt_end: str | None = None
    for given, rollout in parts:
        zeros = [0] * len(given)
        start, length = len(token_ids) + len(given), len(rollout.token_ids)
        token_ids.extend((*given, *rollout.token_ids))
        logprobs.extend((*zeros, *rollout.logprobs))
        sampled.extend((*zeros, *(rollout.sampled or [1] * length)))
        kept_ids.extend(rollout.kept_ids)
        kept_counts.extend((*zeros, *(rollout.kept_counts or [0] * length)))
        turns.extend(start + first for first in rollout.turns or (0,))
        prompt_end = rollout.prompt_end
        for span in rollout.spans:
            if not spans:  # tokens before it are context, without a version
                spans.append(Span(version=span.version, start=0))
            elif spans[-1].version != span.version:
                spans.append(Span(version=span.version, start=start + span.start))
    return Rollout(
        text=text,
        token_ids=TokenIds(token_ids),
        logprobs=Logprobs(logprobs),
        finish_reason=finish_reason,
        prompt_end=prompt_end,
        spans=tuple(spans),
        sampled=Mask(sampled),
        kept_ids=TokenIds(kept_ids),
        kept_counts=TokenIds(kept_counts if kept_ids else ()),
        messages=tuple(messages),
        turns=TokenIds(turns),
    )


def _has_messages(turn: Turn, asked: TurnRequest, at: int) -> int | None:
    """Returns how many messages the request shares with the turn, if it begins with all messages of
    the turn and has more. The first `at` are known to be equal."""
    end = turn.num_messages
    if end >= len(asked.messages) or not turn.asked.messages or _other_template(turn.asked, asked):
        return None
    ours = (*turn.asked.messages[at:], turn.message)
    return end if _num_same(ours, asked.messages[at:]) == len(ours) else None


def _has_tokens(turn: Turn, asked: TurnRequest, at: int) -> int | None:
    """Returns how many token ids the turn has, if the request begins with all of them."""
    ours = (*turn.given, *turn.rollout.token_ids)
    assert asked.token_ids is not None
    end = at + len(ours)
    return end if end < len(asked.token_ids) and asked.token_ids[at:end] == ours else None


def _other_template(one: TurnRequest, other: TurnRequest) -> str:
    ours, theirs = one.options, other.options
    if ours.tools != theirs.tools:
        return "the tools"
    return "the template arguments" if ours.template_args != theirs.template_args else ""


def _num_same(ours: Sequence[Message], theirs: Sequence[Message]) -> int:
    """Returns the number of equal messages at the beginning of both."""
    pairs = zip(ours, theirs, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if _compared(one) != _compared(other)),
        min(len(ours), len(theirs)),
    )


def _compared(message: Message) -> dict[str, Any]:
    """Returns the compared fields in a normal form. Clients write no value as None, as "" or not at
    all, text as a string or a list of parts, and the arguments of calls as JSON with any spaces and
    order."""
    fields = {name: message.get(name) or "" for name in COMPARED}
    content = fields["content"]
    if isinstance(content, list):
        fields["content"] = "".join(part["text"] for part in content)
    if isinstance(fields["tool_calls"], list):
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    return fields


def _call(call: Any) -> Any:
    try:
        function = call["function"]
        return (call.get("id"), function["name"], json.loads(function["arguments"]))
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        return call
