"""Order, repetition and replacement: what the trainer remembers about the weights it holds."""

import pytest

from services.trainer.processes.launcher import RestartHistory
from services.trainer.publishing import Publisher
from shared.errors import BadRequest, Conflict, Failed, StateLost
from shared.job import LoraSpec
from shared.wire import (
    CheckpointRequest,
    ForwardBackwardRequest,
    Optimization,
    OptimStepRequest,
    PublishRequest,
    StepTotals,
    TokenLoss,
)
from tests.support.trainer_fakes import (
    EXAMPLE,
    job_request,
    loaded_trainer,
    make_trainer,
    step_request,
)


def test_a_retried_step_moves_weights_once(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    first = trainer.train_step(step_request(1))
    assert trainer.train_step(step_request(1)) is first
    assert engines[0].num_updates == 1
    assert trainer.state().step == 1


def test_the_same_step_with_another_body_is_a_conflict(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    trainer.train_step(step_request(1))
    with pytest.raises(Conflict, match="step 1 was already applied, with another body"):
        trainer.train_step(step_request(1, examples=(EXAMPLE, EXAMPLE)))
    assert engines[0].num_updates == 1


def test_the_totals_of_the_batch_as_sampled_reach_the_engine(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    totals = StepTotals(num_sequences=256, num_tokens=9000)
    trainer.train_step(step_request(1).model_copy(update={"totals": totals}))
    trainer.train_step(step_request(2))
    assert engines[0].totals == [totals, None]
    assert engines[0].versions == [0, 1]


@pytest.mark.parametrize(
    ("step", "sentence"), [(3, "got step 3, expected 2"), (7, "got step 7, expected 2")]
)
def test_a_step_out_of_order_is_a_conflict(tmp_path, step, sentence):
    trainer, _ = loaded_trainer(tmp_path)
    trainer.train_step(step_request(1))
    with pytest.raises(Conflict, match=sentence):
        trainer.train_step(step_request(step))
    trainer.train_step(step_request(2))
    with pytest.raises(Conflict, match="got step 1, expected 3"):
        trainer.train_step(step_request(1))


def call(step: int, **changes: object) -> ForwardBackwardRequest:
    fenced = step_request(step).model_dump(include={"job_id", "attempt", "epoch", "step"})
    given = {"examples": (EXAMPLE,), "loss": TokenLoss(name="ppo"), **changes}
    return ForwardBackwardRequest(**fenced, **given)


def optim(step: int) -> OptimStepRequest:
    fenced = step_request(step).model_dump(include={"job_id", "attempt", "epoch", "step"})
    return OptimStepRequest(**fenced, optimization=Optimization(learning_rate=1.0))


def test_operations_of_a_program_are_numbered_and_each_happens_once(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    first = trainer.forward_backward(call(1))
    assert trainer.forward_backward(call(1)) is first
    with pytest.raises(Conflict, match="step 1 was already applied, with another body"):
        trainer.forward_backward(call(1, loss=TokenLoss(name="dro")))
    with pytest.raises(Conflict, match="step 1 was already applied, with another body"):
        trainer.optim_step(optim(1))
    with pytest.raises(Conflict, match="got step 3, expected 2"):
        trainer.optim_step(optim(3))
    trainer.forward_backward(call(2))
    done = trainer.optim_step(optim(3))
    assert trainer.optim_step(optim(3)) is done
    assert (done.num_calls, engines[0].num_updates, trainer.state().step) == (2, 1, 3)


def test_a_call_that_was_refused_may_come_again_under_its_number(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = Failed("not finite", code="not_finite")
    with pytest.raises(Failed):
        trainer.forward_backward(call(1))
    assert trainer.state().step == 0
    assert trainer.forward_backward(call(1)).step == 1


def test_a_gradient_that_waits_is_in_no_checkpoint_and_no_training_step(tmp_path):
    trainer, _ = loaded_trainer(tmp_path)
    trainer.forward_backward(call(1))
    checkpoint = CheckpointRequest(job_id="j", attempt=1, epoch=1, step=1)
    fence = step_request(1).model_dump(include={"job_id", "attempt", "epoch"})
    with pytest.raises(Conflict, match="the gradient of 1 forward_backward calls waits"):
        trainer.write_checkpoint(checkpoint.model_copy(update=fence))
    with pytest.raises(Conflict, match="step 2 came, and the gradient of 1 forward_backward"):
        trainer.train_step(step_request(2))
    trainer.optim_step(optim(2))
    assert trainer.train_step(step_request(3)).step == 3


def test_what_a_step_did_is_known_after_its_checkpoint_is_loaded(tmp_path):
    trainer, _ = loaded_trainer(tmp_path)
    trainer.forward_backward(call(1))
    done = trainer.optim_step(optim(2))
    fence = step_request(1).model_dump(include={"job_id", "attempt", "epoch"})
    trainer.write_checkpoint(CheckpointRequest(**fence, step=2))
    trainer.unload()
    trainer.load_job(job_request())
    assert trainer.state().step == 2
    assert trainer.optim_step(optim(2)) == done


def test_a_step_without_examples_counts_and_moves_nothing(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    result = trainer.train_step(step_request(1, examples=()))
    assert (result.loss, result.grad_norm, result.num_examples, result.num_tokens) == (
        0.0,
        0.0,
        0,
        0,
    )
    assert engines[0].num_updates == 0
    assert trainer.state().step == 1
    assert result.num_updates == 0


def test_the_result_counts_examples_and_completion_tokens(tmp_path):
    trainer, _ = loaded_trainer(tmp_path)
    result = trainer.train_step(step_request(1, examples=(EXAMPLE, EXAMPLE)))
    assert (result.num_examples, result.num_tokens, result.learning_rate) == (2, 6, 0.1)
    assert (result.loss, result.grad_norm, result.metrics) == (0.5, 2.0, {"entropy": 1.0})


def test_the_same_job_again_changes_nothing_and_another_body_is_a_conflict(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    trainer.train_step(step_request(1))
    assert trainer.load_job(job_request()).step == 1
    with pytest.raises(Conflict, match="job 'a' is loaded with another body"):
        trainer.load_job(job_request(learning_rate=0.2))
    assert len(engines) == 1


def test_another_job_replaces_the_first_and_nothing_of_it_is_remembered(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request("a"))
    trainer.train_step(step_request(1))
    trainer.load_job(job_request("b"))
    assert engines[0].closed
    with pytest.raises(StateLost, match="got job 'a', expected 'b', the one loaded"):
        trainer.train_step(step_request(2, job_id="a"))
    trainer.load_job(job_request("a"))
    assert trainer.state().step == 0
    trainer.train_step(step_request(1))
    assert engines[2].num_updates == 1, (
        "the first step of the new life is applied, not answered from the old one"
    )


def test_a_job_that_cannot_be_loaded_leaves_the_loaded_one(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request("a"))
    with pytest.raises(BadRequest, match="there is no folder 'missing'"):
        trainer.load_job(job_request("b", model="missing"))
    assert not engines[0].closed
    assert trainer.state().job_id == "a"


def test_without_a_job_every_command_says_so(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    requests = {
        "train_step": step_request(1),
        "publish_weights": PublishRequest(job_id="a", version=0, method="shm"),
        "write_checkpoint": CheckpointRequest(job_id="a", step=0),
    }
    for name, request in requests.items():
        with pytest.raises(StateLost, match="got job 'a', but no job is loaded; PUT /job first"):
            getattr(trainer, name)(request)
    assert trainer.list_checkpoints().checkpoints == ()


def test_a_refused_step_is_not_counted_and_may_come_again(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = Failed("the step was refused: its gradient is not finite")
    with pytest.raises(Failed):
        trainer.train_step(step_request(1))
    assert trainer.state().step == 0
    assert trainer.train_step(step_request(1)).step == 1


def test_a_skipped_step_counts_as_applied_and_is_counted_once(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].skip = True
    first = trainer.train_step(step_request(1))
    assert first.skipped
    assert trainer.train_step(step_request(1)) is first
    assert (trainer.state().step, trainer.state().skipped_steps) == (1, 1)
    assert not trainer.train_step(step_request(2)).skipped
    assert trainer.state().skipped_steps == 1


def test_an_update_that_died_unloads_the_job_which_the_next_life_loads_again(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    engines[0].fault = MemoryError("out of memory")
    with pytest.raises(MemoryError):
        trainer.train_step(step_request(1))
    assert engines[0].closed
    assert trainer.state().job_id is None
    assert engines.remembered == job_request()


def test_a_loaded_job_is_remembered_for_the_ranks_next_life_until_another_is(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request("a"))
    assert engines.remembered == job_request("a")
    trainer.load_job(job_request("b"))
    assert engines.remembered == job_request("b")
    trainer.unload()
    assert engines.remembered is None


def test_the_ranks_next_life_knows_the_newest_fence_of_its_job(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request("a"))
    newer = job_request("a").model_copy(update={"attempt": 7, "epoch": 2})
    trainer.load_job(newer)
    assert engines.remembered == newer and len(engines) == 1


def test_the_state_says_what_became_of_the_ranks_before(tmp_path):
    trainer, _ = make_trainer(tmp_path, past=RestartHistory(2, "rank 1 was killed by SIGKILL"))
    state = trainer.state()
    assert (state.restarts, state.last_failure) == (2, "rank 1 was killed by SIGKILL")
    loaded = trainer.load_job(job_request())
    assert (loaded.restarts, loaded.num_trainable) == (2, 4)


def test_an_adapter_is_published_of_a_job_that_trains_one_and_of_no_other(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    plain = job_request()
    trainer.load_job(plain)
    ask = PublishRequest(job_id="a", version=0, method="lora")
    with pytest.raises(BadRequest, match=r"job 'a', which has no \[lora\] and so no adapter"):
        trainer.publish_weights(ask)
    with_lora = plain.job.model_copy(update={"lora": LoraSpec(rank=4)})
    trainer.load_job(plain.model_copy(update={"job": with_lora, "epoch": 1, "job_id": "b"}))
    ref = trainer.publish_weights(ask.model_copy(update={"epoch": 1, "job_id": "b"}))
    assert ref is not None and ref.adapter == "b/v0-0.1"
    assert list(ref.canary.logprobs) == [-1.0, 0.0]


def test_the_noise_of_the_canary_is_measured_at_first_and_once_in_eight_steps(tmp_path):
    trainer, engines = loaded_trainer(tmp_path)
    found = []
    for step in range(1, 22):
        trainer.train_step(step_request(step))
        if step < 8 or step % 10 == 1:  # not all are published: none that 8 divides
            ref = trainer.publish_weights(PublishRequest(job_id="a", version=step, method="shm"))
            found.append(ref.canary.noise)
    assert engines[0].num_canaries == 9
    assert found == [1, 1, 1, 1, 1, 1, 1, 11, 21]


def test_only_the_current_version_can_be_published(tmp_path):
    trainer, _ = loaded_trainer(tmp_path)
    trainer.train_step(step_request(1))
    with pytest.raises(Conflict, match="got version 0, expected 1"):
        trainer.publish_weights(PublishRequest(job_id="a", version=0, method="shm"))


@pytest.mark.parametrize(
    ("colocate", "turns"), [(True, ["offload", "reload", "offload", "reload"]), (False, [])]
)
def test_a_trainer_that_takes_turns_rests_from_publishing_to_the_next_step(
    tmp_path, colocate, turns
):
    trainer, engines = make_trainer(tmp_path, colocate=colocate)
    trainer.load_job(job_request())
    for step in (1, 2):
        trainer.publish_weights(PublishRequest(job_id="a", version=step - 1, method="shm"))
        trainer.train_step(step_request(step))
    assert engines[0].turns == turns


def test_all_ranks_rest_though_rank_0_could_not_publish(tmp_path, monkeypatch):
    def full(*_):
        raise Failed("no space left", code="disk_full")

    trainer, engines = make_trainer(tmp_path, colocate=True)
    trainer.load_job(job_request())
    monkeypatch.setattr(Publisher, "publish", full)
    with pytest.raises(Failed, match="no space left"):
        trainer.publish_weights(PublishRequest(job_id="a", version=0, method="shm"))
    assert engines[0].turns == ["offload"]


def test_shared_memory_is_freed_when_a_job_is_replaced(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request("a"))
    trainer.publish_weights(PublishRequest(job_id="a", version=0, method="shm"))
    assert (tmp_path / "shm/a/v0/model.safetensors").exists()
    trainer.load_job(job_request("b"))
    assert not (tmp_path / "shm/a").exists()


def fenced(request, attempt: int, epoch: int = 0):
    return request.model_copy(update={"attempt": attempt, "epoch": epoch})


def test_a_newer_attempt_takes_the_job_over_and_the_older_one_moves_nothing(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(fenced(job_request(), 4))
    trainer.train_step(fenced(step_request(1), 4))
    state = trainer.load_job(fenced(job_request(), 5))
    assert (state.attempt, state.epoch, state.step, len(engines)) == (5, 0, 1, 1)
    assert engines.remembered == fenced(job_request(), 5)
    for late in (fenced(step_request(2), 4), fenced(step_request(1), 4)):
        with pytest.raises(Conflict, match=r"got attempt 4, epoch 0, .* superseded") as raised:
            trainer.train_step(late)
        assert raised.value.code == "stale"
    with pytest.raises(Conflict) as raised:
        trainer.load_job(fenced(job_request(), 4, 9))
    assert raised.value.code == "stale"
    assert engines[0].num_updates == 1
    trainer.train_step(fenced(step_request(2), 5))
    assert engines[0].num_updates == 2


def test_a_call_of_an_attempt_or_epoch_that_has_not_put_its_job_is_out_of_order(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(fenced(job_request(), 4, 1))
    for early in (fenced(step_request(1), 4, 2), fenced(step_request(1), 5, 0)):
        with pytest.raises(Conflict, match="PUT /job first") as raised:
            trainer.train_step(early)
        assert raised.value.code == "out_of_order"
    with pytest.raises(Conflict) as raised:
        trainer.publish_weights(fenced(PublishRequest(job_id="a", version=0, method="shm"), 4, 0))
    assert raised.value.code == "stale"
    assert engines[0].num_updates == 0


def test_a_job_that_could_not_be_loaded_still_supersedes_the_one_before(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(fenced(job_request("a"), 4))
    with pytest.raises(BadRequest):
        trainer.load_job(fenced(job_request("b", model="missing"), 5))
    with pytest.raises(Conflict) as raised:
        trainer.train_step(fenced(step_request(1), 4))
    assert raised.value.code == "stale"
    assert engines[0].num_updates == 0


def test_each_life_of_the_ranks_has_a_boot_id_of_its_own(tmp_path):
    one, other = (make_trainer(tmp_path)[0] for _ in range(2))
    assert one.state().boot_id == one.load_job(job_request()).boot_id != other.state().boot_id
    assert "" not in (one.state().boot_id, other.state().boot_id)
