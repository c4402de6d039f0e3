"""Episodes of a job's own environments through the real client, in process, with the real sandbox:
classes and tools as TRL takes them, what is whose fault, and that nothing happens twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.reward.app import create_service
from services.reward.job_code import episodes, workers
from services.reward.job_code.inside_play import Players
from shared.errors import BadRequest, Busy, Conflict
from shared.http.client import Client
from shared.http.service import Service
from shared.job import EnvironmentSpec, RewardSpec
from shared.settings import Settings
from shared.wire import (
    CloseEpisode,
    EnvironmentValidated,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    OpenEpisode,
    Part,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    StepEpisode,
    ToolCall,
    ToolResult,
    Validated,
    ValidateEnvironment,
    ValidateRequest,
)
from tests.support.in_process import in_process
from tests.support.reward_helpers import processes_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncGenerator[Service]:
    service = create_service(Settings(sandbox_slots=1))
    async with service.app.router.lifespan_context(service.app):
        yield service
    assert processes_of(os.getpid()) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(service: Service) -> AsyncGenerator[Client]:
    async with connected(service) as client:
        yield client


def connected(service: Service) -> Client:
    return Client("reward", "http://localhost", transport=httpx2.ASGITransport(service.app))


def env(source: str, name: Any = "Game", **spec: Any) -> EnvironmentSpec:
    return EnvironmentSpec(file="game.py", source=source, name=name, **spec)


def tools(source: str, *names: str, **spec: Any) -> EnvironmentSpec:
    return EnvironmentSpec(source=source, kind="tools", tools=names, **spec)


class Episode:
    """One episode as the orchestrator sees it."""

    def __init__(self, client: Client, spec: EnvironmentSpec, id: str, job_id: str = "job") -> None:
        self._client = client
        self.of = {"job_id": job_id, "environment": spec, "id": id}
        self.turn = 0

    async def open(self, **row: Any) -> EpisodeOpened:
        body = OpenEpisode(**self.of, row=row)
        return await self._client.call("POST", "/episodes/open", body, EpisodeOpened, deadline_s=60)

    async def calls(self, turn: int, *calls: tuple[str, Any]) -> EpisodeStepped:
        told = tuple(
            ToolCall(id=f"call{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(calls)
        )
        body = StepEpisode(**self.of, turn=turn, calls=told)
        return await self._client.call(
            "POST", "/episodes/step", body, EpisodeStepped, deadline_s=60
        )

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        self.turn += 1
        (result,) = (await self.calls(self.turn - 1, (name, arguments))).results
        return result

    async def close(self, *, rewarded: bool = True) -> EpisodeClosed:
        body = CloseEpisode(**self.of, rewarded=rewarded)
        return await self._client.call(
            "POST", "/episodes/close", body, EpisodeClosed, deadline_s=60
        )


async def validate(client: Client, spec: EnvironmentSpec, **row: Any) -> EnvironmentValidated:
    body = ValidateEnvironment(environment=spec, row=row)
    return await client.call(
        "POST", "/episodes/validate", body, EnvironmentValidated, deadline_s=60
    )


GUESS = '''
class Game:
    """Guess a number."""

    def reset(self, *, secret, **row):
        self.secret, self.tries, self.done = secret, 0, False
        return f"Say a number. {sorted(row)}"

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        self.tries += 1
        self.done = number == self.secret
        return "right" if self.done else "higher" if number < self.secret else "lower"

    def get_reward(self):
        return 1 / self.tries if self.done else None

    def _hidden(self): ...
'''


async def test_a_game_of_eight_turns_has_its_own_reward(client: Client) -> None:
    episode = Episode(client, env(GUESS), "eight turns")
    opened = await episode.open(secret=37, prompt="?", level=2)
    assert opened.observation == "Say a number. ['level', 'prompt']"
    (tool,) = opened.tools
    assert tool["function"]["name"] == "guess"
    assert tool["function"]["parameters"]["required"] == ["number"]
    heard: list[str] = []
    for turn, number in enumerate([0, 64, 32, 48, 40, 36, 38, 37]):
        stepped = await episode.calls(turn, ("guess", {"number": number}))
        heard.append(stepped.results[0].content)
        assert stepped.done == (turn == 7)
    assert heard == [*("higher", "lower", "higher", "lower", "lower", "higher", "lower", "right")]
    assert await episode.close() == EpisodeClosed(has_reward=True, reward=1 / 8)


async def test_the_game_of_the_page_can_be_played(client: Client) -> None:
    root = Path(__file__).parents[2]
    source = (root / "deploy/jobs/guess.py").read_text()
    assert f"```python\n{source}```" in (root / "docs/environments.md").read_text()
    episode = Episode(client, env(source), "page")
    assert (await episode.open(secret=3)).observation == " It is from 0 to 31."
    said = [(await episode.call("guess", number=number)).content for number in (1, 3)]
    assert said == ["higher", "correct"]
    assert (await episode.close()).reward == 1.0


async def test_a_request_that_comes_again_happens_once(client: Client) -> None:
    episode = Episode(client, env(GUESS), "again")
    assert await episode.open(secret=5) == await episode.open(secret=5)
    with pytest.raises(Conflict) as another:
        await episode.open(secret=6)
    assert another.value.code == "body_differs"
    first = await episode.calls(0, ("guess", {"number": 3}))
    assert await episode.calls(0, ("guess", {"number": 3})) == first
    with pytest.raises(Conflict) as differs:
        await episode.calls(0, ("guess", {"number": 4}))
    assert differs.value.code == "body_differs"
    with pytest.raises(Conflict, match="got turn 2 of episode 'again', expected 1") as early:
        await episode.calls(2, ("guess", {"number": 3}))
    assert early.value.code == "out_of_order"
    at_once = [episode.calls(1, ("guess", {"number": 5})) for _ in range(3)]
    assert [stepped.done for stepped in await asyncio.gather(*at_once)] == [True] * 3
    assert [(await episode.close()).reward for _ in range(2)] == [0.5, 0.5], "two guesses"
    assert (await episode.calls(1, ("guess", {"number": 5}))).done
    with pytest.raises(Conflict, match="it was closed"):
        await episode.calls(2, ("guess", {"number": 5}))


ASYNC = '''
import asyncio

class Game:
    async def reset(self):
        self.lock = asyncio.Lock()   # belongs to the loop that all of the episode has
        await self.lock.acquire()

    @property
    def done(self):
        return not self.lock.locked()

    async def release(self, wait_s: float = 0.0) -> dict:
        """Releases.

        Args:
            wait_s: Seconds before.
        """
        waiting = asyncio.create_task(self.lock.acquire())
        await asyncio.sleep(wait_s)
        self.lock.release()
        await waiting
        self.lock.release()
        return {"released": [True, None], "é": 1.5}

    async def get_reward(self):
        return 3
'''


async def test_an_async_environment_has_one_event_loop(client: Client) -> None:
    episode = Episode(client, env(ASYNC), "async")
    assert (await episode.open(unused=1)).observation is None
    assert not (await episode.calls(0)).done
    stepped = await episode.calls(1, ("release", {"wait_s": 0.01}))
    assert stepped.results[0].content == '{"released": [true, null], "é": 1.5}'
    assert stepped.done
    assert await episode.close() == EpisodeClosed(has_reward=True, reward=3.0)


TOOLS = '''
def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: One
        b: Another
    """
    return a + b

