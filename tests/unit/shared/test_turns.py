"""Who is next where only so many can be served at a time. Expected orders are worked out by hand
from the seconds that each has used when a turn ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.turns import Turn, Turns


class Served:
    """Turns by a clock that only `end` moves, and who got them, in order."""

    def __init__(self, count: int = 1, most_of_one: int | None = None) -> None:
        self.now = 0.0
        self.turns = Turns(count, most_of_one=most_of_one, clock=lambda: self.now)
        self.order = ""
        self.running: list[Turn] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, names: Sequence[str], *above: str) -> None:
        """Asks for a turn of each of the names, below the names `above`."""
        for name in names:
            self.tasks.append(asyncio.create_task(self._take((*above, name), name)))
        await settle()

    async def _take(self, path: tuple[str, ...], name: str) -> None:
        self.running.append(await self.turns.take(path))
        self.order += name

    async def end(self, *seconds: float) -> None:
        """Ends the oldest turn that runs after so many seconds, for each of them."""
        for each in seconds:
            self.now += each
            self.running.pop(0).end()
            await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_asks_often_waits_for_who_has_used_less() -> None:
    served = Served()
    await served.ask("AAAB")
    await served.end(1, 1, 1)
    assert served.order == "ABAA", "B has used 0 s when A has used 1"


async def test_a_second_of_one_is_worth_a_second_of_another_however_it_is_cut() -> None:
    served = Served()
    await served.ask("AAABBBBBB")
    # A 3 s: B 1, 2, 3 and 3.5, each after A's 3; then A, and B again until it has used 6.
    await served.end(3, 1, 1, 1.5, 3, 1, 1, 1)
    assert served.order == "ABBBABBBA"


async def test_who_comes_later_owes_nothing_and_is_owed_nothing() -> None:
    served = Served()
    await served.ask("AAAA")
    await served.end(1, 1)
    await served.ask("BBB")  # starts with A's 2 s, of which A's present turn makes 3
    await served.end(1, 1, 1, 1, 1)
    assert served.order == "AAABABB", "B begins at 2 s, not at 0: then it would have all its turns"


async def test_a_group_has_turns_whatever_the_number_of_its_completions() -> None:
    served = Served()
    await served.ask("abcd", "job", "big")
    await served.ask("y", "job", "small")
    await served.ask("z", "other")
    await served.end(1, 1, 1, 1, 1)
    assert served.order == "azybcd", "first the other job, then the other group"


async def test_a_completion_that_has_run_waits_for_those_that_have_not() -> None:
    served = Served()
    await served.ask("aabb", "job", "group")
    await served.end(1, 1)
    await served.ask("c", "job", "group")
    await served.end(1, 1)
    assert served.order == "abacb", "a new one has used 0 s, and b 1"


async def test_one_place_is_kept_from_a_caller_that_has_all_others() -> None:
    served = Served(3, most_of_one=2)
    await served.ask("A" * 50)
    assert served.order == "AA" and served.turns.num_waiting == 48
    await served.ask("BB")
    assert served.order == "AAB", "it waits for none of the 50"
    await served.end(1)
    assert served.order == "AABB", "B is at 1 s, and A at 2"


async def test_turns_that_are_no_longer_wanted_are_given_to_others() -> None:
    served = Served()
    await served.ask("ABBCD")
    served.tasks[1].cancel()
    await settle()
    assert served.turns.num_waiting == 3
    await served.end(1)
    assert served.order == "AB", "the second of B"
    served.running.pop().end()
    served.tasks[3].cancel()  # it has just been given the turn
    await settle()
    assert served.order == "ABD" and served.tasks[3].cancelled()
    await served.end(1)
    await served.ask("E")
    assert served.order == "ABDE" and served.turns.num_waiting == 0


async def test_an_ended_turn_tells_its_seconds() -> None:
    served = Served()
    await served.ask("A")
    served.now = 2.5
    with served.running[0]:
        served.now = 4.0
    assert (await served.turns.take(("B",))).end() == 0.0
    await served.ask("C")
    served.now += 3.0
    assert served.running[1].end() == 3.0
