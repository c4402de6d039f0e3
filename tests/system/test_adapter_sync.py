"""Adapters on the real engine: what it computes with one is what PEFT computes, and what the merged
weights give; several serve side by side; a load that went wrong is caught by name.

One engine, in this process; the trainer is its publisher and Hugging Face models with adapters that
change at random. torch is imported where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.orchestrator.samplers import canary
from services.rollout.engine import Adapter
from services.rollout.weights.adapters import one_call
from shared.errors import Failed
from shared.weights.folders import WEIGHTS
from shared.wire import (
    GenerateRequest,
    Sampling,
    TokenIds,
    WeightsRef,
)
from tests.support.adapter_bench import SEQUENCES, Bench, Trainer, a_bench
from tests.support.in_process import in_process
from tests.support.trl_server import AdapterRollouts, grpo_trainer, vllm_client

pytestmark = [
    pytest.mark.clients,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with a_bench(tmp_path_factory.mktemp("adapters")) as bench:
        yield bench


async def hones_logprobs(bench: Bench, ids: list[int], first: int) -> list[float]:
    engine = await bench.sampler.ready_engine()
    return (await engine.logprobs(ids))[first - 1 :]


async def test_trls_client_samples_chats_and_scores_as_hones_own_routes_do(bench: Bench) -> None:
    client = await asyncio.to_thread(vllm_client, bench.url)
    assert client.model == str(bench.model)
    assert await asyncio.to_thread(client.get_world_size) == 1
    options = {"n": 2, "max_tokens": 6, "temperature": 0.7}
    sampled = await asyncio.to_thread(client.generate, [[5, 6, 7], [8, 9]], **options)
    assert sampled["prompt_ids"] == [[5, 6, 7], [8, 9]]
    chat = [[{"role": "user", "content": "ab"}]]
    chatted = await asyncio.to_thread(client.chat, chat, max_tokens=6)
    assert chatted["prompt_ids"] == [[3, 4, 2, 28]]
    for ids, logprobs in zip(chatted["completion_ids"], chatted["logprobs"], strict=True):
        ours = await hones_logprobs(bench, [3, 4, 2, 28, *ids], 4)
        assert [one for (one,) in logprobs] == pytest.approx(ours, abs=1e-4)
    sequences = [[5, 6, 7, *sampled["completion_ids"][0]], [8, 9, *sampled["completion_ids"][2]]]
    scored = await asyncio.to_thread(
        client.get_sequence_logprobs, sequences, [3, 2], top_logprobs=40
    )
    assert {len(top) for of in scored["logprobs"] for top in of} == {40}
    for ids, first, scores in zip(sequences, (3, 2), scored["actual_logprobs"], strict=True):
        ours = await hones_logprobs(bench, ids, first)
        seen = [(one, mine) for (one,), mine in zip(scores, ours, strict=True) if one > -9e9]
        assert len(seen) > 2, "of 64 tokens, the 40 likeliest"
        assert [one for one, _ in seen] == pytest.approx([mine for _, mine in seen], abs=1e-4)


async def test_trls_grpo_trains_with_adapters_that_the_sampler_reads_from_its_folder(
    bench: Bench, tmp_path: Path
) -> None:
    rollouts = AdapterRollouts(bench.url, tmp_path)

    def train() -> None:
        grpo_trainer(bench.model, tmp_path / "out", rollout_func=rollouts).train()

    await asyncio.to_thread(train)
    assert len(rollouts.sampled) == 2
    for step in rollouts.sampled:
        for _, sampler, trainer in step:
            assert sampler == pytest.approx(trainer, abs=1e-4)
    (ids, _, ours), *_ = rollouts.sampled[1]
    before = await hones_logprobs(bench, [5, 6, *ids], 2)
    assert ours != pytest.approx(before, abs=1e-3), "the first step changed nothing"
    assert set(bench.adapter_names()) == {"trl-policy-v1"}


async def test_trls_grpo_in_server_mode_is_refused_at_once(bench: Bench, tmp_path: Path) -> None:
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": bench.url}
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        async with asyncio.timeout(60):
            await asyncio.to_thread(grpo_trainer, bench.model, tmp_path, config=server)


async def test_after_each_step_the_engine_computes_as_peft_and_as_the_merged_weights(
    bench: Bench,
) -> None:
    trainer = bench.trainer("job")
    for _ in range(4):
        trainer.step()
        serving = await bench.sync(trainer)
        assert await bench.largest_gap(trainer) < 1e-3
        checked = await bench.sampler.check_weights()
        assert (checked.version, checked.differing, checked.unread) == (trainer.version, (), ())
        assert checked.num_tensors == 26 + 2 * 7 * 2
    assert serving.paused_s == 0.0
    engine = await bench.sampler.ready_engine()
    with_adapter = [await engine.logprobs(ids, bench.adapter("job")) for ids in SEQUENCES]
    trainer.version += 1  # the same weights, merged
    await bench.sync(trainer, "shm")
    assert bench.adapter("job") is None
    merged = [await engine.logprobs(ids) for ids in SEQUENCES]
    assert np.abs(np.subtract(with_adapter, merged)).max() < 1e-3
    trainer.step()
    await bench.sync(trainer)  # beside the model's own weights again
    assert await bench.largest_gap(trainer) < 1e-3


async def test_a_completion_is_of_one_version_from_its_first_token_to_its_last(
    bench: Bench,
) -> None:
    trainer = bench.trainer("job")
    trainer.step()
    await bench.sync(trainer)
    request = GenerateRequest(
        prompt_token_ids=TokenIds((5, 6)), sampling=Sampling(n=2, max_tokens=4, seed=1)
    )
    for rollout in (await bench.sampler.generate(request)).rollouts:
        assert rollout.versions == (trainer.version,)
        ours = trainer.logprobs([5, 6, *rollout.token_ids])[1:]
        assert np.abs(np.subtract(ours, list(rollout.logprobs))).max() < 1e-3


async def test_adapters_side_by_side_are_called_by_their_jobs_and_answer_their_own(
    bench: Bench,
) -> None:
    trainers = [bench.trainer(job_id) for job_id in ("one", "two")]
    for trainer in trainers:
        trainer.step(0.2)
        await bench.sync(trainer)
    for trainer in trainers:
        assert await bench.largest_gap(trainer) < 1e-3
    names = {trainer.job_id: f"{trainer.job_id}/v1-0.{trainer.epoch}" for trainer in trainers}
    app = (await bench.sampler.ready_engine()).openai
    async with in_process(app) as http:
        listed = (await http.get("/models")).json()["data"]
        assert {card["id"]: card["root"] for card in listed if card["parent"]} == names
        for trainer in trainers:
            body = {"model": trainer.job_id, "prompt": [5, 6, 7], "max_tokens": 1, "logprobs": 0}
            body |= {"temperature": 1, "return_token_ids": True}
            with one_call():
                answer = (await http.post("/completions", json=body)).json()
            (choice,) = answer["choices"]
            (token,) = choice["token_ids"]
            (logprob,) = choice["logprobs"]["token_logprobs"]
            assert answer["model"] == names[trainer.job_id]
            assert logprob == pytest.approx(trainer.logprobs([5, 6, 7, token])[-1], abs=1e-3)
        gone = await http.post("/completions", json={"model": "job", "prompt": "w5"})
        assert gone.status_code == 404
        assert "The model `job` does not exist" in gone.json()["error"]["message"]


async def bytes_flipped(new: dict[str, Any], old: dict[str, Any]) -> tuple[str, ...]:
    name = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
    new[name][1, 3] *= -2
    return (name,)


async def one_tensor_skipped(new: dict[str, Any], old: dict[str, Any]) -> tuple[str, ...]:
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    new[name] = old[name]
    return (name,)


async def in_the_wrong_tensor(new: dict[str, Any], old: dict[str, Any]) -> tuple[str, ...]:
    gate, up = (
        f"base_model.model.model.layers.0.mlp.{name}_proj.lora_B.weight" for name in ("gate", "up")
    )
    new[gate], new[up] = new[up].clone(), new[gate].clone()
    return (gate, up)


async def plant(bench: Bench, trainer: Trainer, fault: Any) -> Any:
    """Makes the engine load what `fault` makes of the files of the next load; returns what puts it
    right again, and the names of the tensors that it damaged."""
    from safetensors.torch import load_file, save_file

    engine = await bench.sampler.ready_engine()
    before = bench.adapter(trainer.job_id)
    assert before is not None
    old, load = load_file(before.folder / WEIGHTS), engine.load_adapter
    damaged: list[str] = []

    async def faulty(adapter: Adapter) -> None:
        planted = bench.folder / f"planted-{adapter.number}"
        planted.mkdir()
        for file in adapter.folder.iterdir():
            (planted / file.name).write_bytes(file.read_bytes())
        new = load_file(planted / WEIGHTS)
        damaged.extend(await fault(new, old))
        save_file(new, planted / WEIGHTS)
        await load(replace(adapter, folder=planted))

    engine.load_adapter = faulty  # type: ignore[method-assign]
    return engine, load, damaged


@pytest.mark.parametrize("fault", [bytes_flipped, one_tensor_skipped, in_the_wrong_tensor])
async def test_an_adapter_that_went_wrong_inside_the_engine_is_caught_by_name(
    bench: Bench, fault: Any
) -> None:
    trainer = bench.trainer("job")
    trainer.step(0.2)
    await bench.sync(trainer)
    trainer.step(0.2)
    engine, load, damaged = await plant(bench, trainer, fault)
    try:
        serving = await bench.sampler.reload_weights(ref := trainer.publish("lora"))
    finally:
        engine.load_adapter = load
    assert ref.root.canary
    assert "the log-probs of the canary differ" in str(canary.fault(ref.root.canary, serving))
    assert (await bench.sampler.check_weights()).differing == tuple(sorted(damaged))
    again = ref.root.model_copy(update={"again": True})
    healed = await bench.sampler.reload_weights(WeightsRef(again))
    assert canary.fault(ref.root.canary, healed) is None
    assert (await bench.sampler.check_weights()).differing == ()


async def test_the_adapter_before_under_the_label_of_the_new_one_is_refused(bench: Bench) -> None:
    async def only_the_label(new: dict[str, Any], old: dict[str, Any]) -> tuple[str, ...]:
        new |= old
        return ()

    trainer = bench.trainer("job")
    trainer.step(0.2)
    await bench.sync(trainer)
    trainer.step(0.2)
    engine, load, _ = await plant(bench, trainer, only_the_label)
    try:
        with pytest.raises(Failed, match="of the canary did not change at all") as refused:
            await bench.sampler.reload_weights(trainer.publish("lora"))
    finally:
        engine.load_adapter = load
    assert refused.value.code == "not_loaded"
    trainer.step()
    await bench.sync(trainer)
    assert await bench.largest_gap(trainer) < 1e-3


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_twenty_adapters_agree_with_peft_and_new_engines_of_the_merged_weights(
    bench: Bench,
) -> None:
    """One engine through all steps, and then a new one for each step, with the adapter merged into
    the weights it starts from."""
    trainer = bench.trainer("job")
    engine = await bench.sampler.ready_engine()
    kept: list[dict[str, Any]] = []
    with_adapter: list[Any] = []
    to_peft = to_new = 0.0
    for _ in range(20):
        trainer.step()
        await bench.sync(trainer)
        adapter = bench.adapter("job")
        found = np.array([await engine.logprobs(ids, adapter) for ids in SEQUENCES])
        ours = np.array([trainer.logprobs(ids) for ids in SEQUENCES])
        to_peft = max(to_peft, np.abs(found - ours).max())
        kept.append({name: value.clone() for name, value in trainer.network.state_dict().items()})
        with_adapter.append(found)
    print(f"largest gap to PEFT over 20 steps: {to_peft:.1e}")
    assert to_peft < 1e-3
    for step, (weights, found) in enumerate(zip(kept, with_adapter, strict=True), 1):
        trainer.version += 1
        trainer.network.load_state_dict(weights)
        await bench.sync(trainer, "restart")
        engine = await bench.sampler.ready_engine()
        anew = np.array([await engine.logprobs(ids) for ids in SEQUENCES])
        to_new = max(to_new, np.abs(found - anew).max())
        print(f"largest gap to a new engine, after step {step}: {to_new:.1e}")
    assert to_new < 1e-3
