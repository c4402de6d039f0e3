"""The queue of pushed groups as files: what is left after a crash at any place."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.orchestrator.extensions.pushed.queue import (
    Ledger,
    PushedQueue,
)
from services.orchestrator.seams import Round
from services.orchestrator.store.folder import forget_pushed
from shared.errors import Failed
from shared.wire import Prompt, Rollout, RolloutGroup, Score, ScoredGroup, Span, TokenIds


def scored(version: int | None = None) -> ScoredGroup:
    spans = () if version is None else (Span(version=version, start=0),)
    rollout = Rollout(text="", token_ids=TokenIds([3]), finish_reason="stop", spans=spans)
    return ScoredGroup(
        prompt=Prompt(index=0, content="p", row={}),
        group=RolloutGroup(prompt_token_ids=TokenIds([1]), rollouts=(rollout,)),
        scores=(Score(value=1.0, parts={}),),
    )


def accept(queue: PushedQueue, key: str, version: int | None = None) -> int:
    return queue.accept(scored(version), lambda _: None, digest="digest", key=key, last_step=0)


def ahead(queue: PushedQueue, last_step: int) -> int:
    return queue.look(lambda ledger: ledger.num_ahead(last_step))


def test_a_step_that_is_done_again_takes_the_same_groups(tmp_path: Path) -> None:
    queue = PushedQueue(tmp_path)
    assert [accept(queue, key) for key in "abcd"] == [1, 2, 3, 4]
    assert queue.take(Round(1, 0, 2, 0, 0)) == ([1, 2], True)
    after_crash = PushedQueue(tmp_path)
    assert after_crash.take(Round(1, 0, 2, 0, 0)) == ([1, 2], True)
    assert after_crash.take(Round(2, 0, 2, 0, 1)) == ([3, 4], True)
    assert after_crash.take(Round(3, 0, 2, 0, 2)) == ([], False)
    assert after_crash.group(2).prompt.index == 2


def test_a_line_that_a_crash_cut_short_was_not_accepted(tmp_path: Path) -> None:
    accept(PushedQueue(tmp_path), "a")
    journal = tmp_path / "pushed" / "journal.jsonl"
    whole = journal.read_bytes()
    for cut in (b'{"accepted": 2, "key": "b"', b"\0\0\0"):
        journal.write_bytes(whole + cut)
        queue = PushedQueue(tmp_path)
        assert queue.look(lambda ledger: ledger.num_accepted) == 1
        assert accept(queue, "b") == 2 and accept(queue, "a") == 1
        assert PushedQueue(tmp_path).take(Round(1, 0, 3, 0, 0)) == ([1, 2], False)
        journal.write_bytes(whole)


def test_stale_groups_are_dropped_and_make_room(tmp_path: Path) -> None:
    queue = PushedQueue(tmp_path)
    for key, version in (("a", 0), ("b", 2), ("c", None), ("d", 1)):
        accept(queue, key, version)
    assert queue.take(Round(3, 0, 3, 1, 2)) == ([2, 3, 4], True)
    assert queue.look(lambda ledger: (ledger.num_dropped, ledger.num_trained(3))) == (1, 3)
    assert ahead(queue, 2) == 3 and ahead(queue, 3) == 0
    assert not (tmp_path / "pushed" / "000001.msgpack").exists()


def test_groups_that_replace_others_have_room_beyond_the_limit(tmp_path: Path) -> None:
    queue = PushedQueue(tmp_path)
    accept(queue, "a")
    accept(queue, "b")
    queue.take(Round(1, 0, 2, 0, 0))
    assert ahead(queue, 0) == 2
    assert queue.take(Round(1, 1, 1, 0, 0)) == ([], False)  # one had no signal
    assert ahead(queue, 0) == 1
    accept(queue, "c")
    assert queue.take(Round(1, 1, 1, 0, 0)) == ([3], True)
    assert ahead(queue, 0) == 2 and ahead(queue, 1) == 0


def test_a_group_without_a_key_is_new_once_it_was_trained(tmp_path: Path) -> None:
    queue = PushedQueue(tmp_path)

    def again(last_step: int) -> int:
        return queue.accept(
            scored(), lambda _: None, digest="digest", key=None, last_step=last_step
        )

    assert [again(0), again(0)] == [1, 1]
    queue.take(Round(1, 0, 1, 0, 0))
    assert [again(0), again(1), again(1)] == [1, 2, 2]


def test_a_damaged_group_is_named(tmp_path: Path) -> None:
    queue = PushedQueue(tmp_path)
    accept(queue, "a")
    accept(queue, "b")
    path = tmp_path / "pushed" / "000001.msgpack"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Failed, match=r"000001\.msgpack' is damaged: its checksum is \w+, expected"):
        queue.group(1)
    forget_pushed(tmp_path, 1)
    assert [path.name for path in path.parent.glob("*.msgpack")] == ["000002.msgpack"]


def test_an_empty_ledger_has_nothing_ahead() -> None:
    assert Ledger().num_ahead(5) == 0 and Ledger().num_trained(5) == 0
