"""Why sampler and trainer disagree: what each experiment finds, and the causes that are left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.extensions.diagnosis import experiments
from services.orchestrator.extensions.diagnosis.experiments import SamplerMeasurement, judge, report
from services.orchestrator.store.folder import Proof
from shared.settings import Settings
from shared.wire import Canary, CheckedWeights, Experiment, Rollout, RolloutGroup, ServingWeights

IDS = list(range(10, 18))
OURS = [-1.0, -2.0, -3.0, -4.0, -1.0, -2.0, -3.0]
PROOF = Proof(version=7, digest="d7", canary=Canary(token_ids=IDS, logprobs=OURS))
RIGHT = CheckedWeights(version=7, replica="a", num_tensors=4)


def serving(**changes: Any) -> ServingWeights:
    told = {"job_id": "j-1", "version": 7, "digest": "d7", "dtype": "float32", "replica": "a"}
    return ServingWeights.model_validate(told | changes)


def measured(**changes: Any) -> SamplerMeasurement:
    """A sampler that agrees in everything, changed so."""
    same = [-0.5, -0.25]
    told: dict[str, Any] = {
        "serving": serving(),
        "checked": RIGHT,
        "again": OURS,
        "sampled": same,
        "reread": same,
        "cold": same,
        "warm": same,
    }
    return SamplerMeasurement(**{**told, **changes})


def result(**changes: Any) -> tuple[dict[str, bool | None], Sequence[str]]:
    """Which experiments agree, and the first words of each cause."""
    told = report("j-1", 7, judge(PROOF, measured(**changes)))
    return {one.name: one.agrees for one in told}, [cause.split(":")[0] for cause in told.causes]


ALL = dict.fromkeys(
    ("version", "tensors", "dtype", "same_tokens", "decoding", "prefix_cache"), True
)


def test_where_all_agree_what_is_left_is_how_the_job_samples() -> None:
    assert result() == (ALL, ["none of these"])


OTHERWISE = "the tensors are right, so the sampler computes the model otherwise"


@pytest.mark.parametrize(
    ("changes", "differ", "cause"),
    [
        ({"serving": serving(version=6, digest="d6")}, "version", "stale weights"),
        (
            {"checked": RIGHT.model_copy(update={"differing": ("q.weight",)})},
            "tensors",
            "a load went wrong",
        ),
        ({"serving": serving(dtype="bfloat16")}, "dtype", "another dtype"),
        ({"again": [value - 0.1 for value in OURS]}, "same_tokens", OTHERWISE),
        (
            {"reread": [-0.6, -0.35]},
            "decoding",
            "the engine's kernels for one token and for many disagree with each other",
        ),
        ({"warm": [-0.7, -0.25]}, "prefix_cache", "the prefix cache"),
    ],
)
def test_each_cause_is_told_apart(changes: dict[str, Any], differ: str, cause: str) -> None:
    assert result(**changes) == ({**ALL, differ: False}, [cause])


def test_stale_weights_explain_other_log_probs() -> None:
    stale = {"serving": serving(version=6, digest="d6"), "again": [v - 0.5 for v in OURS]}
    agrees, causes = result(**stale)
    assert (agrees["version"], agrees["same_tokens"]) == (False, False)
    assert causes == ["stale weights"], "and no kernel"


def test_a_difference_that_rounding_may_make_is_none() -> None:
    """In float32 0.001 nats are allowed on average."""
    near, far = ([value - gap for value in OURS] for gap in (0.0009, 0.0011))
    assert result(again=near)[0]["same_tokens"] is True
    assert result(again=far)[0]["same_tokens"] is False


def test_a_difference_that_grows_with_position_is_said() -> None:
    """The first three tokens agree, the later four differ by 1 nat: 4 / 7 on average."""
    later = [*OURS[:3], *(value - 1 for value in OURS[3:])]
    (found,) = [one for one in judge(PROOF, measured(again=later)) if one.name == "same_tokens"]
    assert found.difference == pytest.approx(4 / 7, abs=1e-6) and found.allowed == 0.001
    assert "later tokens differ more (0, then 1 nats): look at positions" in found.detail


def test_what_could_not_be_measured_is_not_known_and_leaves_no_cause() -> None:
    nothing = {"checked": None, "again": None, "sampled": None, "cold": None}
    found = judge(PROOF, measured(**nothing, why_not={"tensors": "it does not answer"}))
    by_name = {one.name: one for one in found}
    assert by_name["tensors"].agrees is None and by_name["tensors"].detail == "it does not answer"
    assert report("j-1", 7, found).causes == ()


# --- with a sampler ------------------------------------------------------------------------------


class FakeSampler:
    """Log-probs of a token are minus its id / 100, less `decode_gap` while it samples, and less
    `cache_gap` once it had the prompt."""

    def __init__(self, *, decode_gap: float = 0.0, cache_gap: float = 0.0) -> None:
        self.decode_gap, self.cache_gap = decode_gap, cache_gap
        self.seen: set[tuple[int, ...]] = set()
        self.num_cached = 0

    def answer(self, request: httpx.Request) -> httpx.Response:

        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/v1/completions":
            told = [
                {str(id): {"logprob": -id / 100, "decoded_token": "x"}} for id in body["prompt"]
            ]
            return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, *told[1:]]}]})
        assert request.url.path == "/metrics"
        return httpx.Response(200, text=f"hone_rollout_cached_prompt_tokens {self.num_cached}.0\n")

    async def get(self, path: str, result: Any, **_: Any) -> Any:
        assert path == "/weights"
        return serving()

    async def call(self, method: str, path: str, body: Any, result: Any, **_: Any) -> Any:
        if path == "/weights/check":
            return RIGHT
        prompt = tuple(body.prompt_token_ids)
        gap = self.decode_gap
        if prompt in self.seen:
            self.num_cached += len(prompt)
            gap += self.cache_gap
        self.seen.add(prompt)
        logprobs = [-0.5 - gap, -0.6 - gap]
        rollout = Rollout(text="", token_ids=[50, 60], logprobs=logprobs, finish_reason="stop")
        return RolloutGroup(prompt_token_ids=prompt, rollouts=(rollout,))

    async def __aenter__(self) -> FakeSampler:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


TENTHS = Proof(
    version=7,
    digest="d7",
    canary=Canary(token_ids=IDS, logprobs=[-id / 100 for id in IDS[1:]]),
)


async def probed(
    fake: FakeSampler, monkeypatch: pytest.MonkeyPatch, job_id: str = "j-1"
) -> list[Experiment]:
    transport = httpx.MockTransport(fake.answer)
    http = httpx.AsyncClient(transport=transport, base_url="http://sampler")
    monkeypatch.setattr(experiments, "Client", lambda *_, **__: fake)
    monkeypatch.setattr(experiments, "_http", lambda *_: http)
    return await experiments.probe("http://sampler", Settings(), job_id, TENTHS)


async def test_a_sampler_is_asked_for_all_that_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await probed(FakeSampler(), monkeypatch)
    assert {one.name: one.agrees for one in found} == ALL


async def test_gaps_of_decoding_and_of_the_cache_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {one.name: one for one in await probed(FakeSampler(decode_gap=0.25), monkeypatch)}
    assert found["decoding"].agrees is False
    assert found["decoding"].difference == pytest.approx(0.25, abs=1e-6)
    assert found["prefix_cache"].agrees is True
    found = {one.name: one for one in await probed(FakeSampler(cache_gap=0.5), monkeypatch)}
    assert found["prefix_cache"].difference == pytest.approx(0.5, abs=1e-6)
    assert found["decoding"].agrees is True


async def test_a_sampler_of_another_job_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await probed(FakeSampler(), monkeypatch, "other-1") == []


async def test_a_cache_that_held_nothing_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgets(FakeSampler):
        async def call(self, *args: Any, **more: Any) -> Any:
            self.seen.clear()
            return await super().call(*args, **more)

    found = {one.name: one for one in await probed(Forgets(), monkeypatch)}
    assert found["prefix_cache"].agrees is None
    assert found["prefix_cache"].detail.startswith("nothing of the prompt was cached")
