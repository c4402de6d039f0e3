"""The rollout service over HTTP: the real app and client, an engine that fails on demand at the
`Engine` seam. Who is refused as superseded is in `test_rollout_fencing.py`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.app import create_service
from services.rollout.engine import failed_rollout
from services.rollout.rl_routes import PauseState
from shared.errors import BadRequest, Conflict, Failed, StateLost
from shared.settings import Settings
from shared.weights.folders import stored_tensors, tensor_digests
from shared.wire import (
    Canary,
    CheckedWeights,
    FolderWeights,
    ModelRequest,
    NoBody,
    Sampling,
    ServingWeights,
)
from tests.support.rollout_bench import OTHER, SPEC, RolloutBench

STARTS = r"starting the engine for 'tiny', since \d\d:\d\d:\d\d UTC \(\d+ s\)"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RolloutBench]:
    bench = RolloutBench(tmp_path)
    async with bench.client:
        yield bench


@pytest.fixture
async def serving(bench: RolloutBench) -> RolloutBench:
    await bench.put()
    return bench


async def assert_lost(bench: RolloutBench, why: str) -> None:
    """Whatever builds on the model is refused at once, and not as if waiting helped."""
    for call in (
        bench.generate(),
        bench.reload(bench.publish(9)),
        bench.client.call("POST", "/pause", NoBody(), PauseState, deadline_s=1),
        bench.client.call("POST", "/resume", NoBody(), PauseState, deadline_s=1),
    ):
        with pytest.raises(StateLost, match=why) as caught:
            await call
        assert caught.value.code == "state_lost"


# --- the model -----------------------------------------------------------------------------------


async def test_without_a_model_the_service_is_ready_and_generate_says_what_to_do(
    bench: RolloutBench,
) -> None:
    ready = await bench.raw("GET", "/readyz")
    assert (ready.status_code, ready.json()["dependencies"]["engine"]["ok"]) == (200, True)
    await assert_lost(bench, "no model is loaded; PUT /model loads one")


async def test_while_an_engine_starts_callers_are_told_to_come_again(
    bench: RolloutBench,
) -> None:
    bench.may_start.clear()
    starting = asyncio.create_task(bench.put())
    while not await bench.sampler.unready():
        await asyncio.sleep(0.001)
    for route, body in (
        ("/generate", {"prompt": "a"}),
        ("/reload_weights", bench.publish(1).model_dump()),
        ("/pause", {}),
        ("/resume", {}),
        ("/v1/completions", {}),
    ):
        answer = await bench.raw("POST", route, json=body)
        assert (route, answer.status_code, answer.json()["code"]) == (route, 503, "starting")
        assert re.fullmatch(STARTS, answer.json()["error"]["message"])
    ready = await bench.raw("GET", "/readyz")
    engine = ready.json()["dependencies"]["engine"]
    assert (ready.status_code, engine["ok"], engine["starting"]) == (503, False, True)
    assert re.fullmatch(STARTS, engine["detail"])
    told = await bench.client.get("/weights", ServingWeights)
    assert told.doing == "starting the engine for 'tiny': reading the weights"
    bench.may_start.set()
    assert (await starting).model == "tiny"


async def test_a_model_put_twice_starts_once(bench: RolloutBench) -> None:
    first, second = await asyncio.gather(bench.put(), bench.put())
    assert first == second == await bench.put()
    assert (first.model, first.version, len(bench.engines)) == ("tiny", None, 1)
    assert (first.max_num_seqs, first.kv_cache_tokens) == (16, 4096)


async def test_another_model_stops_the_first_engine_and_its_version(serving: RolloutBench) -> None:
    await serving.reload(serving.publish(4))
    assert (await serving.put(OTHER)).model == "other"
    assert serving.engines[0].calls[-1] == "stop"
    assert (await serving.client.get("/weights", ServingWeights)).version is None
    await serving.reload(serving.publish(4))
    assert serving.engine.calls == ["pause", "v4", 4, "resume"], "loaded into the new engine, too"
    assert (await serving.put(SPEC)).model == "tiny" and len(serving.engines) == 3


async def test_a_model_that_does_not_exist_leaves_the_old_one_serving(
    serving: RolloutBench,
) -> None:
    with pytest.raises(BadRequest, match="got 'missing'"):
        await serving.put(ModelRequest(model="missing"))
    assert (await serving.generate()).rollouts[0].finish_reason == "stop"


async def test_after_a_failed_start_nothing_serves_and_the_next_one_works(
    serving: RolloutBench,
) -> None:
    await serving.reload(serving.publish(4))
    serving.start_error = Failed("disk full")
    with pytest.raises(Failed):
        await serving.put(OTHER)
    served = await serving.client.get("/weights", ServingWeights)
    assert (served.model, served.version) == (None, None)
    assert (await serving.raw("GET", "/readyz")).status_code == 200
    serving.start_error = None
    assert (await serving.put(OTHER)).model == "other"


async def test_a_dead_engine_makes_the_service_unready_and_the_same_model_starts_again(
    serving: RolloutBench,
) -> None:
    serving.engine.dead = True
    ready = await serving.raw("GET", "/readyz")
    assert (ready.status_code, ready.json()["dependencies"]["engine"]["detail"]) == (
        503,
        "the engine process died",
    )
    await assert_lost(serving, "the engine process died")
    await serving.put()
    assert (await serving.generate()).prompt_token_ids == (1, 2)


# --- generate ------------------------------------------------------------------------------------


async def test_generate_returns_a_group(serving: RolloutBench) -> None:
    group = await serving.generate(sampling=Sampling(n=3, max_tokens=4))
    assert (group.prompt_token_ids, len(group.rollouts)) == ((1, 2), 3)
    assert (group.rollouts[0].token_ids, group.rollouts[0].logprobs) == ((2,), (-0.5,))


async def test_text_and_messages_are_encoded_by_the_model(serving: RolloutBench) -> None:
    assert (await serving.generate(prompt_token_ids=None, prompt="four")).prompt_token_ids == (4,)
    messages = ({"role": "user", "content": "hi"},)
    assert (await serving.generate(prompt_token_ids=None, prompt=messages)).prompt_token_ids == (1,)


async def test_a_prompts_log_probs_come_if_they_are_asked_for(serving: RolloutBench) -> None:
    """The engine gives a token minus its id."""
    group = await serving.generate(prompt_token_ids=(1, 2, 3), prompt_logprobs=True)
    assert group.prompt_logprobs == (-2.0, -3.0)
    assert (await serving.generate(prompt_token_ids=(1, 2, 3))).prompt_logprobs == ()
    alone = await serving.generate(prompt_token_ids=(1,), prompt_logprobs=True)
    assert alone.prompt_logprobs == ()


async def test_given_answers_are_tokens_that_no_weights_sampled(serving: RolloutBench) -> None:
    group = await serving.generate(prompt_token_ids=None, prompt="four", answers=("abc", "f"))
    assert group.prompt_token_ids == (4,)
    assert [rollout.token_ids for rollout in group.rollouts] == [(0, 1, 2), (5,)]
    assert [(r.text, r.logprobs, r.spans) for r in group.rollouts] == [
        ("abc", (), ()),
        ("f", (), ()),
    ]
    assert serving.engine.samples == 0
    assert "hone_rollout_generated_tokens_total 0.0" in (await serving.raw("GET", "/metrics")).text


async def test_answers_of_a_job_that_cannot_be_given_are_a_group_that_went_wrong(
    serving: RolloutBench,
) -> None:
    await serving.reload(serving.publish(1))
    asked = {"job_id": "job", "prompt_token_ids": None, "prompt": "four"}
    group = await serving.generate(**asked, answers=("a" * 16,))
    assert (group.overlong, group.rollouts[0].finish_reason) == (True, "error")
    assert group.rollouts[0].error == (
        "a prompt of 1 tokens with an answer of 16 makes 17; expected at most 16 (the job's "
        "max_model_len, or the model's own limit)"
    )
    group = await serving.generate(**asked, answers=("",))
    assert group.rollouts[0].error == "the answer has no tokens; expected at least one"
    with pytest.raises(BadRequest, match="'answers' need a 'prompt' of text or messages"):
        await serving.generate(job_id="job", answers=("a",))


BAD_PROMPTS = [
    ({"prompt_token_ids": (3, 10)}, "got 10, expected 0 to 9"),
    ({"prompt_token_ids": (-1, 3)}, "got -1, expected 0 to 9"),
    ({"prompt_token_ids": ()}, "the prompt has no tokens"),
    ({"prompt_token_ids": None, "prompt": ""}, "the prompt has no tokens"),
    (
        {"prompt_token_ids": None, "prompt": "a", "template_args": {"refuse": 1}},
        "the model's chat template refused the messages",
    ),
    (
        {"prompt_token_ids": (1,) * 13},
        "a prompt of 13 tokens with 'max_tokens' 4 makes 17; expected at most 16 ",
    ),
]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": "both"}, "not both or neither"),
        ({"prompt_token_ids": None}, "not both or neither"),
        *BAD_PROMPTS,
    ],
)
async def test_a_bad_prompt_is_refused_with_the_numbers(
    serving: RolloutBench, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadRequest, match=message):
        await serving.generate(**request_)
    assert serving.engine.samples == 0


@pytest.mark.parametrize(("request_", "message"), BAD_PROMPTS)
async def test_a_bad_prompt_of_a_job_is_a_group_that_went_wrong(
    serving: RolloutBench, request_: dict[str, Any], message: str
) -> None:
    await serving.reload(serving.publish(1))
    group = await serving.generate(
        job_id="job", **({"sampling": Sampling(n=2, max_tokens=4)} | request_)
    )
    assert [rollout.finish_reason for rollout in group.rollouts] == ["error", "error"]
    assert message in (group.rollouts[0].error or "")
    assert (group.rollouts[0].token_ids, group.rollouts[0].spans) == ((), ())
    assert (serving.engine.samples, group.replica) == (0, "here:1")


async def test_a_prompt_that_is_too_long_is_marked_or_loses_its_first_tokens(
    serving: RolloutBench,
) -> None:
    """The model holds 16 tokens, of which 4 are for the completion."""
    await serving.reload(serving.publish(1))
    prompt = (*range(10), 7, 8, 9)
    refused = await serving.generate(job_id="job", prompt_token_ids=prompt)
    assert (refused.overlong, refused.rollouts[0].finish_reason) == (True, "error")
    cut = await serving.generate(job_id="job", prompt_token_ids=prompt, truncate_prompt=True)
    assert cut.overlong and cut.prompt_token_ids == prompt[1:]
    fits = await serving.generate(job_id="job", prompt_token_ids=prompt[1:], truncate_prompt=True)
    assert (fits.overlong, fits.prompt_token_ids) == (False, prompt[1:])


async def test_one_completion_that_went_wrong_leaves_the_others_and_is_counted(
    serving: RolloutBench,
) -> None:
    good = (await serving.generate()).rollouts[0]
    serving.engine.outcome = (good, failed_rollout("not finite"), good)
    group = await serving.generate(sampling=Sampling(n=3, max_tokens=4))
    assert [rollout.error for rollout in group.rollouts] == [None, "not finite", None]
    metrics = (await serving.raw("GET", "/metrics")).text
    assert "hone_rollout_failed_rollouts_total 1.0" in metrics
    assert "hone_rollout_generated_tokens_total 3.0" in metrics


async def test_template_args_reach_the_template(serving: RolloutBench) -> None:
    group = await serving.generate(
        prompt_token_ids=None, prompt="four", template_args={"enable_thinking": False}
    )
    assert group.prompt_token_ids == (5,)


async def test_the_same_key_samples_once(serving: RolloutBench) -> None:
    await asyncio.gather(
        serving.generate(key="step-1-prompt-0"), serving.generate(key="step-1-prompt-0")
    )
    await serving.generate(key="step-1-prompt-0")
    assert serving.engine.samples == 1


async def test_sampling_by_hand_ends_with_its_client(serving: RolloutBench) -> None:
    serving.engine.frozen.clear()
    messages = [{"type": "http.request", "body": b'{"prompt": "a", "sampling": {"max_tokens": 4}}'}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while not serving.engine.under_way:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
    await serving.service.app({**scope, "query_string": b""}, receive, send)
    assert (serving.engine.samples, serving.engine.under_way) == (1, 0)


async def test_weights_older_than_asked_for_do_not_sample(serving: RolloutBench) -> None:
    with pytest.raises(Conflict, match="got 2, serving no version of a job"):
        await serving.generate(min_version=2)
    await serving.reload(serving.publish(1))
    with pytest.raises(Conflict, match="got 2, serving version 1 of 'job'"):
        await serving.generate(min_version=2)
    await serving.reload(serving.publish(2))
    assert (await serving.generate(min_version=2)).rollouts[0].versions == (2,)


async def test_cached_prefixes_are_salted_with_job_and_version(serving: RolloutBench) -> None:
    await serving.reload(serving.publish(7))
    assert (await serving.generate()).rollouts[0].text == "job:0:0:7"


# --- weights -------------------------------------------------------------------------------------


async def test_a_reload_pauses_loads_labels_and_resumes(serving: RolloutBench) -> None:
    ref = serving.publish(5)
    served = await serving.reload(ref)
    assert (served.job_id, served.version, served.digest, served.model) == (
        "job",
        5,
        ref.digest,
        "tiny",
    )
    assert served.load_s > 0
    assert serving.engine.calls == ["pause", "v5", 5, "resume"]
    assert await serving.client.get("/weights", ServingWeights) == served


async def test_a_version_reloaded_twice_is_loaded_once(serving: RolloutBench) -> None:
    ref = serving.publish(5)
    answers = await asyncio.gather(serving.reload(ref), serving.reload(ref))
    assert answers[0] == answers[1] == await serving.reload(ref)
    assert serving.engine.calls.count("v5") == 1


async def test_an_older_version_is_a_conflict(serving: RolloutBench) -> None:
    await serving.reload(serving.publish(5))
    with pytest.raises(Conflict, match="got 3, serving 5"):
        await serving.reload(serving.publish(3))
    assert (await serving.generate()).rollouts[0].versions == (5,)


async def test_other_bytes_of_the_same_version_are_a_conflict(serving: RolloutBench) -> None:
    await serving.reload(serving.publish(5))
    other = serving.publish(5, w=np.ones((2, 2), np.float32), b=np.ones(2, np.float32))
    with pytest.raises(Conflict, match="serves with digest"):
        await serving.reload(other)


async def test_a_reload_that_goes_back_replaces_a_newer_version_and_other_bytes_once(
    serving: RolloutBench,
) -> None:
    await serving.reload(serving.publish(5))
    back = serving.publish(3).model_copy(update={"epoch": 1})
    assert (await serving.reload(back)).version == 3
    await serving.reload(back)
    assert (await serving.generate()).rollouts[0].versions == (3,)
    other = serving.publish(3, w=np.ones((2, 2), np.float32), b=np.ones(2, np.float32)).model_copy(
        update={"epoch": 2}
    )
    assert (await serving.reload(other)).digest == other.digest != back.digest
    assert serving.engine.calls == ["pause", "v5", 5, "resume"] + ["pause", "v3", 3, "resume"] * 2


async def test_another_job_starts_its_own_order(serving: RolloutBench) -> None:
    await serving.reload(serving.publish(5))
    assert (await serving.reload(serving.publish(0, job="next"))).version == 0


async def test_bytes_that_changed_on_the_way_are_not_loaded(serving: RolloutBench) -> None:
    await serving.reload(serving.publish(1))
    ref = serving.publish(2)
    file = Path(ref.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(Failed, match=f"expected {ref.digest}.*; it was not loaded") as caught:
        await serving.reload(ref)
    assert caught.value.code == "digest_differs"
    assert (await serving.generate()).rollouts[0].versions == (1,)


async def test_after_a_load_that_failed_halfway_nothing_is_sampled_until_one_succeeds(
    serving: RolloutBench,
) -> None:
    await serving.reload(serving.publish(1))
    serving.engine.fail_load = RuntimeError("bus error")
    why = r"loading version 2 of job 'job' failed halfway \(RuntimeError: bus error\)"
    with pytest.raises(StateLost, match=why):
        await serving.reload(serving.publish(2))
    assert serving.engine.calls[-1] == "abort"
    assert (await serving.raw("GET", "/readyz")).status_code == 503
    with pytest.raises(StateLost, match=why):
        await serving.generate()
    assert (await serving.client.get("/weights", ServingWeights)).version is None
    serving.engine.fail_load = None
    await serving.reload(serving.publish(2))
    assert (await serving.generate()).rollouts[0].versions == (2,)


async def test_a_rollout_under_way_when_a_load_fails_is_not_returned(serving: RolloutBench) -> None:
    waiting = await serving.frozen_generate()
    serving.engine.fail_load = RuntimeError("bus error")
    with pytest.raises(StateLost):
        await serving.reload(serving.publish(2))
    with pytest.raises(StateLost, match="failed halfway"):
        await waiting


async def test_an_engine_that_dies_during_a_load_is_state_lost(serving: RolloutBench) -> None:
    serving.engine.loading.clear()
    loading = asyncio.create_task(serving.reload(serving.publish(2)))
    while "v2" not in serving.engine.calls:
        await asyncio.sleep(0.001)
    serving.engine.dead = True
    serving.engine.fail_load = StateLost("the engine process died")
    serving.engine.loading.set()
    with pytest.raises(StateLost, match="the engine process died"):
        await loading
    await serving.put()
    assert (await serving.generate()).rollouts[0].versions == ()


async def test_a_rollout_under_way_when_the_engine_is_replaced_is_state_lost(
    serving: RolloutBench,
) -> None:
    waiting = await serving.frozen_generate()
    await serving.put(OTHER)
    with pytest.raises(StateLost, match="the engine was stopped"):
        await waiting


async def test_a_load_that_did_nothing_is_told_however_little_it_would_have_changed(
    serving: RolloutBench,
) -> None:
    def published(version: int, logprob: float) -> FolderWeights:
        canary = Canary(token_ids=(4, 5, 6), logprobs=(logprob, -1.0))
        return serving.publish(version).model_copy(update={"canary": canary})

    await serving.reload(published(1, -1.0))
    for again in (False, True):
        ref = published(2, -1.0001).model_copy(update={"again": again})
        with pytest.raises(Failed, match="the canary did not change at all") as caught:
            await serving.reload(ref)
        assert caught.value.code == "not_loaded"
    with pytest.raises(StateLost, match="so the engine's weights are unknown"):
        await serving.generate()
    serving.engine.shift = 1e-4
    assert (await serving.reload(published(2, -1.0001))).version == 2
    await serving.generate()


async def test_a_load_that_did_nothing_is_found_in_a_batch_that_rounds_otherwise(
    serving: RolloutBench,
) -> None:
    def published(version: int, moved: float) -> FolderWeights:
        ref = serving.publish(version)
        return ref.model_copy(
            update={
                "canary": Canary(token_ids=(4, 5, 6), logprobs=(-5.0 - moved, -6.0 - moved)),
                "tensors": tensor_digests(stored_tensors(Path(ref.path))),
            }
        )

    first, second = published(1, 0.0), published(2, 0.1)
    await serving.reload(first)
    engine = serving.engine
    engine.loaded, engine.shift = first.tensors, 0.04  # of 0.1
    for again in (False, True):
        with pytest.raises(Failed, match="engine still has 'w' of the previous version") as caught:
            await serving.reload(second.model_copy(update={"again": again}))
        assert caught.value.code == "not_loaded"
    with pytest.raises(StateLost, match="so the engine's weights are unknown"):
        await serving.generate()
    await serving.put(OTHER)
    engine = serving.engine
    await serving.reload(first)
    engine.loaded, engine.shift = {**second.tensors, "b": "in another form"}, 0.04
    assert (await serving.reload(second)).version == 2
    assert engine.num_read_back == 1
    engine.shift = 0.1
    assert (await serving.reload(published(3, 0.2))).version == 3
    assert engine.num_read_back == 1, "it moved by 0.06 of 0.1"


async def test_the_weights_of_the_engine_are_compared_tensor_by_tensor(
    serving: RolloutBench,
) -> None:
    async def check() -> CheckedWeights:
        return await serving.client.call(
            "POST", "/weights/check", NoBody(), CheckedWeights, deadline_s=2
        )

    ref = serving.publish(1)
    tensors = tensor_digests(stored_tensors(Path(ref.path)))
    await serving.reload(ref.model_copy(update={"tensors": tensors}))
    serving.engine.loaded = {**tensors, "w": "other bytes"}
    found = await check()
    assert (found.version, found.num_tensors, found.differing) == (1, 2, ("w",))
    serving.engine.loaded = {"w": tensors["w"]}
    found = await check()
    assert (found.differing, found.unread) == ((), ("b",))


async def test_the_canary_is_measured_by_the_weights_just_loaded(serving: RolloutBench) -> None:
    canary = Canary(token_ids=(4, 5, 6), logprobs=(-1.0, -1.0))
    ref = serving.publish(5).model_copy(update={"canary": canary})
    assert (await serving.reload(ref)).canary_logprobs == (-5.0, -6.0)
    assert serving.engine.calls == ["pause", "v5", 5, "resume", [4, 5, 6]]
    assert (await serving.client.get("/weights", ServingWeights)).canary_logprobs == (-5.0, -6.0)


async def test_replies_name_the_replica_and_the_life_of_its_engine(serving: RolloutBench) -> None:
    first = await serving.client.get("/weights", ServingWeights)
    assert first.replica == "here:1" == (await serving.generate()).replica
    reloaded = await serving.reload(serving.publish(1))
    assert reloaded.boot_id == first.boot_id != ""
    second = await serving.put(OTHER)
    assert (second.replica, len({first.boot_id, second.boot_id, ""})) == ("here:1", 3)


# --- pause ---------------------------------------------------------------------------------------


async def test_while_paused_generate_waits(serving: RolloutBench) -> None:
    paused = await serving.client.call("POST", "/pause", NoBody(), PauseState, deadline_s=1)
    waiting = asyncio.create_task(serving.generate(deadline_s=5))
    await asyncio.sleep(0.02)
    assert (paused.paused, waiting.done()) == (True, False)
    resumed = await serving.client.call("POST", "/resume", NoBody(), PauseState, deadline_s=1)
    assert (resumed.paused, (await waiting).prompt_token_ids) == (False, (1, 2))


# --- openai, metrics, versions -------------------------------------------------------------------


async def test_openai_routes_go_to_the_engine_or_answer_in_openais_shape(
    bench: RolloutBench,
) -> None:
    refused = await bench.raw("GET", "/v1/models")
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "no model is loaded; PUT /model loads one"
    await bench.put()
    assert (await bench.raw("GET", "/v1/models")).json() == {"from": "the engine"}


async def test_metrics_show_version_running_requests_and_tokens(serving: RolloutBench) -> None:
    assert "hone_rollout_weight_version NaN" in (await serving.raw("GET", "/metrics")).text
    await serving.reload(serving.publish(6))
    await serving.generate(sampling=Sampling(n=5, max_tokens=4))
    text = (await serving.raw("GET", "/metrics")).text
    assert "hone_rollout_weight_version 6.0" in text
    assert "hone_rollout_running_requests 3.0" in text
    assert "hone_rollout_generated_tokens_total 5.0" in text


async def test_version_names_the_engines_packages(bench: RolloutBench) -> None:
    assert (await bench.raw("GET", "/version")).json()["torch"].startswith("2.")
    assert (await bench.raw("GET", "/version")).json()["tool_parser"] is None


async def test_a_configured_model_is_started_while_the_service_is_up(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path)
    service = create_service(Settings(runs_dir=bench.runs, rollout_model="tiny"), bench.sampler)
    async with service.app.router.lifespan_context(service.app):
        assert re.fullmatch(STARTS, await bench.sampler.unready() or "")
        end = time.monotonic() + 5
        while await bench.sampler.unready() and time.monotonic() < end:
            await asyncio.sleep(0.001)
        assert bench.sampler.serving.model == "tiny"
    assert bench.engine.calls == ["stop"]


async def test_a_configured_model_that_cannot_start_keeps_the_service_unready(
    tmp_path: Path,
) -> None:
    bench = RolloutBench(tmp_path)
    service = create_service(Settings(runs_dir=bench.runs, rollout_model="missing"), bench.sampler)
    async with service.app.router.lifespan_context(service.app):
        await asyncio.sleep(0.01)
        assert await bench.sampler.unready() == "'model': got 'missing', which is no folder here"


async def test_a_job_that_is_faster_than_the_configured_model_keeps_its_own(
    tmp_path: Path,
) -> None:
    bench = RolloutBench(tmp_path)
    service = create_service(Settings(runs_dir=bench.runs, rollout_model="tiny"), bench.sampler)
    async with service.app.router.lifespan_context(service.app):
        assert (await bench.put(OTHER)).model == "other"
        await asyncio.sleep(0.02)
        assert (bench.sampler.serving.model, len(bench.engines)) == ("other", 1)
