"""A job without rewards learns from a teacher: another tiny model, which a vLLM server of its own
reads the sampled tokens with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import hone
from services.orchestrator.store.folder import RunFolder
from services.trainer.learning.examples import floats
from tests.support.hone_stack import HoneStack, own_environment
from tests.support.tiny_models import make_byte_model
from tests.system.test_rollout_engine import Running, start

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


JOB = """
name = "distilled"
model = "student"
steps = 22

[data]
train = "rows.jsonl"

[sampling]
prompts_per_step = 32
group_size = 8
max_tokens = 16

[teacher]
model = "policy"

[training]
learning_rate = 1e-2
dtype = "float32"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_byte_model(tmp_path / "student")
    make_byte_model(tmp_path / "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(15)  # it prefers some bytes to others by e^2 and more
    teacher.save_pretrained(tmp_path / "teacher")
    rows = [{"prompt": f"Say {number}."} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.fixture
def teacher(folder: Path) -> Iterator[Running]:
    running = start(folder / "service")
    try:
        spec = {"model": str(folder / "teacher"), "dtype": "float32"}
        answer = httpx.put(f"{running.url}/model", json=spec, timeout=300)
        assert answer.status_code == 200, answer.text + running.log.read_text()[-3000:]
        yield running
    finally:
        running.kill()


def test_the_divergence_from_the_teacher_falls(folder: Path, teacher: Running) -> None:
    environment = own_environment(HONE_TEACHER_URL=f"{teacher.url}/v1")
    with HoneStack(folder, environment).running() as stack:
        stack.hone("run", "job.toml")
        with hone.Client(stack.url) as client:
            record = client.get(client.list(1)[0].id)
            rows = [row for row in client.metrics(record.id).rows if row.step]
            shown = client.rollouts(record.id, 1).rollouts[0]
    divergences = [row.metrics["teacher/kl"] for row in rows]
    assert record.status == "succeeded" and len(divergences) == 22
    assert divergences[-1] < 0.75 * divergences[0], divergences
    assert all(row.metrics["teacher/missing"] == 0 for row in rows)
    assert rows[0].metrics["reward"] == pytest.approx(-divergences[0], rel=0.05)
    assert shown.parts["teacher"].value == shown.reward and shown.advantage == 0
    _assert_read_by(folder / "teacher", Path(record.run_dir))


def _assert_read_by(model: Path, run: Path) -> None:
    """What is on disk are plain transformers' log-probs of the sampled tokens."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batch = RunFolder(run).batch(3)
    group, score = batch.groups[0], batch.scores[0][1]
    prompt, ids = list(group.prompt_token_ids), list(group.rollouts[1].token_ids)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    found = torch.from_numpy(floats(score.teacher_logprobs).copy())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
