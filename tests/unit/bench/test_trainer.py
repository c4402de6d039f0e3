"""Both sides of `bench.trainer` do the same step: what it compares is how."""

import math
import warnings

import pytest
import torch

from bench import trainer_side
from bench.trainer_side import Task, hone_step, make_examples, make_model

pytestmark = pytest.mark.slow


def test_both_sides_have_the_loss_and_the_gradient_of_the_same_step(monkeypatch):
    monkeypatch.setattr(trainer_side, "time_head", lambda *_: None)
    monkeypatch.setattr(trainer_side, "MAX_TOKENS", 40)
    task = Task(vocab_size=97, num_prompts=2, group_size=4, rows=4, hidden_size=64, num_layers=1)
    examples, losses, gradients = make_examples(task), [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for make_step in (hone_step, trainer_side.trl_step):
            model = make_model(task)
            losses.append(make_step(task, model, examples).run())
            gradients.append(
                torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            )
    assert math.isclose(*losses, rel_tol=1e-5)
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


def test_groups_share_their_prompt_and_lengths_vary_only_if_asked():
    examples = make_examples(Task(vocab_size=1000, num_prompts=3))
    prompts = [example.prompt_token_ids for example in examples]
    assert len(set(prompts)) == 3 and prompts[0] == prompts[7] != prompts[8]
    assert len({len(example.token_ids) for example in examples}) > 12
    same = make_examples(Task(vocab_size=1000, num_prompts=2, same_length=True))
    assert {(len(example.prompt_token_ids), len(example.token_ids)) for example in same} == {
        (64, 128)
    }
