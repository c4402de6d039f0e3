"""What an hour of a running job costs, and whom a table of prices that cannot be read stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.orchestrator.jobs.stopping import price_for
from shared.errors import BadRequest
from shared.job import StopSpec
from shared.settings import Settings
from tests.support.scored_batches import make_job


def test_a_broken_table_of_prices_stops_only_jobs_that_pause_at_a_cost(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[cloud")
    settings = Settings(gpus="1xH100", prices=prices)
    job = make_job()
    assert price_for(job, settings) is None
    with pytest.raises(BadRequest, match="is not valid TOML"):
        price_for(job.model_copy(update={"stop": StopSpec(max_cost=5.0)}), settings)
