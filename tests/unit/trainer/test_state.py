"""Random numbers and DeepSpeed's state come back as they were."""

import random

import numpy as np
import pytest
import torch

from services.trainer.zero.internals import random_state, restore_random_state
from services.trainer.zero.state import SavedFragments
from shared.errors import Conflict


def draw() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(()).item()


def test_random_numbers_continue_where_they_were(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # half of a pair of normals is kept by Python and by numpy
    torch.save(random_state(), tmp_path / "state.pt")
    expected = [draw() for _ in range(3)]
    draw()
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_what_another_version_wrote_is_no_other_model(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    with pytest.raises(Conflict, match="no optimizer state that this version of Hone reads"):
        SavedFragments.of(tmp_path)
