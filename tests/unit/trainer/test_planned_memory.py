"""The planned memory of a trainer's rank beside what one takes with a real model."""

from __future__ import annotations

import json

import pytest

from bench.plan import LIMIT_S, REAL
from bench.side import run
from tests.support.real_model import real_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(LIMIT_S)]


def test_a_rank_with_a_real_model_takes_the_memory_that_was_planned() -> None:
    # In float32: where a processor has no products of bfloat16, its steps take minutes.
    case = json.dumps(REAL["24 x 8 x 8, float32"])
    found = run("bench.plan_side", str(real_model()), case, limit_s=LIMIT_S)
    assert 0.8 < found["planned_mib"] / found["measured_mib"] < 1.2, found
