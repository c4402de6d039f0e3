"""The turns of a session as a tree, and the rows of tokens that they are. Pure.

A request whose messages begin with an earlier turn's messages and answer continues from that turn;
so does one whose token ids begin with that turn's. Any other request begins anew, as a root. A row
is the way from a root to a leaf:

    root   prompt | answer | given | answer      the newest leaf's row: the rollout
                       `--- given' | answer      its own answer is sampled here; before it, a prompt

Each answer is sampled in one row: in the other rows it is a part of the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from services.orchestrator.extensions.environments.token_row import TokenRow
from shared.wire import Branch, Message, Rollout, RolloutGroup, TokenIds

COMPARED = ("role", "content", "name", "tool_calls", "tool_call_id")
"""The fields in which two equal messages agree. Clients add and drop other fields."""

READ = (*COMPARED, "reasoning", "reasoning_content", "task")
"""The fields of a message that vLLM gives to templates."""


@dataclass(frozen=True)
class Asked:
    """What a turn answers: messages, a text, or token ids. `name` is equal for equal requests, a
    `digest` of each."""

    name: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    template_args: dict[str, Any] = field(default_factory=dict[str, Any])
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(eq=False, frozen=True)
class Turn:
    """An answer. `given` are the tokens before it, from the end of the answer of `parent` on; of a
    root, the whole prompt. `because` says why it does not continue from the turn before. `began`
    and `ended` are numbers in the order of what happened in the session."""

    id: str
    asked: Asked
    parent: Turn | None
    given: TokenIds
    rollout: Rollout
    message: Message
    because: str
    began: int
    ended: int

    @property
    def num_messages(self) -> int:
        """How many messages there are up to its answer."""
        return len(self.asked.messages) + 1

    @property
    def way(self) -> list[Turn]:
        """The turns from its root to itself."""
        found = list[Turn]()
        turn: Turn | None = self
        while turn:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of its answer."""
        return [id for turn in self.way for ids in turn.added for id in ids]

    @property
    def num_tokens(self) -> int:
        """How many tokens there are after the root's prompt."""
        way = self.way
        return sum(len(ids) for turn in way for ids in turn.added) - len(way[0].given)

    @property
    def added(self) -> tuple[TokenIds, TokenIds]:
        """Its tokens: given, and sampled."""
        return self.given, self.rollout.token_ids


def digest(request: str) -> str:
    """Returns a name of constant length that no other request has."""
    return hashlib.sha256(request.encode(errors="surrogatepass")).hexdigest()


def read_fields(message: Message) -> Message:
    """Returns the message without what no template reads: a session keeps all its messages."""
    return {name: value for name, value in message.items() if name in READ}


class Recording:
    """The turns of one session, in the order in which they were answered. A client has got the
    answers in `taken`."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.taken: set[Turn] = set()

    def before(self, asked: Asked) -> Turn | None:
        """Returns the longest turn that the request continues from, of equal ones the newest."""
        fits = _has_tokens if asked.token_ids is not None else _has_messages
        going_on: dict[Turn | None, int] = {None: 0}
        for turn in self.turns:  # parents stand before their children
            at = going_on.get(turn.parent)
            if at is not None and (end := fits(turn, asked, at)) is not None:
                going_on[turn] = end
        del going_on[None]
        return max(reversed(going_on), key=lambda turn: going_on[turn], default=None)

    def why(self, asked: Asked, parent: Turn | None) -> str:
        """Returns why the request does not continue from the newest turn; "" if it does."""
        if not self.turns or parent is self.turns[-1]:
            return ""
        newest = self.turns[-1]
        ours = (*newest.asked.messages, newest.message)
        if not asked.messages or not newest.asked.messages:
            return "its tokens do not begin with those recorded"
        if other := _other_template(newest.asked, asked):
            return f"{other} differ from the turn before"
        num_same = _num_same(ours, asked.messages)
        if num_same >= len(asked.messages):
            return f"message {len(asked.messages) - 1}, the request's last, was answered before"
        if num_same == len(ours):
            return "its messages were rendered anew"
        theirs, own = _compared(asked.messages[num_same]), _compared(ours[num_same])
        names = [name for name in COMPARED if theirs[name] != own[name]]
        return f"message {num_same} has another {' and '.join(names)} than the one recorded"

    def leaves(self) -> list[Turn]:
        """Returns the last turn of each row, oldest first. An answer that no one continued from is
        left out if no client got it, or if the same request was answered again after it."""
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
        turns. The newest row is the last, and has all of its turns for itself."""
        taken: set[Turn] = set()
        found: list[tuple[Turn, list[Turn], list[Turn]]] = []
        for leaf in reversed(self.leaves()):
            way = leaf.way
            shared = [turn for turn in way if turn in taken]
            found.append((leaf, shared, way[len(shared) :]))
            taken |= set(way)
        return found[::-1]


