"""OpenAI's grader objects as rewards of a job."""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire.rewards import reward_of


@pytest.mark.parametrize("kind", [None, 3, "function"])
def test_a_grader_without_a_type_is_refused(kind: object) -> None:
    with pytest.raises(BadRequest, match=r"grader\.type"):
        reward_of({"type": kind})


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"grader\.name.* is 3; expected text"):
        reward_of({"type": "exact_match", "name": 3})


@pytest.mark.parametrize("named", [{}, {"name": None}, {"name": ""}])
def test_a_grader_without_a_name_is_called_by_its_type(named: dict[str, Any]) -> None:
    assert reward_of({"type": "exact_match", **named}).label == "exact_match"


@pytest.mark.parametrize("kind", ["exact_match", "string_check"])
def test_type_and_name_are_beside_the_params_of_every_grader(kind: str) -> None:
    expected = RewardSpec(grader=kind, name="n", params={"column": "answer"})
    assert reward_of({"type": kind, "name": "n", "column": "answer"}) == expected
