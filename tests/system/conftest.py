"""The trainers that the trainer's system tests share: starting one takes many seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model
from tests.support.trainer_service import Service, running


@pytest.fixture(scope="session")
def trainers(tmp_path_factory) -> Iterator[dict[int, Service]]:
    """One trainer of one rank and one of two, whose ranks may die often."""
    folder = tmp_path_factory.mktemp("trainers")
    with (
        running(folder / "one", 1, restarts=9) as one,
        running(folder / "two", 2, restarts=9) as two,
    ):
        yield {1: one, 2: two}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