async def shout(text: str) -> str:
    """Shouts.

    Args:
        text: What
    """
    print("no one reads this")
    return text.upper()

def fail():
    """Fails."""
    raise LookupError("no such page")

def leave():
    """Leaves."""
    raise SystemExit(3)

def much() -> str:
    """Returns much."""
    return "x" * 40_000
'''


async def test_plain_functions_are_tools_sync_or_async(client: Client) -> None:
    episode = Episode(client, tools(TOOLS, "shout", "add"), "tools")
    opened = await episode.open()
    assert [tool["function"]["name"] for tool in opened.tools] == ["shout", "add"]
    stepped = await episode.calls(0, ("add", '{"a": 2}'), ("shout", {"text": "hi"}))
    assert stepped.results == (
        ToolResult(id="call0", content="3"),
        ToolResult(id="call1", content="HI"),
    )
    assert not stepped.done
    assert await episode.close() == EpisodeClosed()


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("fail", {}, "LookupError: no such page"),
        ("leave", "", "SystemExit: 3"),
        ("much", {}, None),
        ("shout", {}, "There is no tool 'shout'; the tools are: add, fail, leave, much."),
        ("add", "{a: 1}", "The arguments of add are not JSON: Expecting property name"),
        ("add", "[1]", "The arguments of add are '[1]' (list), expected a JSON object."),
        ("add", {}, "The arguments of add do not fit: missing a required argument: 'a'; it takes"),
        ("add", {"a": 1, "c": 2}, "do not fit: got an unexpected keyword argument 'c'; it takes a"),
        ("add", {"a": "x"}, 'TypeError: can only concatenate str (not "int") to str'),
    ],
)
async def test_a_call_that_fails_is_told_to_the_model(
    client: Client, name: str, arguments: Any, says: str | None
) -> None:
    spec = tools(TOOLS, "add", "fail", "leave", "much")
    episode = Episode(client, spec, f"failing {name} {arguments}")
    await episode.open()
    result, after = (await episode.calls(0, (name, arguments), ("add", {"a": 1}))).results
    assert (after.content, after.failed) == ("2", False)
    if says is None:
        assert not result.failed
        assert result.content == "x" * 32_768 + "... [cut off after 32768 of 40000 characters]"
    else:
        assert result.failed
        assert says in result.content
    await episode.close(rewarded=False)


ISOLATED = '''
import os, random
import numpy.random
SEEN = []

