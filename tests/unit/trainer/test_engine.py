"""The real engine on one rank, against plain torch and against itself undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadRequest, Failed
from shared.job import Job
from shared.weights.folders import adapter_digests, digest_of
from shared.wire import Canary, Example, Logprobs, Span, TokenIds
from tests.support.engine_ranks import SPREAD_SMALL, a_job, an_engine, train
from tests.support.tiny_models import make_tiny_model, save_tokenizer
from tests.support.trainer_reference import (
    EXAMPLE_WITH_A_NAN,
    TEMPERATURE,
    batch_without_a_nan,
    clipped,
    difference,
    load,
    logprobs,
    model_with_a_nan,
    named,
    optimizer,
    relative,
    step,
    weights,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def memory(stage: int, **settings: Any) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "micro_batch_tokens": 64,
        "gradient_checkpointing": False,
        "deepspeed": SPREAD_SMALL if stage == 3 else {},
        **settings,
    }


def train_and_rest(job: Job, batches, learning_rate: float, folder: Path) -> set[str]:
    """The same, with what an update needs put away between two: returns the devices and dtypes of
    the weights meanwhile."""
    engine = an_engine(job)
    seen = set[str]()
    for batch in batches:
        engine.update(batch, learning_rate)
        engine.offload()
        engine.offload()
        seen |= {f"{tensor.device}, {tensor.dtype}" for tensor in engine.live_weights().values()}
        engine.canary()
        (folder / "state").mkdir(parents=True, exist_ok=True)
        engine.save_state(folder / "state")
        engine.reload()
        engine.reload()
    engine.save_weights(folder)
    engine.close()
    return seen


@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_that_rests_between_updates_learns_the_same(
    rank, model, examples, tmp_path, stage
):
    job = a_job(model, memory=memory(stage))
    batches = [examples[:6], examples[6:], examples]
    rank.call(train, job, batches, 0.1, tmp_path / "plain")
    seen = rank.call(train_and_rest, job, batches, 0.1, tmp_path / "rested")
    assert seen == {"cpu, torch.float32"}
    assert digest_of(tmp_path / "rested") == digest_of(tmp_path / "plain")


# --- several optimizer steps ---------------------------------------------------------------------


LINEAR = {"max_grad_norm": 1e-7}
"""Gradients far below Adam's epsilon, so that rounding noise in an element's gradient does not
decide the sign of its update."""


@pytest.mark.parametrize(
    "correction", [{"ratio_base": "sampler"}, {"method": "token_tis", "high": 1.1}]
)
def test_epochs_and_minibatches_equal_a_plain_torch_transcription(
    rank, model, examples, tmp_path, correction
):
    import torch

    from services.trainer.learning.batch import deal

    beta, rate, decay = 0.05, 0.1, 0.1
    training = {"epochs": 2, "minibatches": 3, "beta": beta, "weight_decay": decay, **LINEAR}
    job = a_job(model, training=training, memory=memory(2), correction=correction)
    (update,) = rank.call(train, job, [examples], rate, tmp_path / "ours")

    policy, reference = load(model), load(model)
    adamw = optimizer(policy, rate, decay)
    mean_tokens = sum(len(example.token_ids) for example in examples) / 3
    shares = deal(examples, 3, job.seed)
    assert sorted(len(share) for share in shares) == [4, 4, 4]
    with torch.no_grad():
        before = {id(e): logprobs(policy, e.prompt_token_ids, e.token_ids) for e in examples}
        anchor = {id(e): logprobs(reference, e.prompt_token_ids, e.token_ids) for e in examples}
    norms, entropies = [], {}
    for _ in range(2):
        for share in shares:
            total = torch.zeros(())
            for e in share:
                entropies[id(e)] = entropies_of(policy, e)
                new, sampler = (
                    logprobs(policy, e.prompt_token_ids, e.token_ids),
                    torch.tensor(e.old_logprobs),
                )
                weight = (before[id(e)] - sampler).exp().clamp(max=1.1)
                old = before[id(e)]
                if "ratio_base" in correction:
                    weight, old = 1.0, sampler
                log_ratio = anchor[id(e)] - new
                kl = log_ratio.exp() - 1 - log_ratio
                total = (
                    total
                    + (weight * clipped((new - old).exp(), e.advantage) + beta * kl).sum()
                    / mean_tokens
                )
            norms.append(step(policy, adamw, total, LINEAR["max_grad_norm"]))
    assert update.num_updates == 6
    assert update.grad_norm == pytest.approx(sum(norms) / 6, rel=1e-5)
    for told, of_example in ((update.logprobs, before), (update.entropies, entropies)):
        expected = torch.cat([of_example[id(e)] for e in examples]).tolist()
        assert list(told) == pytest.approx(expected, abs=1e-5)
    start = named(load(model))
    assert (
        relative(difference(weights(tmp_path / "ours"), start), difference(named(policy), start))
        < 1e-5
    )


def learn_then_reinforce(job: Job, given, sampled, rates, folder: Path) -> list:
    """A supervised update, and one of the job's own loss; the weights after each are in
    `folder`."""
    engine = an_engine(job)
    updates = [engine.update(given, rates[0], supervised=True)]
    engine.save_weights(folder / "learned")
    updates.append(engine.update(sampled, rates[1]))
    engine.save_weights(folder / "reinforced")
    engine.close()
    return updates


def test_a_supervised_update_is_transformers_loss_and_changes_no_later_one(
    rank, model, examples, tmp_path
):
    """The job has a temperature of 0.8 and a KL term: neither is of supervised steps."""
    import torch

    given = tuple(
        Example(prompt_token_ids=e.prompt_token_ids, token_ids=e.token_ids, advantage=1.0)
        for e in examples
    )
    training = {"beta": 0.05, **LINEAR}
    job = a_job(model, training=training, memory=memory(2), warmup={"steps": 1})
    (tmp_path / "learned").mkdir()
    (tmp_path / "reinforced").mkdir()
    updates = rank.call(learn_then_reinforce, job, given, examples, (0.1, 0.2), tmp_path)

    policy, reference = load(model), load(model)
    adamw = optimizer(policy, 0.1)
    num_tokens, total = sum(len(e.token_ids) for e in given), torch.zeros(())
    for e in given:
        ids = torch.tensor([[*e.prompt_token_ids, *e.token_ids]])
        labels = ids.clone()
        labels[:, : len(e.prompt_token_ids)] = -100
        loss = policy(input_ids=ids, labels=labels).loss  # the mean over the sequence's tokens
        total = total + loss * len(e.token_ids) / num_tokens
    norm = step(policy, adamw, total, LINEAR["max_grad_norm"])
    learned = named(policy)
    assert updates[0].loss == pytest.approx(total.item(), rel=1e-5)
    assert updates[0].grad_norm == pytest.approx(norm, rel=1e-5)
    assert "kl" not in updates[0].metrics

    adamw.param_groups[0]["lr"] = adamw.param_groups[1]["lr"] = 0.2
    total = torch.zeros(())
    for e in examples:
        new = logprobs(policy, e.prompt_token_ids, e.token_ids)
        with torch.no_grad():
            log_ratio = logprobs(reference, e.prompt_token_ids, e.token_ids) - new
        log_ratio = log_ratio + new.detach() - new
        kl = log_ratio.exp() - 1 - log_ratio
        total = total + (clipped((new - new.detach()).exp(), e.advantage) + 0.05 * kl).sum()
    step(policy, adamw, total / num_tokens, LINEAR["max_grad_norm"])
    start = named(load(model))
    for name, expected, before in (
        ("learned", learned, start),
        ("reinforced", named(policy), learned),
    ):
        ours = difference(weights(tmp_path / name), before)
        assert relative(ours, difference(expected, before)) < 1e-4, name
    assert updates[1].metrics["kl"] > 0


def num_passes(job: Job, given) -> tuple[int, float]:
    """How many forward passes of the policy a supervised update takes, and how many micro-batches
    it trains on."""
    engine, passes = an_engine(job), []
    engine._parts.updater.policy.register_forward_pre_hook(lambda *_: passes.append(1))
    update = engine.update(given, 0.1, supervised=True)
    engine.close()
    return len(passes), update.metrics["num_micro_batches"]


def test_a_supervised_update_of_two_epochs_computes_no_pass_that_its_loss_ignores(
    rank, model, examples
):
    job = a_job(model, training={"epochs": 2}, memory=memory(2), warmup={"steps": 1})
    passes, num_micro_batches = rank.call(num_passes, job, examples)
    assert passes == num_micro_batches > 2


def entropies_of(network, example):
    """Returns the entropies `[T]`, in nats, before each of the example's tokens."""
    import torch

    ids = torch.tensor([[*example.prompt_token_ids, *example.token_ids]])
    with torch.no_grad():
        logits_TV = network(ids).logits[0, len(example.prompt_token_ids) - 1 : -1] / TEMPERATURE
    return torch.distributions.Categorical(logits=logits_TV).entropy()


