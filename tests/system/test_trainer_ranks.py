"""The real trainer: `python -m services.trainer`, torchrun, DeepSpeed ZeRO-2, one and two ranks,
against plain torch autograd."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from shared.errors import Conflict, Failed
from shared.wire import CheckpointRequest, PublishRequest, WeightsRef
from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_reference import (
    EXAMPLE_WITH_A_NAN,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    batch_without_a_nan,
    model_with_a_nan,
    relative,
    some_examples,
    weights,
)
from tests.support.trainer_service import Service, a_job, gone, running

LINEAR = {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM}

pytestmark = [pytest.mark.engine, pytest.mark.system]


def test_two_ranks_with_one_example_between_them_agree_with_one(trainers, tiny_model):
    (example, *_) = some_examples(tiny_model, 1)
    digests = []
    for ranks in (1, 2):
        trainers[ranks].load("single", a_job(tiny_model, **LINEAR))
        trainers[ranks].step("single", 1, [example])
        digests.append(weights(trainers[ranks].publish("single", 1).path))
    before = weights(tiny_model)
    one, two = ({name: value[name] - before[name] for name in before} for value in digests)
    assert relative(two, one) < 1e-6


@pytest.mark.soak
def test_ranks_that_meet_on_loopback_meet_samplers_where_the_trainer_listens(tmp_path, tiny_model):
    """As the launcher starts them; tests/unit/trainer/test_broadcast.py does so without a service.
    On a GPU NCCL does so by the interface, here gloo."""
    with running(tmp_path / "t", 1, HONE_HOST="127.0.0.2") as service:
        service.load("sent", a_job(tiny_model, **LINEAR))
        body = PublishRequest(job_id="sent", version=0, method="nccl")
        ref = service.call("POST", "/publish_weights", body, WeightsRef).root
        *_, rank = service.processes()
        environment = rank.environ()
        assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == (
            "lo",
            "lo",
        )
        before = listening(rank)
        store = PrefixStore(ref.key, TCPStore("127.0.0.2", ref.port, is_master=False))
        store.set("asked/1", "sampler 1")
        store.add("asked", 1)
        store.wait(["sampler/0/0"])  # where gloo's rank 0 says how it is reached
        assert {host for host, _ in listening(rank) - before} == {"127.0.0.2"}


def test_what_ranks_send_is_in_no_file_until_one_is_asked_for(trainers, tiny_model):
    examples, service = some_examples(tiny_model), trainers[2]
    service.load("sent", a_job(tiny_model, **LINEAR))
    service.step("sent", 1, examples)

    def publish(method):
        body = PublishRequest(job_id="sent", version=1, method=method)
        return service.call("POST", "/publish_weights", body, WeightsRef).root

    sent = publish("nccl")
    assert list((service.shm / "sent").rglob("*.safetensors")) == []
    files = publish("http")
    assert (files.digest, files.tensors) == (sent.digest, sent.tensors)
    (file,) = (service.shm / "sent").rglob("*.safetensors")
    assert file.name == "model.safetensors"
    service.step("sent", 2, examples)
    with pytest.raises(Conflict, match="got version 1, expected 2") as gone:
        publish("http")
    assert gone.value.code == "out_of_order"


def listening(process):
    sockets = process.net_connections()
    return {tuple(socket.laddr) for socket in sockets if socket.status == "LISTEN"}


def test_a_step_whose_gradient_is_not_finite_is_refused_as_if_it_had_never_come(trainers, tmp_path):
    model = model_with_a_nan(tmp_path / "broken")
    good = batch_without_a_nan()
    bad = (*good, EXAMPLE_WITH_A_NAN)
    service, digests = trainers[2], []
    for job_id in ("clean", "refused"):
        service.load(
            job_id, a_job(model, learning_rate=1e-3, max_grad_norm=1.0, micro_batch_tokens=20)
        )
        service.step(job_id, 1, good)
        if job_id == "refused":
            with pytest.raises(Failed, match="its gradient is not finite"):
                service.step(job_id, 2, bad)
            assert service.state().step == 1
        service.step(job_id, 2, good)
        digests.append(service.publish(job_id, 2).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_bfloat16_is_what_transformers_loads_and_what_is_published(
    trainers, tmp_path, tied
):
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    service, job_id = trainers[2], f"bf16-{tied}".lower()
    state = service.load(
        job_id, a_job(model, dtype="bfloat16", learning_rate=1e-2, max_grad_norm=1.0)
    )
    assert (state.dtype, state.num_ranks) == ("bfloat16", 2)
    service.step(job_id, 1, some_examples(model))
    published = weights(service.publish(job_id, 1).path)
    checkpoint = service.checkpoint(job_id, 1)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    assert ("lm_head.weight" in published) is not tied
    original = weights(model)
    for name, value in published.items():
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(
            loaded.state_dict()[name].to(torch.bfloat16), value, rtol=0, atol=0
        )
    assert any(
        not torch.equal(published[name].float(), original[name].bfloat16().float())
        for name in published
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (Path(checkpoint.path) / name).read_bytes() == (model / name).read_bytes()
    assert PreTrainedTokenizerFast.from_pretrained(checkpoint.path)("w5 w9")["input_ids"] == [5, 9]


def begin_checkpoint(service: Service, job_id: str, step: int) -> None:
    """Returns while the checkpoint is being written, once it has its name."""
    body = CheckpointRequest(job_id=job_id, step=step).model_dump_json().encode()
    url = f"http://127.0.0.1:{service.port}/checkpoints"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})

    def ask() -> None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=60)

    threading.Thread(target=ask, daemon=True).start()
    path = service.folder / "runs" / job_id / "checkpoints" / f"step-{step:06}"
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "no checkpoint was begun"
        time.sleep(0.01)


def test_sigterm_ends_every_process_after_the_checkpoint_and_leaves_nothing(tmp_path, tiny_model):
    committed = tmp_path / "committed"
    slowly = f"sh -c 'sleep 1; touch {committed}'"
    with running(tmp_path / "two", 2, HONE_RUNS_COMMIT=slowly) as service:
        service.load("a", a_job(tiny_model))
        service.publish("a", 0)
        assert (service.shm / "a" / "v0").is_dir()
        processes = service.processes()
        assert len(processes) == 4, "launcher, torchrun and two ranks"
        for process in processes:
            for connection in process.net_connections(kind="inet"):
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (
                    f"{process.name()} uses {connection}"
                )
        begin_checkpoint(service, "a", 0)
        service.process.terminate()
        assert service.process.wait(15) == 0
        assert committed.exists(), "a checkpoint that is being written is finished"
        assert gone(processes)
        assert not (service.shm / "a").exists()
        assert list((tmp_path / "two").glob("hone-*")) == []
        assert "Traceback" not in service.log.read_text()