class Game:
    wins = 0

    def reset(self):
        self.begun = [random.random(), numpy.random.random()]

    def play(self, path: str) -> list:
        """Leaves something everywhere.

        Args:
            path: A file
        """
        before = [list(SEEN), Game.wins, os.listdir(".")]
        SEEN.append(1)
        Game.wins += 1
        open(path, "w").close()
        return before

    def numbers(self) -> list:
        """Returns random numbers."""
        return self.begun
'''


async def test_what_one_episode_leaves_another_does_not_see(client: Client) -> None:
    first, second = (Episode(client, env(ISOLATED), f"isolated {name}") for name in "ab")
    await asyncio.gather(first.open(), second.open())
    assert (await first.call("play", path="mine")).content == "[[], 0, []]"
    assert (await first.call("play", path="mine")).content == '[[1], 1, ["mine"]]'
    assert (await second.call("play", path="mine")).content == "[[], 0, []]"
    told = [json.loads((await episode.call("numbers")).content) for episode in (first, second)]
    assert len({*told[0], *told[1]}) == 4, "the same random numbers in each"
    await asyncio.gather(first.close(), second.close())


MEETING = '''
import os, time

class Game:
    def reset(self):
        os.makedirs("/tmp/meeting", exist_ok=True)

    def meet(self, number: int, of: int) -> int:
        """Waits until all are here.

        Args:
            number: Who
            of: How many
        """
        open(f"/tmp/meeting/{number}", "w").close()
        while len(os.listdir("/tmp/meeting")) < of:
            time.sleep(0.05)
        return number
'''


async def test_32_episodes_of_one_worker_run_at_the_same_time(
    service: Service, client: Client
) -> None:
    playing = [Episode(client, env(MEETING), f"meeting {number}") for number in range(32)]
    await asyncio.gather(*(episode.open() for episode in playing))
    assert "hone_reward_open_episodes 32.0" in await metrics(service)
    met = await asyncio.gather(
        *(episode.call("meet", number=n, of=32) for n, episode in enumerate(playing))
    )
    assert [result.content for result in met] == [str(number) for number in range(32)], (
        "one after the other, none returns"
    )
    await asyncio.gather(*(episode.close() for episode in playing))
    async with asyncio.timeout(20):
        while "hone_reward_open_episodes 0.0" not in await metrics(service):
            await asyncio.sleep(0.02)


async def metrics(service: Service) -> str:
    async with in_process(service.app) as http:
        return (await http.get("/metrics")).text


LOSING = '''
import ctypes, os, time

class Game:
    def reset(self, how=""):
        self.how = how
        if how == "raises":
            raise ValueError("no secret in this row")
        if how == "returns":
            return 5
        if how == "ends":
            os._exit(3)
        if how == "sleeps":
            time.sleep(60)

    def act(self, how: str) -> str:
        """Acts.

        Args:
            how: What happens
        """
        if how == "sleeps":
            time.sleep(60)
        if how == "ends":
            os._exit(7)
        if how == "crashes":
            ctypes.string_at(0)
        if how == "stops its worker":
            os.kill(os.getppid(), 19)
            time.sleep(60)
        if how == "sends":
            for fd in range(3, 64):
                try:
                    os.write(fd, b"\\x7f" * 8)
                except OSError:
                    pass
        return "acted"

    def get_reward(self):
        if self.how == "nan":
            return float("nan")
        raise ArithmeticError("none")