def test_the_first_ratio_is_exactly_one_with_and_without_a_frozen_pass(
    rank, model, examples, tmp_path
):
    for epochs, correction in ((1, {"method": "token_tis"}), (2, {})):
        training = {"epochs": epochs, "learning_rate": 0.0}
        job = a_job(model, training=training, memory=memory(2), correction=correction)
        (update,) = rank.call(train, job, [examples], 0.0, tmp_path / "weights")
        assert update.metrics["ratio/mean"] == 1.0
        assert update.metrics["kl/old_k3"] == 0.0
        assert update.metrics["mismatch/logprob_diff_mean"] == pytest.approx(
            0.16, abs=0.02
        )  # E|N(0, 0.2)|


def test_the_loss_is_the_batchs_where_there_are_fewer_examples_than_minibatches(
    rank, model, examples, tmp_path
):
    whole, dealt = (
        rank.call(
            train,
            a_job(model, training={"minibatches": minibatches}, memory=memory(2)),
            [examples[:3]],
            0.0,
            tmp_path / str(minibatches),
        )[0]
        for minibatches in (1, 5)
    )
    assert (whole.num_updates, dealt.num_updates) == (1, 3)
    assert dealt.loss == pytest.approx(whole.loss, rel=1e-5)


# --- stages, dtypes, memory ----------------------------------------------------------------------


