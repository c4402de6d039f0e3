"""The reward service through the real client, in process, with its real sandbox: success, each kind
of error, and twice is once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from services.reward.app import create_service
from shared.errors import BadRequest, Conflict, Failed
from shared.http.client import Client
from shared.job import RewardSpec
from shared.settings import Settings
from shared.wire import (
    ExecuteRequest,
    Execution,
    GraderErrors,
    GraderRun,
    GraderRunRequest,
    Prompt,
    Score,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    TriedRewards,
    TryRequest,
    Validated,
    ValidateRequest,
)
from tests.support.in_process import in_process

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app() -> AsyncGenerator[Any]:
    service = create_service(Settings(sandbox_slots=2))
    async with service.app.router.lifespan_context(service.app):
        yield service.app


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(app: Any) -> AsyncGenerator[Client]:
    async with Client(
        "reward", "http://localhost", binary=True, transport=httpx2.ASGITransport(app)
    ) as client:
        yield client


def items(*completions: str, prompt: Any = "?", **row: Any) -> tuple[ScoreItem, ...]:
    return tuple(ScoreItem(prompt=prompt, completion=text, row=row) for text in completions)


async def score(
    client: Client, items: tuple[ScoreItem, ...], *specs: RewardSpec, job_id: str | None = None
) -> tuple[Score, ...]:
    request = ScoreRequest(items=items, rewards=specs, job_id=job_id)
    return (await client.call("POST", "/score", request, ScoreResult, deadline_s=60)).scores


def own(source: str, **spec: Any) -> RewardSpec:
    return RewardSpec(source=source, **spec)


async def test_score_weighs_and_explains_the_parts(client: Client) -> None:
    countdown = RewardSpec(grader="python_value", params={"numbers": "nums"})
    brief = RewardSpec(grader="length", weight=0.25, params={"max": 3})
    right, wrong, cheat = await score(
        client, items("3*5", "3+5", "15", target=15, nums=[5, 3]), countdown, brief
    )
    assert [right.value, wrong.value, cheat.value] == [1.25, 0.25, 0.25]
    assert right.parts["python_value"].detail == "evaluated to 15"
    assert wrong.parts["python_value"].detail == "evaluated to 8, wanted 15"
    assert cheat.parts["python_value"].detail == "used [15], wanted [3, 5]"


async def test_score_runs_whole_programs(client: Client) -> None:
    program = "```python\ndef f(n):\n    return n * f(n - 1) if n else 1\nf(5)\n```"
    scores = await score(
        client,
        items(program, "import sys; sys.exit(0)", "x = 120", target=120),
        RewardSpec(grader="python_value"),
    )
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]
    assert (
        scores[2].parts["python_value"].detail
        == "ValueError: the program does not end in an expression"
    )


async def test_an_own_function_gets_completions_prompts_and_columns(client: Client) -> None:
    source = """
def reward(completions, prompts, answer, **kwargs):
    assert sorted(kwargs) == ["extra"]
    return [len(c) + len(p) + a for c, p, a in zip(completions, prompts, answer)]
"""
    scores = await score(
        client, items("ab", "abc", prompt="xyz", answer=10, extra=None), own(source)
    )
    assert [score.value for score in scores] == [15.0, 16.0]


async def test_an_own_function_may_be_async_use_numpy_and_abstain(client: Client) -> None:
    source = """