'''


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "game.py line 8: ValueError: no secret in this row"),
        ("returns", r"reset returned '5' \(int\), expected text or None"),
        ("ends", "its process ended with code 3"),
        ("sleeps", "open was not done within 0.3 s"),
    ],
)
async def test_a_reset_that_fails_loses_one_episode(client: Client, how: str, says: str) -> None:
    spec = env(LOSING, boot_s=0.3 if how == "sleeps" else 30.0)
    episode = Episode(client, spec, f"losing {how}")
    await lost(episode.open(how=how), says)
    await lost(episode.calls(0, ("act", {"how": ""})), says)
    await lost(episode.close(), says)
    assert (await episode.close(rewarded=False)) == EpisodeClosed()
    assert (await Episode(client, spec, f"beside {how}").open()).observation is None


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("sleeps", "turn 1 was not done within 0.5 s"),
        ("ends", "its process ended with code 7"),
        ("crashes", "its process was killed by signal 11"),
        ("sends", "more than 8388608 bytes"),
    ],
)
async def test_a_step_that_fails_loses_one_episode(client: Client, how: str, says: str) -> None:
    spec = env(LOSING, step_s=0.5 if how == "sleeps" else 30.0)
    episode, other = (Episode(client, spec, f"{name} {how}") for name in ("stepping", "other"))
    await asyncio.gather(episode.open(), other.open())
    assert (await episode.call("act", how="")).content == "acted"
    await lost(episode.call("act", how=how), says)
    await lost(episode.calls(1, ("act", {"how": how})), says)
    await lost(episode.close(), says)
    assert (await other.call("act", how="")).content == "acted", "the other continues"
    again = Episode(client, spec, f"stepping {how}")
    assert (await again.open()).observation is None, "its id can be used again"
    await again.close(rewarded=False)
    await other.close(rewarded=False)


async def lost(request: Any, says: str) -> None:
    with pytest.raises(Conflict, match=says) as error:
        await request
    assert error.value.code == "episode_lost"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("", "game.py line 42: ArithmeticError: none"),
        ("nan", "get_reward returned nan, expected a finite number"),
    ],
)
async def test_a_reward_that_fails_loses_the_episode(client: Client, how: str, says: str) -> None:
    episode = Episode(client, env(LOSING), f"unrewarded {how}")
    await episode.open(how=how)
    await lost(episode.close(), says)


async def opened_at_last(episode: Episode, **row: Any) -> None:
    """Opens the episode. A worker whose end has not been noticed yet loses it first."""
    async with asyncio.timeout(60):
        while True:
            try:
                await episode.open(**row)
                return
            except Conflict as error:
                assert error.code == "episode_lost"


async def test_a_killed_worker_loses_its_episodes_and_is_replaced(client: Client) -> None:
    before = set(processes_of(os.getpid()))
    spec = env(GUESS)
    playing = [Episode(client, spec, f"killed {number}", job_id="other") for number in range(2)]
    await asyncio.gather(*(episode.open(secret=1) for episode in playing))
    for pid in set(processes_of(os.getpid())) - before:
        with contextlib.suppress(ProcessLookupError):  # the first takes the others with it
            os.kill(pid, signal.SIGKILL)
    for episode in playing:
        await lost(episode.call("guess", number=1), "its worker|environment ended")
    again = Episode(client, spec, "killed 0", job_id="other")
    await opened_at_last(again, secret=1)
    assert (await again.call("guess", number=1)).content == "right"
    await again.close()


async def test_a_worker_that_stops_answering_is_ended(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_DEADLINE_S", 0.2)
    spec = env(LOSING, step_s=0.5)
    stopper, other = (Episode(client, spec, name, "stopped") for name in ("stopper", "other"))
    await asyncio.gather(stopper.open(), other.open())
    await lost(stopper.call("act", how="stops its worker"), "not done within 0.5 s")
    again = Episode(client, spec, "again", "stopped")
    await opened_at_last(again)
    assert (await again.call("act", how="")).content == "acted"


async def test_after_a_restart_episodes_are_lost(service: Service, client: Client) -> None:
    unknown = Episode(client, env(GUESS), "of a service before")
    await lost(unknown.call("guess", number=1), "is not known here: it was never opened")
    await lost(unknown.close(), "or the service was restarted since")
    assert await unknown.close(rewarded=False) == EpisodeClosed()


TABLE = '''
class Maze:
    def reset(self, **row):
        return f"maze {row}"

