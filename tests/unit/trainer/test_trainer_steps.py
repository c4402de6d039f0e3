"""Order, repetition and replacement: what the trainer remembers about the weights it holds."""

import pytest
from trainer_fakes import EXAMPLE, job_request, make_trainer, step_request

from services.trainer.trainer import learning_rate
from shared.errors import BadRequest, Conflict, Failed
from shared.wire import CheckpointRequest, PublishRequest


def test_a_retried_step_moves_weights_once(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    first = trainer.train_step(step_request(1))
    assert trainer.train_step(step_request(1)) is first
    assert engines[0].num_updates == 1
    assert trainer.state().step == 1


def test_the_same_step_with_another_body_is_a_conflict(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    trainer.train_step(step_request(1))
    with pytest.raises(Conflict, match="step 1 was already applied, with another body"):
        trainer.train_step(step_request(1, examples=(EXAMPLE, EXAMPLE)))
    assert engines[0].num_updates == 1


@pytest.mark.parametrize(("step", "sentence"), [(3, "got step 3, expected 2"), (7, "got step 7, expected 2")])
def test_a_step_out_of_order_is_a_conflict(tmp_path, step, sentence):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request())
    trainer.train_step(step_request(1))
    with pytest.raises(Conflict, match=sentence):
        trainer.train_step(step_request(step))


def test_a_step_older_than_the_last_is_a_conflict(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request())
    trainer.train_step(step_request(1))
    trainer.train_step(step_request(2))
    with pytest.raises(Conflict, match="got step 1, expected 3"):
        trainer.train_step(step_request(1))


def test_a_step_without_examples_counts_and_moves_nothing(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    result = trainer.train_step(step_request(1, examples=()))
    assert (result.loss, result.grad_norm, result.num_examples, result.num_tokens) == (0.0, 0.0, 0, 0)
    assert engines[0].num_updates == 0
    assert trainer.state().step == 1


def test_the_result_counts_examples_and_completion_tokens(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request())
    result = trainer.train_step(step_request(1, examples=(EXAMPLE, EXAMPLE)))
    assert (result.num_examples, result.num_tokens, result.learning_rate) == (2, 6, 0.1)
    assert (result.loss, result.grad_norm, result.metrics) == (0.5, 2.0, {"entropy": 1.0})


def test_the_same_job_again_changes_nothing_and_another_body_is_a_conflict(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
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
    with pytest.raises(Conflict, match="got job 'a', expected 'b', the one loaded"):
        trainer.train_step(step_request(2, job_id="a"))
    trainer.load_job(job_request("a"))
    assert trainer.state().step == 0
    trainer.train_step(step_request(1))
    assert engines[2].num_updates == 1, "the first step of the new life is applied, not answered from the old one"


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
        with pytest.raises(Conflict, match="got job 'a', but no job is loaded; PUT /job first"):
            getattr(trainer, name)(request)
    assert trainer.list_checkpoints().checkpoints == ()


def test_a_refused_step_is_not_counted_and_may_come_again(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    engines[0].fault = Failed("the step was refused: its gradient is not finite")
    with pytest.raises(Failed):
        trainer.train_step(step_request(1))
    assert trainer.state().step == 0
    assert trainer.train_step(step_request(1)).step == 1


def test_an_update_that_died_on_the_way_unloads_the_job(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    engines[0].fault = MemoryError("out of memory")
    with pytest.raises(MemoryError):
        trainer.train_step(step_request(1))
    assert engines[0].closed
    assert trainer.state().job_id is None


def test_only_the_current_version_can_be_published(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request())
    trainer.train_step(step_request(1))
    with pytest.raises(Conflict, match="got version 0, expected 1"):
        trainer.publish_weights(PublishRequest(job_id="a", version=0, method="shm"))


def test_a_checkpoint_is_written_once_and_found_later(tmp_path):
    trainer, engines = make_trainer(tmp_path)
    trainer.load_job(job_request())
    trainer.train_step(step_request(1))
    first = trainer.write_checkpoint(CheckpointRequest(job_id="a", step=1))
    assert first is not None and first.path.endswith("runs/a/checkpoints/step-000001")
    engines[0].num_updates = 99  # would be visible in the file
    trainer.train_step(step_request(2))
    assert trainer.write_checkpoint(CheckpointRequest(job_id="a", step=1)) == first
    assert (tmp_path / "runs/a/checkpoints/step-000001/model.safetensors").read_bytes() == b"weights 1"
    with pytest.raises(Conflict, match="got step 5, expected 2"):
        trainer.write_checkpoint(CheckpointRequest(job_id="a", step=5))
    assert trainer.list_checkpoints().checkpoints == (first,)


def test_only_rank_0_writes(tmp_path):
    trainer, _ = make_trainer(tmp_path, rank=1, num_ranks=2)
    trainer.load_job(job_request())
    assert trainer.publish_weights(PublishRequest(job_id="a", version=0, method="shm")) is None
    assert trainer.write_checkpoint(CheckpointRequest(job_id="a", step=0)) is None
    assert not (tmp_path / "shm").exists() and not (tmp_path / "runs").exists()


def test_shared_memory_is_freed_when_a_job_is_replaced(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.load_job(job_request("a"))
    trainer.publish_weights(PublishRequest(job_id="a", version=0, method="shm"))
    assert (tmp_path / "shm/a/v0/model.safetensors").exists()
    trainer.load_job(job_request("b"))
    assert not (tmp_path / "shm/a").exists()


def test_the_learning_rate_warms_up_linearly_and_stays():
    job = job_request(learning_rate=0.4, warmup_steps=4).job
    assert [learning_rate(job, step) for step in (1, 2, 4, 5, 100)] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4])
    assert learning_rate(job_request(learning_rate=0.4).job, 1) == 0.4
