"""Why sampler and trainer disagree: what each experiment finds, and the causes that are left."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2 as httpx
import pytest

from services.orchestrator.extensions.diagnosis import experiments
from services.orchestrator.extensions.diagnosis.experiments import report
from services.orchestrator.store.folder import Proof
from shared.errors import Unavailable
from shared.settings import Settings
from shared.wire import Canary, CheckedWeights, Experiment, Rollout, RolloutGroup, ServingWeights

IDS = list(range(10, 18))
OURS = [-id / 64 for id in IDS[1:]]
PROOF = Proof(version=7, digest="d7", canary=Canary(token_ids=IDS, logprobs=OURS))
RIGHT = CheckedWeights(version=7, replica="a", num_tensors=4)


def serving(**changes: Any) -> ServingWeights:
    told = {"job_id": "j-1", "version": 7, "digest": "d7", "dtype": "float32", "replica": "a"}
    return ServingWeights.model_validate(told | changes)


class FakeSampler:
    """Log-probs of a token are minus its id / 64, less `decode_gap` while it samples, `cache_gap`
    once it had the prompt, and `canary_gaps` in the canary. It does not answer at `broken`."""

    def __init__(
        self,
        *,
        decode_gap: float = 0.0,
        cache_gap: float = 0.0,
        canary_gaps: Sequence[float] = (0.0,) * 7,
        weights: ServingWeights | None = None,
        checked: CheckedWeights = RIGHT,
        broken: str = "",
    ) -> None:
        self.decode_gap, self.cache_gap, self.canary_gaps = decode_gap, cache_gap, canary_gaps
        self.weights, self.checked, self.broken = weights or serving(), checked, broken
        self.seen: set[tuple[int, ...]] = set()
        self.num_cached = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == self.broken:
            return httpx.Response(404, text="no such route")
        body = json.loads(request.content) if request.content else {}
        if request.url.path == "/v1/completions":
            gaps = [0.0, *self.canary_gaps] if body["prompt"] == IDS else [0.0] * 99
            told = [
                {str(id): {"logprob": -id / 64 - gap, "decoded_token": "x"}}
                for id, gap in zip(body["prompt"], gaps, strict=False)
            ]
            return httpx.Response(200, json={"choices": [{"prompt_logprobs": [None, *told[1:]]}]})
        assert request.url.path == "/metrics"
        return httpx.Response(200, text=f"hone_rollout_cached_prompt_tokens {self.num_cached}.0\n")

    async def get(self, path: str, result: Any, **_: Any) -> Any:
        assert path == "/weights"
        return self.weights

    async def call(self, method: str, path: str, body: Any, result: Any, **_: Any) -> Any:
        if path == self.broken:
            raise Unavailable("it does not answer")
        if path == "/weights/check":
            return self.checked
        prompt = tuple(body.prompt_token_ids)
        gap = self.decode_gap
        if prompt in self.seen:
            self.num_cached += len(prompt)
            gap += self.cache_gap
        self.seen.add(prompt)
        logprobs = [-50 / 64 - gap, -60 / 64 - gap]
        rollout = Rollout(text="", token_ids=[50, 60], logprobs=logprobs, finish_reason="stop")
        return RolloutGroup(prompt_token_ids=prompt, rollouts=(rollout,))

    async def __aenter__(self) -> FakeSampler:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


Probed = Callable[..., Awaitable[dict[str, Experiment]]]
"""Makes the experiments with a fake sampler, and returns them by name."""


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Probed:
    async def make(fake: FakeSampler | None = None, job_id: str = "j-1") -> dict[str, Experiment]:
        fake = fake or FakeSampler()
        options = {"base_url": "http://sampler", "transport": httpx.MockTransport(fake.answer)}
        monkeypatch.setattr(experiments, "Client", lambda *_, **__: fake)
        monkeypatch.setattr(experiments, "client_options", lambda *_: options)
        found = await experiments.probe("http://sampler", Settings(), job_id, PROOF)
        return {one.name: one for one in found}

    return make


def told(found: dict[str, Experiment]) -> tuple[dict[str, bool | None], list[str]]:
    """Which experiments agree, and the first words of each cause."""
    causes = report("j-1", 7, [*found.values()]).causes
    return {name: one.agrees for name, one in found.items()}, [
        cause.split(":")[0] for cause in causes
    ]


ALL = dict.fromkeys(
    ("version", "tensors", "dtype", "same_tokens", "decoding", "prefix_cache"), True
)

OTHERWISE = "the tensors are right, so the sampler computes the model otherwise"


async def test_where_all_agree_what_is_left_is_how_the_job_samples(probed: Probed) -> None:
    assert told(await probed()) == (ALL, ["none of these"])


@pytest.mark.parametrize(
    ("fake", "differ", "cause"),
    [
        ({"weights": serving(version=6, digest="d6")}, "version", "stale weights"),
        (
            {"checked": RIGHT.model_copy(update={"differing": ("q.weight",)})},
            "tensors",
            "a load went wrong",
        ),
        ({"weights": serving(dtype="bfloat16")}, "dtype", "another dtype"),
        ({"canary_gaps": (0.1,) * 7}, "same_tokens", OTHERWISE),
        (
            {"decode_gap": 0.25},
            "decoding",
            "the engine's kernels for one token and for many disagree with each other",
        ),
        ({"cache_gap": 0.5}, "prefix_cache", "the prefix cache"),
    ],
)
async def test_each_cause_is_told_apart(
    fake: dict[str, Any], differ: str, cause: str, probed: Probed
) -> None:
    found = await probed(FakeSampler(**fake))
    assert told(found) == ({**ALL, differ: False}, [cause])
    if gap := {"decoding": 0.25, "prefix_cache": 0.5}.get(differ):
        assert found[differ].difference == pytest.approx(gap, abs=1e-6)


async def test_stale_weights_explain_other_log_probs(probed: Probed) -> None:
    stale = FakeSampler(weights=serving(version=6, digest="d6"), canary_gaps=(0.5,) * 7)
    agrees, causes = told(await probed(stale))
    assert (agrees["version"], agrees["same_tokens"]) == (False, False)
    assert causes == ["stale weights"], "and no kernel"


@pytest.mark.parametrize(("gap", "agrees"), [(0.0009, True), (0.0011, False)])
async def test_a_difference_that_rounding_may_make_is_none(
    gap: float, agrees: bool, probed: Probed
) -> None:
    """In float32 0.001 nats are allowed on average."""
    found = await probed(FakeSampler(canary_gaps=(gap,) * 7))
    assert found["same_tokens"].agrees is agrees


async def test_a_difference_that_grows_with_position_is_said(probed: Probed) -> None:
    """The first three tokens agree, the later four differ by 1 nat: 4 / 7 on average."""
    later = await probed(FakeSampler(canary_gaps=(0.0,) * 3 + (1.0,) * 4))
    found = later["same_tokens"]
    assert found.difference == pytest.approx(4 / 7, abs=1e-6) and found.allowed == 0.001
    assert "later tokens differ more (0, then 1 nats): look at positions" in found.detail


async def test_what_could_not_be_measured_is_not_known_and_leaves_no_cause(probed: Probed) -> None:
    found = await probed(FakeSampler(broken="/weights/check"))
    assert told(found) == ({**ALL, "tensors": None}, ["none of these"])
    assert found["tensors"].detail == "it does not answer"
    found = await probed(FakeSampler(broken="/v1/completions"))
    assert told(found) == ({**ALL, "same_tokens": None, "decoding": None}, [])
    assert found["decoding"].detail == (
        "the sampler answered 404 to /v1/completions: no such route"
    )
    found = await probed(FakeSampler(broken="/metrics"))
    assert told(found)[0] == {**ALL, "prefix_cache": None}


async def test_a_sampler_of_another_job_is_left_alone(probed: Probed) -> None:
    assert await probed(job_id="other-1") == {}


async def test_a_cache_that_held_nothing_proves_nothing(probed: Probed) -> None:
    class Forgets(FakeSampler):
        async def call(self, *args: Any, **more: Any) -> Any:
            self.seen.clear()
            return await super().call(*args, **more)

    found = (await probed(Forgets()))["prefix_cache"]
    assert found.agrees is None and found.detail.startswith("nothing of the prompt was cached")