def test_zero_3_publishes_the_bytes_of_zero_2_with_tied_embeddings_written_once(
    rank, model, tmp_path
):
    for stage in (2, 3):
        rank.call(train, a_job(model, memory=memory(stage)), [], 0.0, tmp_path / str(stage))
    assert "lm_head.weight" not in weights(tmp_path / "2")
    assert (tmp_path / "2" / "model.safetensors").read_bytes() == (
        tmp_path / "3" / "model.safetensors"
    ).read_bytes()


def test_in_bfloat16_stages_0_to_2_add_up_micro_batches_in_float32_and_step_alike(
    rank, examples, tmp_path
):
    """To the last bit: no clipping, whose norm is a sum over differently cut pieces; and no tied
    weights, whose two gradients torch adds up in bfloat16 before DeepSpeed sees them at stages 1
    and 2. ZeRO-3 has linear layers of its own."""
    model, published = make_tiny_model(tmp_path / "model", tie_word_embeddings=False), {}
    for stage in (0, 1, 2):
        job = a_job(
            model, training={"dtype": "bfloat16", "max_grad_norm": 1e9}, memory=memory(stage)
        )
        rank.call(train, job, [examples] * 2, 1e-3, tmp_path / str(stage))
        published[stage] = (tmp_path / str(stage) / "model.safetensors").read_bytes()
    assert (
        published[0] == published[1] == published[2] != (model / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bfloat16_an_offloaded_optimizer_adds_up_100_micro_batches_in_float32(
    rank, model, examples, tmp_path, stage
):
    """Added up in bfloat16, which has 8 bits, 100 equal ones would lose more than a percent."""
    job = a_job(
        model,
        training={"dtype": "bfloat16"},
        memory=memory(stage, offload_optimizer=True, micro_batch_tokens=1),
    )
    updates = rank.call(train, job, [examples[:1], examples[:1] * 100], 0.0, tmp_path / "weights")
    assert [update.metrics["num_micro_batches"] for update in updates] == [1, 100]
    assert updates[1].grad_norm == pytest.approx(updates[0].grad_norm, rel=1e-3)


def test_an_offloaded_optimizer_makes_the_same_update(rank, model, examples, tmp_path):
    start, updates = weights(model), {}
    for stage, offload in ((2, False), (1, True), (2, True), (3, True)):
        training = {"weight_decay": 0.01, **LINEAR}
        job = a_job(model, training=training, memory=memory(stage, offload_optimizer=offload))
        rank.call(train, job, [examples] * 2, 1.0, tmp_path / f"{stage}{offload}")
        updates[stage, offload] = difference(weights(tmp_path / f"{stage}{offload}"), start)
    for name, update in updates.items():
        assert relative(update, updates[2, False]) < 1e-6, name


def test_recomputed_layers_with_adapters_make_the_same_update(rank, model, examples, tmp_path):
    lora = {"rank": 4, "alpha": 64.0}
    for name, settings in (
        ("kept", {}),
        ("recomputed", {"gradient_checkpointing": True, "chunk_tokens": 8}),
    ):
        job = a_job(model, memory=memory(3, **settings), training=LINEAR, lora=lora)
        rank.call(train, job, [examples] * 2, 1.0, tmp_path / name)
    start = weights(model)
    kept, recomputed = (
        difference(weights(tmp_path / name), start) for name in ("kept", "recomputed")
    )
    assert relative(recomputed, kept) < 1e-5


def is_freed(job: Job, examples) -> bool:
    import gc
    import weakref

    engine = an_engine(job)
    engine.update(examples, 1e-3)
    model = weakref.ref(engine._parts.model)
    engine.close()
    gc.collect()
    return model() is None


@pytest.mark.parametrize("stage", [2, 3])
def test_a_closed_engine_leaves_no_model_in_memory(rank, model, examples, stage):
    job = a_job(model, training={"beta": 0.1}, memory=memory(stage))
    assert rank.call(is_freed, job, examples)


# --- what goes wrong -----------------------------------------------------------------------------


def disturbed(job: Job, examples, folder: Path, disturb: str) -> str:
    """Two updates, with one between them that runs out of memory in its n-th forward or backward
    pass, or without. Returns the error; the weights are in `folder`."""
    import torch

    engine = an_engine(job)
    engine.update(examples, 1e-2)
    error = ""
    if disturb:
        direction, _, last = disturb.partition(" ")
        passes = 0

        def fail(*_, **__):
            nonlocal passes
            passes += 1
            if passes == int(last):
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. See documentation")

        layer = engine._parts.model.model.layers[0]
        handle = (
            layer.register_forward_pre_hook(fail)
            if direction == "forward"
            else layer.mlp.register_full_backward_hook(fail)
        )
        try:
            engine.update(examples, 1e-2)
        except Failed as failed:
            error = str(failed)
        handle.remove()
    engine.update(examples, 1e-2)
    engine.save_weights(folder)
    engine.close()
    return error


@pytest.mark.parametrize(
    ("stage", "disturb", "offload", "training"),
    [
        pytest.param(0, "backward 2", False, {}, marks=pytest.mark.soak),
        pytest.param(1, "backward 2", False, {}, marks=pytest.mark.soak),
        (2, "backward 2", True, {}),
        (3, "forward 18", False, {}),
        (
            0,
            "backward 10",
            False,
            {"minibatches": 2},
        ),  # in the second optimizer step, when the first has moved the weights
        pytest.param(2, "backward 10", False, {"minibatches": 2}, marks=pytest.mark.soak),
        (1, "backward 10", False, {"minibatches": 2, "dtype": "bfloat16"}),
        pytest.param(3, "backward 10", False, {"minibatches": 2}, marks=pytest.mark.soak),
    ],
)
def test_an_update_that_ran_out_of_memory_is_as_if_it_had_never_come(
    rank, model, examples, tmp_path, stage, disturb, offload, training
):
    """Dropout draws random numbers, which an update that is taken back must give back too. Each
    micro-batch is one sequence, so that smaller ones would not help."""
    job = a_job(
        model,
        training=training,
        memory=memory(stage, offload_optimizer=offload, micro_batch_tokens=1),
        lora={"rank": 2, "dropout": 0.5, "alpha": 64.0},
    )
    assert rank.call(disturbed, job, examples, tmp_path / "plain", "") == ""
    error = rank.call(disturbed, job, examples, tmp_path / "disturbed", disturb)
    assert "OutOfMemoryError: Tried to allocate 2.00 GiB" in error
    assert "the weights and the optimizer are as they were" in error
    assert (
        "memory.chunk_tokens from 1024 to 512; memory.gradient_checkpointing from false to true"
        in error
    )
    assert f"optimizer step {2 if 'minibatches' in training else 1} of" in error
    assert digest_of(tmp_path / "plain") != digest_of(model)
    assert digest_of(tmp_path / "disturbed") == digest_of(tmp_path / "plain")


def run_out_of_memory(job: Job, small, large, folder: Path) -> float:
    """Two updates on `small`, with one between them on `large` that this process may not have the
    memory for at once. Returns the tokens of a micro-batch that fitted."""
    import re
    import resource

    engine = an_engine(job)
    engine.update(small, 1e-2)
    used_bytes = (
        int(re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    )
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (64 << 20), limits[1]))
    update = engine.update(large, 1e-2)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    engine.update(small, 1e-2)
    engine.save_weights(folder)
    engine.close()
    return update.metrics["memory/micro_batch_tokens"]


def test_a_rank_that_runs_out_of_memory_trains_on_in_smaller_micro_batches(
    rank, examples, tmp_path
):
    """Attention that keeps its scores needs 4 heads * 100 rows * 250^2 tokens * 4 bytes = 100 MB
    for each tensor, with 64 MiB allowed. The update is the one that smaller micro-batches would
    have made from the beginning, to the bit."""
    from shared.wire import Example

    model = make_tiny_model(tmp_path / "model")
    settings = memory(2, attention="eager", micro_batch_tokens=25_000, packing="off")
    job = a_job(model, memory=settings)
    long = Example(
        prompt_token_ids=(1,), token_ids=(2,) * 249, old_logprobs=(-4.0,) * 249, advantage=1.0
    )
    tokens = rank.call(run_out_of_memory, job, examples, (long,) * 100, tmp_path / "disturbed")
    assert tokens in (12_500, 6250, 3125, 1500, 750)  # half of what 100, 50, 25, 12, 6 rows take
    small = a_job(model, memory=settings | {"micro_batch_tokens": int(tokens)})
    rank.call(train, small, [examples, (long,) * 100, examples], 1e-2, tmp_path / "plain")
    assert digest_of(tmp_path / "disturbed") == digest_of(tmp_path / "plain")


def recomputed_layers(job: Job, examples, room_bytes: float, fails: bool = False) -> list[bool]:
    """For each update of three, whether layers were computed again, where a rank may take so much
    memory. `fails`: the second one runs out of memory once."""
    import torch

    from services.trainer.zero import update

    update.room_bytes = lambda *_: room_bytes
    engine = an_engine(job)
    updater, found, tries = engine._parts.updater, [], []
    pass_through, model = updater.zero.module.forward, engine._parts.model

    def forward(*given):
        tries.append(model.is_gradient_checkpointing)
        if fails and len(found) == 1 and not tries[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return pass_through(*given)

    updater.zero.module.forward = forward
    for _ in range(3):
        engine.update(examples, 1e-2)
        found.append(tries[-1])
    assert updater.job.memory.micro_batch_tokens == job.memory.micro_batch_tokens
    engine.close()
    return found


def test_layers_are_computed_again_where_the_plan_or_memory_says_so(rank, model, examples):
    job = a_job(model, memory=memory(2, gradient_checkpointing="auto"))
    assert rank.call(recomputed_layers, job, examples, 1e12) == [False] * 3
    assert rank.call(recomputed_layers, job, examples, 1e6) == [True] * 3
    assert rank.call(recomputed_layers, job, examples, 1e12, True) == [False, True, True]
    never = a_job(model, memory=memory(2, gradient_checkpointing=False))
    assert rank.call(recomputed_layers, never, examples, 1e6) == [False] * 3
    always = a_job(model, memory=memory(2, gradient_checkpointing=True))
    assert rank.call(recomputed_layers, always, examples, 1e12) == [True] * 3


def calls_out_of_memory(job: Job, examples, at_the_step: bool) -> tuple[str, float]:
    """Runs out of memory once, in a program's call or at its step, and takes the step. Returns the
    error, and the gradient's norm."""
    import torch

    from shared.wire import Optimization, TokenLoss

    engine = an_engine(job)
    updater, fails, error = engine._parts.updater, [True], ""
    forward = updater.zero.module.forward

    def fail_once(*given):
        if fails and bool(updater.calls) == at_the_step:
            fails.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(*given)

    updater.zero.module.forward = fail_once
    engine.forward_backward(examples, TokenLoss(name="ppo"))
    how = Optimization(learning_rate=0.0)
    try:
        norm = engine.optim_step(how)
    except Failed as failed:
        error, norm = str(failed), engine.optim_step(how)
    assert not fails
    engine.close()
    return error, norm


def test_a_programs_gradient_outlives_a_lack_of_memory(rank, model, examples):
    scored = tuple(
        example.model_copy(update={"old_logprobs": Logprobs([-4.0] * len(example.token_ids))})
        for example in examples
    )
    job = a_job(model, memory=memory(2, gradient_checkpointing="auto"))
    (_, in_call), (error, at_step) = (
        rank.call(calls_out_of_memory, job, scored, at_the_step) for at_the_step in (False, True)
    )
    assert "out of memory in the optimizer step" in error
    assert in_call == at_step > 0


def budgets(job: Job, examples, num_ranks: int) -> tuple[bool, bool, Any, str]:
    """Runs out of memory in each pass, as one of so many ranks. Returns whether the model can do
    gradient checkpointing and whether the job asks for it now, the budget for ranks that come
    after, and the error."""
    import torch
    import torch.distributed as dist

    from services.trainer.engine import OutOfMemory

    engine = an_engine(job)
    updater = engine._parts.updater

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine._parts.model.base_model.forward = fail
    alone, dist.get_world_size = dist.get_world_size, lambda *_: num_ranks
    try:
        engine.update(examples, 1e-2)
    except (Failed, OutOfMemory) as error:
        budget = getattr(error, "budget", None)
        return updater.can_recompute, updater.job.memory.gradient_checkpointing, budget, str(error)
    finally:
        dist.get_world_size = alone
        engine.close()


def test_ranks_that_come_after_do_what_was_not_yet_done(rank, model, examples):
    from services.trainer.engine import PassBudget

    one_by_one = memory(2, gradient_checkpointing="auto", micro_batch_tokens=1)
    found = rank.call(budgets, a_job(model, memory=one_by_one), examples, 2)
    assert found[:3] == (True, "auto", PassBudget(1, recomputes=True))
    assert "gradient_checkpointing" not in found[3]
    always = one_by_one | {"gradient_checkpointing": True}
    assert rank.call(budgets, a_job(model, memory=always), examples, 2)[2] is None


def test_a_model_that_drops_out_is_trained_without_gradient_checkpointing(rank, examples, tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "vocab_size": 64}
    config = transformers.OPTConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, dropout=0.1
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    job = a_job(tmp_path / "opt", memory=memory(2, gradient_checkpointing="auto"))
    can, asks, budget, error = rank.call(budgets, job, examples, 1)
    assert (can, asks, budget) == (False, "auto", None), "it was halved down to a sequence"
    assert "gradient_checkpointing" not in error


def train_dated(job: Job, examples, long, version: int) -> tuple[list[str], dict[str, float]]:
    """What updates of weights two versions too new for the job and of `long` examples raised, and
    the metrics of one."""
    engine, refusals = an_engine(job), []
    for refused, of_version in ((examples, version + 2), (long, version)):
        with pytest.raises(BadRequest) as error:
            engine.update(refused, 1e-2, version=of_version)
        refusals.append(str(error.value))
    metrics = engine.update(examples, 1e-2, version=version).metrics
    engine.close()
    return refusals, metrics


def test_what_is_too_stale_or_too_long_is_refused_and_older_tokens_are_told_apart(
    rank, model, examples
):
    # Of every example the first token is of version 3 and the others of version 4.
    spans = (Span(version=3, start=0), Span(version=4, start=1))
    dated = tuple(
        example.model_copy(update={"spans": spans[: len(example.token_ids)]})
        for example in examples
    )
    job = a_job(model, memory=memory(2), max_staleness=1)
    long = examples[0].model_copy(update={"prompt_token_ids": TokenIds([1] * 256)})
    (stale, too_long), metrics = rank.call(train_dated, job, dated, (examples[1], long), 4)
    length = 256 + len(long.token_ids)
    assert too_long.startswith(f"example 1 of 2 has {length} tokens up to the last sampled one")
    assert stale == (
        f"example 0 of {len(examples)} has tokens that version 3 sampled, from 0 on; expected "
        "versions 5 to 6"
    )
    num_tokens = sum(len(example.token_ids) for example in examples)
    older = len(examples) / num_tokens
    assert metrics["staleness/older_fraction"] == pytest.approx(older)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(older), 1.0)
    diff = "logprob_diff_mean"
    assert metrics[f"mismatch/{diff}"] == pytest.approx(
        older * metrics[f"mismatch/older/{diff}"]
        + (1 - older) * metrics[f"mismatch/current/{diff}"]
    )


def train_and_watch(job: Job, examples) -> tuple[float, list[int]]:
    """Returns how many tokens an update computed, and the canary's tokens after it."""
    engine = an_engine(job)
    try:
        update = engine.update(examples, 1e-2)
        canary = engine.canary()
        return update.metrics["tokens/computed"], list(canary.token_ids) if canary else []
    finally:
        engine.close()


def test_a_model_without_positions_has_no_longest_example(rank, tmp_path):
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4))
    assert not hasattr(bloom.config, "max_position_embeddings")
    bloom.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    long = Example(prompt_token_ids=TokenIds(range(64)), token_ids=[3] * 200, advantage=1.0)
    job = a_job(tmp_path, memory=memory(2), max_model_len=4)
    computed, canary = rank.call(train_and_watch, job, (long, long))
    assert computed == 2 * 264  # it takes no position_ids, so nothing is shared
    assert canary == [11, 58, 41]  # 7919 = 123 x 64 + 47; one token fewer than max_model_len