import asyncio
import numpy as np
async def graded(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [None, True, np.float32(0.5)]
"""
    scores = await score(client, items("a", "b", "c"), own(source, function="graded"))
    assert [score.value for score in scores] == [None, 1.0, 0.5]
    assert scores[0].parts["graded"].verdict == "skipped"


async def test_an_own_function_sees_messages_where_the_prompt_has_them(client: Client) -> None:
    source = (
        "def reward(completions, prompts):\n"
        "    return [len(c[0]['content']) * (c[0]['role'] == 'assistant') for c in "
        "completions]"
    )
    (scored,) = await score(
        client, items("abcd", prompt=({"role": "user", "content": "?"},)), own(source)
    )
    assert scored.value == 4.0


async def test_an_own_function_has_no_network_and_no_host(client: Client) -> None:
    source = """
import os, socket
def reward(completions, paths):
    seen = [path for path in paths[0] if os.path.exists(path)]
    try:
        socket.socket(); seen.append("network")
    except PermissionError: pass
    return [float(len(seen))]
"""
    paths = [
        "/proc/1",
        "/home",
        "/etc/shadow",
        "/run",
        str(Path(__file__).parents[2] / "pyproject.toml"),
    ]
    (scored,) = await score(client, items("a", paths=paths), own(source))
    assert scored.value == 0.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            own("def rewrd(completions): ..."),
            "reward.py defines no function or class 'reward'; it defines rewrd",
        ),
        (
            own("def reward(completions:"),
            "reward function 'reward' cannot be loaded: reward.py line 1: SyntaxError: ",
        ),
        (
            own("import helpers"),
            "reward.py line 1: ModuleNotFoundError: No module named 'helpers'; of your own files "
            "reward.py alone travels with the job. ",
        ),
        (
            own("from . import helpers"),
            "reward.py line 1: ImportError: attempted relative import with no known parent "
            "package; of your own files reward.py alone travels with the job. ",
        ),
        (
            own("def reward(completions, answr): ..."),
            "reward function 'reward' takes 'answr': no column 'answr'; columns are answer",
        ),
        (
            own("def reward(completion): ..."),
            "no column 'completion'; columns are answer; did you mean 'completions'?",
        ),
        (
            own("def reward(completions): ...", params={"timeout": 1}),
            "unknown key 'timeout'; did you mean 'timeout_s'?",
        ),
    ],
)
async def test_a_mistake_in_a_reward_is_a_bad_request_that_says_where(
    client: Client, spec: RewardSpec, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await score(client, items("a", "b", answer="a"), spec)
    assert message in caught.value.detail


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            own("\n\ndef reward(completions):\n    return completions[9]", file="a/mine.py"),
            "reward function 'reward' failed: mine.py line 4: IndexError: list index out of range",
        ),
        (
            own("def reward(completions):\n    return 1"),
            "reward function 'reward' failed: TypeError: it returned '1' (int), expected a list",
        ),
        (
            own("import os\ndef reward(completions):\n    os._exit(7)"),
            "reward function 'reward' ended its process twice: ",
        ),
    ],
)
async def test_an_own_function_that_fails_gives_no_reward_and_says_where(
    client: Client, spec: RewardSpec, message: str
) -> None:
    for scored in await score(client, items("a", "b", answer="a"), spec):
        part = scored.parts["reward"]
        assert (scored.value, part.value, part.verdict) == (None, None, "error")
        assert message in part.detail
        assert part.errors == ("python_grader_runtime_error",)


async def test_a_text_that_fails_a_function_costs_no_other_its_reward(client: Client) -> None:
    source = (
        "def reward(completions):\n    return [float(completion) - 3 for completion in completions]"
    )
    scores = await score(client, items("1", "seven", "5", "0.5", answer="a"), own(source))
    assert [scored.value for scored in scores] == [-2.0, -2.5, 2.0, -2.5]
    part = scores[1].parts["reward"]
    assert part.errors == ("python_grader_runtime_error",)
    assert "could not convert string to float: 'seven' (completion 1); it gets -2.5" in part.detail


async def test_a_bad_value_concerns_its_completion_alone(client: Client) -> None:
    source = (
        "def reward(completions):\n"
        "    return ['1', 2, float('nan'), (0.5, 'half'), (None, 'why'), (1, 2)]"
    )
    scores = await score(client, items(*"abcdef"), own(source))
    parts = [scored.parts["reward"] for scored in scores]
    assert [part.value for part in parts] == [0.0, 2.0, 0.0, 0.5, None, 0.0]
    assert [part.verdict for part in parts] == ["wrong", "ok", "wrong", "ok", "skipped", "wrong"]
    assert "it returned '1' (str) for completion 0, expected a number or None" in parts[0].detail
    assert "it returned nan for completion 2, expected a finite number" in parts[2].detail
    assert (parts[3].detail, parts[4].detail) == ("half", "why")
    assert (
        "it returned '(1, 2)' (tuple) for completion 5, expected a number, None, or (number, text)"
        in parts[5].detail
    )


async def test_validate_says_before_training_what_score_would_say(client: Client) -> None:
    good = ValidateRequest(
        rewards=(RewardSpec(grader="exact_match"), own("def reward(completions, answer): ...")),
        columns=("answer",),
    )
    validated = await client.call("POST", "/graders/validate", good, Validated, deadline_s=60)
    assert validated.rewards == ("exact_match", "reward")
    with pytest.raises(
        BadRequest,
        match="reward function 'reward' takes 'answer': no column 'answer'; columns are question",
    ):
        await client.call(
            "POST",
            "/graders/validate",
            ValidateRequest(rewards=good.rewards[1:], columns=("question",)),
            Validated,
            deadline_s=60,
        )


async def test_validate_names_the_row_that_nothing_could_be_graded_by(client: Client) -> None:
    prompts = tuple(
        Prompt(index=index, content="", row={"tests": tests})
        for index, tests in ((3, "assert f(1) == 1"), (5, "f(1)"))
    )
    request = ValidateRequest(
        rewards=(RewardSpec(grader="code_tests"),), columns=("tests",), prompts=prompts[:1]
    )
    for _ in range(2):
        await client.call("POST", "/graders/validate", request, Validated, deadline_s=60)
    with pytest.raises(
        BadRequest, match=r"reward 'code_tests', row 5 of the data: the tests assert nothing: 'f\(1"
    ):
        refused = request.model_copy(update={"prompts": prompts})
        await client.call("POST", "/graders/validate", refused, Validated, deadline_s=60)


async def run(client: Client, grader: dict[str, Any], sample: str, **item: Any) -> GraderRun:
    request = GraderRunRequest(grader=grader, model_sample=sample, item=item)
    return await client.call("POST", "/graders/run", request, GraderRun, deadline_s=60)


async def test_a_grader_run_has_openais_shape(client: Client) -> None:
    ran = await run(
        client, {"type": "exact_match", "name": "same", "column": "wanted"}, "42", wanted="42"
    )
    assert (ran.reward, ran.metadata.name, ran.metadata.type) == (1.0, "same", "exact_match")
    assert ran.metadata.errors == GraderErrors()
    document = ran.model_dump()
    assert {"reward", "sub_rewards", "model_grader_token_usage_per_model", "metadata"} == set(
        document
    )
    assert {"name", "type", "execution_time", "scores", "token_usage", "errors"} <= set(
        document["metadata"]
    )


async def test_a_grader_run_that_fails_raises_openais_flag(client: Client) -> None:
    ran = await run(client, {"type": "exact_match", "column": "wanted"}, "42", wanted=[1])
    assert (ran.reward, ran.metadata.errors) == (None, GraderErrors(invalid_variable_error=True))
    assert "expected text or a whole number" in ran.metadata.part.detail


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ({"type": "exactmatch"}, "no grader 'exactmatch'; did you mean 'exact_match'?"),
        ({}, "'grader.type' is None; expected the name of a grader"),
        (
            {"type": "function", "source": "x"},
            "'grader.type' is 'function'; expected the name of a grader",
        ),
    ],
)
async def test_a_grader_run_asked_wrongly_is_a_sentence(
    client: Client, grader: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        await run(client, grader, "x", answer="x")
    assert message in caught.value.detail


async def test_a_sum_of_rewards_is_finite(client: Client, app: Any) -> None:
    rewards = [{"grader": "length", "name": name, "weight": 1e308} for name in "ab"]
    body = {"items": [{"prompt": "", "completion": "x"}], "rewards": rewards}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as plain:
        answer = await plain.post("http://localhost/score", json=body)
    assert answer.status_code == 422
    assert "'rewards.0.weight': got 1e+308; input should be less" in answer.json()["detail"]
    source = "def reward(completions):\n    return [float(c) for c in completions]"
    large, small = await score(client, items("1e31", "1e30"), own(source, weight=1e6))
    assert (large.value, small.value) == (0.0, 1e36)
    assert "the value is 1e+31; expected one from -1e+30" in large.parts["reward"].detail


async def test_execute_runs_a_program_and_returns_its_value(client: Client) -> None:
    request = ExecuteRequest(
        code="print(input())", expression="x ** 2", inputs={"x": 12}, stdin="hi"
    )
    ended = await client.call("POST", "/execute", request, Execution, deadline_s=60)
    assert (ended.verdict, ended.value, ended.stdout) == ("ok", 144, "hi\n")


async def test_execute_twice_with_one_key_happens_once(client: Client) -> None:
    request = ExecuteRequest(code="import os", expression="os.urandom(8).hex()")
    key = f"once-{id(client)}"
    first, second = [
        await client.call("POST", "/execute", request, Execution, deadline_s=60, key=key)
        for _ in range(2)
    ]
    assert first == second
    assert (
        await client.call("POST", "/execute", request, Execution, deadline_s=60)
    ).value != first.value
    with pytest.raises(Conflict, match="already asked for with another body"):
        await client.call(
            "POST", "/execute", ExecuteRequest(code="1"), Execution, deadline_s=60, key=key
        )


async def test_a_bad_body_is_a_sentence(client: Client) -> None:
    with pytest.raises(
        BadRequest, match=r"'timeout_s': got 601\.0; input should be less than or equal to 600"
    ):
        await client.call(
            "POST",
            "/execute",
            ExecuteRequest.model_construct(timeout_s=601.0),
            Execution,
            deadline_s=60,
        )


async def test_ready_and_version_report_the_tier_reached(app: Any) -> None:
    async with in_process(app) as http:
        ready = await http.get("/readyz")
        sandbox = (await http.get("/version")).json()["sandbox"]
        metrics = (await http.get("/metrics")).text
    assert (ready.status_code, ready.json()["dependencies"]) == (
        200,
        {"sandbox": {"ok": True, "detail": "ready", "starting": False}},
    )
    assert (sandbox["tier"], sandbox["slots"]) == ("local", 2)
    assert len(sandbox["probes"]) >= 6
    assert set(sandbox["probes"].values()) == {"passed"}
    assert "hone_reward_completions " in metrics


async def test_unsafe_runs_programs_when_asked_for_by_name_and_says_so() -> None:
    service = create_service(Settings(sandbox="unsafe", sandbox_slots=1))
    async with (
        service.app.router.lifespan_context(service.app),
        Client("reward", "http://localhost", transport=httpx2.ASGITransport(service.app)) as client,
    ):
        async with in_process(service.app) as http:
            assert (await http.get("/version")).json()["sandbox"]["tier"] == "unsafe"
        codes = [
            "x = 2",
            "while True: pass",
            "x = bytearray(8 << 30)",
            "import subprocess; subprocess.Popen(['/bin/sleep', '60'])",
        ]
        ended = [
            await client.call(
                "POST",
                "/execute",
                ExecuteRequest(code=code, expression="2", timeout_s=0.5),
                Execution,
                deadline_s=60,
            )
            for code in codes
        ]
        assert [run.verdict for run in ended] == ["ok", "time_limit", "memory_limit", "ok"]
        assert [
            s.value
            for s in await score(
                client, items("ab"), own("def reward(completions):\n    return [2]")
            )
        ] == [2.0]


async def test_a_host_that_cannot_isolate_refuses_code_and_grades_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "services.reward.sandbox.host.links", lambda: {"/usr": "never"}
    )  # one step of the setup must fail
    service = create_service(Settings(sandbox_slots=1))
    async with (
        service.app.router.lifespan_context(service.app),
        Client("reward", "http://localhost", transport=httpx2.ASGITransport(service.app)) as client,
    ):
        for work in (
            client.call("POST", "/execute", ExecuteRequest(code="1"), Execution, deadline_s=5),
            score(client, items("1", target=1), RewardSpec(grader="python_value")),
            score(client, items("1"), own("def reward(completions): ...")),
        ):
            with pytest.raises(
                Failed,
                match=r"cannot isolate model-written code: .*File exists.*HONE_SANDBOX=unsafe",
            ):
                await work
        assert [
            s.value
            for s in await score(
                client, items("abc"), RewardSpec(grader="length", params={"max": 3})
            )
        ] == [1.0]
        async with in_process(service.app) as http:
            ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert "HONE_SANDBOX=unsafe" in ready.json()["dependencies"]["sandbox"]["detail"]


async def test_rewards_are_tried_on_nothing_and_on_the_rows_own_answers(client: Client) -> None:
    rows = [
        {
            "answer": "9 + 9 = 18\n#### 18",
            "tests": "assert f(1) == 2",
            "code": "def f(x): return 2",
        },
        {"answer": "\\frac{1}{2}", "tests": "assert f(1) == 1", "code": "def f(x): return 2"},
    ]
    specs = (
        RewardSpec(grader="math"),
        RewardSpec(grader="code_tests"),
        RewardSpec(grader="exact_match", params={"column": "answer"}),
        RewardSpec(grader="length", params={"max": 3}),
        own("def reward(completions, **columns): return [len(text) for text in completions]"),
    )
    prompts = tuple(Prompt(index=at, content="?", row=row) for at, row in enumerate(rows))
    body = TryRequest(rewards=specs, prompts=prompts)
    first, again = [
        await client.call("POST", "/graders/try", body, TriedRewards, deadline_s=60)
        for _ in range(2)
    ]
    assert first == again
    found = [(one.empty, one.reference, one.num_references, one.full_mark) for one in first.rewards]
    assert found == [
        (0.0, 1.0, 2, 1.0),
        (0.0, 0.5, 2, 1.0),
        (0.0, 1.0, 2, 1.0),
        (1.0, None, 0, None),
        (0.0, 18.0, 2, None),
    ]
    assert first.rewards[1].why


async def test_a_reward_that_fails_on_what_it_is_tried_on_says_so(client: Client) -> None:
    """Two empty completions and two reference answers; none has a value."""
    source = "def reward(completions, **columns):\n    raise KeyError('solution')"
    prompts = tuple(Prompt(index=at, content="?", row={"answer": "18"}) for at in range(2))
    body = TryRequest(rewards=(own(source),), prompts=prompts)
    (tried,) = (
        await client.call("POST", "/graders/try", body, TriedRewards, deadline_s=60)
    ).rewards
    assert (tried.empty, tried.reference, tried.num_failed) == (None, None, 4)
    assert "KeyError: 'solution'" in tried.failure
