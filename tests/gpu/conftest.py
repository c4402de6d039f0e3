"""Marks of all tests here, and what they need: skipped, with the reason, where it is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared.host import nvidia

HERE = Path(__file__).parent
FIRST = "test_torch_computes_on_every_gpu_with_this_driver"
"""It fails where there is a GPU that torch cannot use, and says why."""

NONE = "needs a GPU: none is visible to torch here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
        if not torch.cuda.is_available() and not (item.name == FIRST and nvidia.num_cards()):
            item.add_marker(pytest.mark.skip(reason=NONE))


@pytest.fixture
def needs_gpus() -> Callable[[int], None]:
    def needs(count: int) -> None:
        if (num := torch.cuda.device_count()) < count:
            pytest.skip(f"needs {count} GPUs, {num} are visible")

    return needs


@pytest.fixture
def needs_gb() -> Callable[[int], None]:
    def needs(gigabytes: int) -> None:
        has = torch.cuda.get_device_properties(0).total_memory / 1e9
        if has < gigabytes:
            pytest.skip(f"needs a GPU of {gigabytes} GB, this one has {has:.0f}")

    return needs