def meet_nan(job: Job, good, bad, folder: Path) -> tuple[str, Any, str]:
    """An update on `good`, one on `bad`, one on `good`: what the one between gave or raised, and
    the weights' digest before it."""
    engine = an_engine(job)
    engine.update(good, 1e-2)
    engine.save_weights(folder / "before")
    answer, error = None, ""
    try:
        answer = engine.update(bad, 1e-2)
    except Failed as failed:
        error = str(failed)
    engine.save_weights(folder / "after")
    engine.update(good, 1e-2)
    engine.save_weights(folder / "later")
    engine.close()
    assert digest_of(folder / "before") == digest_of(folder / "after")
    return error, answer, digest_of(folder / "later")


def twice(job: Job, good, folder: Path) -> str:
    train(job, [good] * 2, 1e-2, folder)
    return digest_of(folder)


@pytest.mark.parametrize(
    ("stage", "dtype", "minibatches"),
    [
        (0, "bfloat16", 2),
        (1, "bfloat16", 2),
        (2, "float32", 2),
        (3, "float32", 1),
    ],
)
def test_a_batch_with_a_nan_changes_nothing_and_is_refused_or_skipped(
    rank, tmp_path, stage, dtype, minibatches
):
    from services.trainer.learning.batch import deal

    model = model_with_a_nan(tmp_path / "broken")
    good = batch_without_a_nan()
    bad = (EXAMPLE_WITH_A_NAN, *good)
    assert EXAMPLE_WITH_A_NAN in deal(bad, minibatches, 0)[-1], "the last optimizer step"
    jobs = {
        action: a_job(
            model,
            training={"dtype": dtype, "minibatches": minibatches, "on_nonfinite": action},
            memory=memory(stage),
        )
        for action in ("stop", "skip")
    }
    undisturbed = rank.call(twice, jobs["stop"], good, tmp_path / "twice")
    error, answer, later = rank.call(meet_nan, jobs["stop"], good, bad, tmp_path / "stop")
    assert "its gradient is not finite" in error and answer is None and later == undisturbed
    if stage == 2:
        error, answer, later = rank.call(meet_nan, jobs["skip"], good, bad, tmp_path / "skip")
        assert (
            error == ""
            and (answer.skipped, answer.num_updates) == (True, 0)
            and later == undisturbed
        )