class Quiz:
    def reset(self, **row):
        return f"quiz {row}"

    def answer(self, text: str) -> str:
        """Answers.

        Args:
            text: The answer
        """
        return text

    def done(self) -> bool:
        """A tool, although it is called like this."""
        return True

    def get_reward(self) -> float:
        return 1.0
'''


async def test_a_row_picks_its_class_from_a_table(client: Client) -> None:
    spec = env(TABLE, name={"maze": "Maze", "quiz": "Quiz"})
    maze, quiz = (Episode(client, spec, f"table {name}") for name in ("maze", "quiz"))
    opened = await maze.open(environment="maze", level=1)
    assert (opened.observation, opened.tools) == ("maze {'level': 1}", ())
    assert await maze.close() == EpisodeClosed()
    opened = await quiz.open(environment="quiz", level=1)
    assert opened.observation == "quiz {'level': 1}"
    assert [tool["function"]["name"] for tool in opened.tools] == ["answer", "done"]
    assert not (await quiz.calls(0, ("done", {}))).done
    assert await quiz.close() == EpisodeClosed(has_reward=True, reward=1.0)
    assert not (await validate(client, spec, environment="maze")).has_reward
    with pytest.raises(BadRequest, match=r"'environment' is 'chess'; expected one of 'maze', 'qu"):
        await Episode(client, spec, "table chess").open(environment="chess")


async def test_validation_opens_and_leaves_nothing(client: Client) -> None:
    before = processes_of(os.getpid())
    told = await validate(client, env(GUESS), secret=3)
    assert told.observation == "Say a number. []"
    assert told.tools[0]["function"]["name"] == "guess"
    assert told.has_reward
    assert processes_of(os.getpid()) == before


DOCUMENTED = '        """Does.\n\n        Args:\n            a: A\n        """\n'


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        ("x = 1\nclass Game(:\n", "Game", "game.py line 2: SyntaxError: invalid syntax"),
        ("import nowhere", "Game", "game.py line 1: ModuleNotFoundError: No module named 'nowhere"),
        ("class Gama:\n    pass", "Game", "game.py defines no class 'Game'; it defines Gama"),
        ("def Game():\n    pass", "Game", "'Game' in game.py is .*, expected a class"),
        ("\nclass Game:\n    pass", "Game", "game.py line 2: class 'Game' has no method reset"),
        (
            "class Game:\n    def reset(self): ...\n    def act(self): ...",
            "Game",
            "game.py line 3: act has no docstring",
        ),
        (
            "class Game:\n    def reset(self): ...\n    def act(self, a):\n" + DOCUMENTED,
            "Game",
            "game.py line 3: argument 'a' of act has no type hint",
        ),
        (
            "class Game:\n    def reset(self): ...\n    def act(self, a: int, b: int):\n"
            + DOCUMENTED,
            "Game",
            "game.py line 3: the docstring of act does not describe its argument 'b'",
        ),
        (
            "class Game:\n    def reset(self): ...\nclass Other: ...",
            {"a": "Game", "b": "Other"},
            "game.py line 3: class 'Other' has no method reset",
        ),
        (
            "class Game:\n    def __init__(self, size): ...\n    def reset(self): ...",
            "Game",
            r"TypeError: Game.__init__\(\) missing 1 required positional argument: 'size'",
        ),
        (
            "class Game:\n    def reset(self, answer):\n        return answer['nr']",
            "Game",
            r"TypeError: Game.reset\(\) missing 1 required positional argument: 'answer'",
        ),
        (
            "class Game:\n    def reset(self, **row):\n        return row['answer']",
            "Game",
            "game.py line 3: KeyError: 'answer'",
        ),
        (
            "import time\nclass Game:\n    def reset(self):\n        time.sleep(60)",
            "Game",
            r"the environment was not made and reset within 1 s \(boot_s\)",
        ),
    ],
)
async def test_a_mistake_of_the_file_is_found_at_validation(
    client: Client, source: str, name: Any, says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        spec = env(source, name=name, boot_s=1.0 if "sleep" in source else 30.0)
        await validate(client, spec, environment="a")


async def test_an_operator_may_allow_no_code_of_jobs() -> None:
    service = create_service(Settings(sandbox_slots=1, allow_job_code=False))
    async with service.app.router.lifespan_context(service.app), connected(service) as client:
        for refused in (validate(client, env(GUESS)), Episode(client, env(GUESS), "1").open()):
            with pytest.raises(BadRequest, match="HONE_ALLOW_JOB_CODE=false"):
                await refused


async def test_without_the_text_of_its_file_nothing_is_run(client: Client) -> None:
    with pytest.raises(BadRequest, match=r"text of 'game.py' must be sent along as 'source'"):
        await validate(client, EnvironmentSpec(file="game.py", name="Game"))


async def test_one_episode_too_many_has_to_wait(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "MAX_EPISODES", 1)
    first, second = (Episode(client, env(GUESS), f"many {n}", "many") for n in range(2))
    await first.open(secret=1)
    body = OpenEpisode(**second.of, row={"secret": 1})
    with pytest.raises(Busy, match="the job has 1 open episodes"):
        await client.call("POST", "/episodes/open", body, EpisodeOpened, deadline_s=0.5)
    await first.close()
    assert (await second.open(secret=1)).observation
    await second.close()


async def test_a_step_of_an_ended_episode_starts_no_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        players = Players(theirs.fileno())
        players.take({"call": "ended", "ask": {"step": []}})
        assert players.poller.poll(200) == []  # no child answers
        with pytest.raises(BlockingIOError):
            ours.recv(1)


async def test_an_episode_that_no_one_steps_is_ended(client: Client) -> None:
    episode = Episode(client, env(GUESS, episode_s=0.3), "idle", "idle")
    await episode.open(secret=1)
    await asyncio.sleep(0.5)
    await lost(episode.call("guess", number=1), "no request came for 0.3 s")


async def test_closing_ends_a_step_under_way(client: Client) -> None:
    episode = Episode(client, env(LOSING), "hurry", "hurry")
    await episode.open()
    stepping = asyncio.create_task(episode.call("act", how="sleeps"))
    await asyncio.sleep(0.2)
    await episode.close(rewarded=False)
    await lost(stepping, "it was ended|it was closed")


KEPT = """
class Game:
    def __init__(self):
        self.board, self._secret, self.lock = {"moves": [1, 2]}, 7, object()

    def reset(self): ...

    @property
    def score(self):
        return 2 * len(self.board["moves"])

    @property
    def broken(self):
        raise OSError("no")
"""

READS = """
def fewest(completions, environments):
    return [env.score + env.board["moves"][0] for env in environments]

def locks(completions, environments):
    return [env.lock for env in environments]
"""


async def test_a_reward_function_reads_what_an_environment_was_at_the_end(client: Client) -> None:
    episode = Episode(client, env(KEPT), "kept")
    await episode.open()
    body = CloseEpisode(**episode.of, attributes=True)
    closed = await client.call("POST", "/episodes/close", body, EpisodeClosed, deadline_s=30)
    assert closed.attributes == {"board": {"moves": [1, 2]}, "score": 4}
    item = ScoreItem(
        prompt="p",
        completion="c",
        finish_reason="stop",
        num_tokens=1,
        row={},
        info={"environment": closed.attributes},
    )

    async def scored(function: str, item: ScoreItem) -> Part:
        spec = RewardSpec(grader="function", source=READS, file="r.py", function=function)
        asked = ScoreRequest(items=(item,), rewards=(spec,))
        found = await client.call("POST", "/score", asked, ScoreResult, deadline_s=60)
        return found.scores[0].parts[function]

    assert (await scored("fewest", item)).value == 5
    refused = await scored("locks", item)
    assert refused.value is None and "'lock' is not plain data" in refused.detail
    assert "gets: board, score" in refused.detail
    with pytest.raises(BadRequest, match='only a job with an environment of kind "class"'):
        await scored("fewest", item.model_copy(update={"info": {}}))
    spec = RewardSpec(grader="function", source=READS, file="r.py", function="fewest")
    asked = ValidateRequest(rewards=(spec,), columns=("environments",))
    await client.call("POST", "/graders/validate", asked, Validated, deadline_s=60)
