"""What trainer and sampler agree on to meet: a NCCL group that outlives its peers."""

from __future__ import annotations

import os

import pytest

from shared.meeting import ERROR_HANDLING, surviving_peers


@pytest.mark.parametrize("before", [None, "3"])
def test_only_groups_made_within_leave_the_process_alive(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(ERROR_HANDLING, before)
    with pytest.raises(RuntimeError), surviving_peers():
        assert os.environ[ERROR_HANDLING] == "2"
        raise RuntimeError("no group could be made")
    assert os.environ.get(ERROR_HANDLING) == before