# --- LoRA and the reference ----------------------------------------------------------------------


def train_adapters(job: Job, examples, folder: Path) -> tuple[list, bool]:
    """Two updates; writes `published` and `checkpoint`. Returns the updates and whether the base
    weights are as they were."""
    import torch

    engine = an_engine(job)
    base = {
        name: p.clone()
        for name, p in engine._parts.model.named_parameters()
        if ".lora_" not in name and p.numel()
    }
    updates = [engine.update(examples, 1e-2) for _ in range(2)]
    for _ in range(3):
        engine.save_weights(folder / "published")
    for name, save in (("adapter", engine.save_adapter), ("checkpoint", engine.save_checkpoint)):
        (folder / name).mkdir()
        save(folder / name)
    same = all(
        torch.equal(p, base[name])
        for name, p in engine._parts.model.named_parameters()
        if name in base and p.numel()
    )
    engine.close()
    return updates, same


@pytest.mark.parametrize(("stage", "tied"), [(0, True), (2, True), (2, False), (3, True)])
def test_adapters_train_alone_and_are_published_merged_and_exported_apart(
    rank, examples, tmp_path, stage, tied
):
    import torch
    from peft import PeftModel

    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    job = a_job(
        model,
        memory=memory(stage),
        training={"beta": 0.01, "max_grad_norm": 1e9},
        lora={"rank": 4, "alpha": 32.0},
    )
    (first, second), base_stayed = rank.call(train_adapters, job, examples, tmp_path)
    assert base_stayed
    assert first.metrics["kl"] == 0.0, "adapters begin as nothing, so policy and reference are one"
    assert second.metrics["kl"] > 1e-4
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        by_peft = (
            PeftModel.from_pretrained(load(model), str(tmp_path / "checkpoint" / "adapter"))
            .eval()(ids)
            .logits
        )
        published, exported = (
            load(tmp_path / name)(ids).logits for name in ("published", "checkpoint")
        )
        untrained = load(model)(ids).logits
    torch.testing.assert_close(published, by_peft, rtol=1e-5, atol=1e-5)
    apart = adapter_digests(tmp_path / "adapter")
    assert apart == adapter_digests(tmp_path / "checkpoint" / "adapter")
    assert len(apart) == 2 * 7 * 2 + 1, "A and B of 7 layers in 2 blocks, and the configuration"
    torch.testing.assert_close(exported, published, rtol=0, atol=0)
    assert digest_of(tmp_path / "published") == digest_of(tmp_path / "checkpoint")
    configs = [
        (tmp_path / name / "config.json").read_text() for name in ("published", "checkpoint")
    ]
    assert configs[0] == configs[1]
    assert (published - untrained).abs().max() > 1e-2
    names = weights(tmp_path / "published").keys()
    assert names == weights(model).keys(), "the names of the plain model, tied weights once"
    assert ("lm_head.weight" in names) is not tied


