from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.wire import Example
from tests.support.engine_ranks import Ranks


@pytest.fixture
def one_rank() -> Iterator[None]:
    """torch.distributed with this process as its only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(1, tmp_path_factory.mktemp("rank")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Ranks]]:
    """One rank, and two."""
    folder = tmp_path_factory.mktemp("ranks")
    with Ranks(1, folder / "one") as one, Ranks(2, folder / "two") as two:
        yield {1: one, 2: two}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_models import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def examples(model: Path) -> tuple[Example, ...]:
    from tests.support.trainer_reference import some_examples

    return some_examples(model)