def group_of(recording: Recording, replica: str, finish_reason: Any = None) -> RolloutGroup:
    """Returns the session as a group of one: its newest row, and the others as branches."""
    *others, (leaf, _, own) = recording.rows()
    root = own[0]
    found = _row(own).rollout(
        leaf.rollout.text, finish_reason or leaf.rollout.finish_reason, _said(recording, own)
    )
    branches = tuple(_branch(recording, *each) for each in others)
    return RolloutGroup(
        prompt_token_ids=root.given,
        rollouts=(found.model_copy(update={"branches": branches}),),
        replica=replica,
    )


def _said(recording: Recording, own: Sequence[Turn]) -> list[Message]:
    """Returns the messages of the newest row after the session's first prompt; after its own, if it
    begins otherwise. Of texts and tokens only the answers are messages."""
    leaf, first = own[-1], recording.turns[0].asked.messages
    messages = leaf.asked.messages
    if not messages:
        return [turn.message for turn in own]
    num_prompt = _num_same(first, messages)
    if num_prompt < len(first):
        num_prompt = len(own[0].asked.messages)
    return [*messages[num_prompt:], leaf.message]


def _branch(
    recording: Recording, leaf: Turn, shared: Sequence[Turn], own: Sequence[Turn]
) -> Branch:
    before = shared[-1].token_ids if shared else []
    later = recording.turns[recording.turns.index(leaf) + 1 :]
    because = next((turn.because for turn in later if turn.because), "")
    return branch(TokenIds([*before, *own[0].given]), _row(own), because)


def branch(prompt_token_ids: TokenIds, row: TokenRow, because: str) -> Branch:
    """Returns a row as a branch."""
    columns = row.rollout("", "stop", ()).model_dump(include=set(Branch.model_fields))
    return Branch(**{**columns, "prompt_token_ids": prompt_token_ids, "because": because})


def _row(own: Sequence[Turn]) -> TokenRow:
    """Returns what follows the prompt before the first of these turns."""
    row = TokenRow()
    for number, turn in enumerate(own):
        row.add_given(turn.given if number else ())
        row.add(turn.rollout)
    return row


def _has_messages(turn: Turn, asked: Asked, at: int) -> int | None:
    """Returns how many of the request's messages are the turn's, if they are the first, and more
    follow. `at` of them are known to be."""
    end = turn.num_messages
    if end >= len(asked.messages) or not turn.asked.messages or _other_template(turn.asked, asked):
        return None
    ours = (*turn.asked.messages[at:], turn.message)
    return end if _num_same(ours, asked.messages[at:]) == len(ours) else None


def _has_tokens(turn: Turn, asked: Asked, at: int) -> int | None:
    """Returns how many of the request's token ids are the turn's, if they are the first."""
    ours = (*turn.given, *turn.rollout.token_ids)
    assert asked.token_ids is not None
    end = at + len(ours)
    return end if end < len(asked.token_ids) and asked.token_ids[at:end] == ours else None


def _other_template(one: Asked, other: Asked) -> str:
    if one.tools != other.tools:
        return "the tools"
    return "the template arguments" if one.template_args != other.template_args else ""


def _num_same(ours: Sequence[Message], theirs: Sequence[Message]) -> int:
    """Returns with how many of the same messages both begin."""
    pairs = zip(ours, theirs, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if _compared(one) != _compared(other)),
        min(len(ours), len(theirs)),
    )


def _compared(message: Message) -> dict[str, Any]:
    """Returns the fields to compare in one form, however a client writes them: nothing is None, ""
    or left out; text may be in a list of parts; arguments of calls are JSON, spaced and ordered at
    will."""
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