def canary_around_an_update(job: Job, examples, folder: Path) -> tuple[Canary, Canary, str]:
    """The canaries before and after an update, whose weights are in `folder`, and the digest of
    those after one more, by which a canary in between must show in nothing."""
    engine = an_engine(job)
    before = engine.canary()
    engine.update(examples, 1e-2)
    after = engine.canary()
    engine.save_weights(folder / "after")
    engine.update(examples, 1e-2)
    engine.save_weights(folder / "more")
    engine.close()
    assert before is not None and after is not None
    return before, after, digest_of(folder / "more")


@pytest.mark.parametrize(("stage", "lora"), [(2, None), (3, None), (2, {"rank": 4, "alpha": 32.0})])
def test_the_canary_is_what_the_published_weights_give_at_temperature_1(
    rank, model, examples, tmp_path, stage, lora
):
    import torch

    job = a_job(model, memory=memory(stage), max_model_len=30, **({"lora": lora} if lora else {}))
    before, after, more = rank.call(canary_around_an_update, job, examples, tmp_path)
    ids = torch.tensor(list(after.token_ids))
    assert (len(ids), after.dtype, before.token_ids) == (29, "float32", after.token_ids)
    for canary, folder in ((before, model), (after, tmp_path / "after")):
        with torch.no_grad():
            all_TV = torch.log_softmax(load(folder)(ids[None]).logits[0], -1)
        expected = [all_TV[t - 1, ids[t]].item() for t in range(1, len(ids))]
        assert list(canary.logprobs) == pytest.approx(expected, abs=1e-4)
        assert 1e-8 < canary.noise < 1e-4
    assert list(before.logprobs) != pytest.approx(list(after.logprobs), abs=1e-3)
    rank.call(train, job, [examples, examples], 1e-2, tmp_path / "without")
    assert digest_of(tmp_path / "without") == more


def move_then_stand_still(job: Job, examples) -> list:
    """Three updates; the second and third are of the same weights, and draw other dropout."""
    engine = an_engine(job)
    updates = [engine.update(examples, learning_rate) for learning_rate in (1e-2, 0.0, 0.0)]
    engine.close()
    return updates


@pytest.mark.parametrize(("loss", "minibatches"), [("dapo", 2), ("gspo", 1)])
def test_dropout_is_in_the_passes_that_train_and_not_in_the_first_ratio(
    rank, model, examples, loss, minibatches
):
    """The frozen pass sees the policy without it: twice the same difference from the sampler."""
    training = {"loss": loss, "minibatches": minibatches, "clip_low": 3e-4, "clip_high": 4e-4}
    lora = {"rank": 4, "alpha": 64.0, "dropout": 0.5}
    job = a_job(model, training=training, memory=memory(2), lora=lora)
    _, second, third = rank.call(move_then_stand_still, job, examples)
    name = "mismatch/logprob_diff_mean"
    assert second.metrics[name] == third.metrics[name]
    assert second.metrics["entropy"] != third.metrics["entropy"]
    for update in (second, third):
        assert (update.metrics["ratio/mean"] == 1.0) is (minibatches == 1)
        assert update.metrics["clip_ratio/region_mean"] <= (0.0 if minibatches == 1 else 0.5)


def test_the_reference_is_the_model_that_the_job_began_with(rank, model, examples, tmp_path):
    import torch

    jobs = {
        stage: a_job(model, memory=memory(stage), training={"beta": 0.1, "kl": "k1"})
        for stage in (2, 3)
    }
    once = rank.call(train, jobs[2], [examples], 1e-2, tmp_path / "once")
    policy, reference = load(tmp_path / "once"), load(model)
    with torch.no_grad():
        both = [
            [logprobs(m, e.prompt_token_ids, e.token_ids) for e in examples]
            for m in (policy, reference)
        ]
    expected = (torch.cat(both[0]) - torch.cat(both[1])).mean().item()
    for stage, job in jobs.items():
        first, second = rank.call(train, job, [examples] * 2, 1e-2, tmp_path / str(stage))
        assert first.metrics["kl"] == 0.0
        assert second.metrics["kl"] == pytest.approx(expected, rel=1e-4)
        assert stage == 3 or [first] == once
