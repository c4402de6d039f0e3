"""What an hour of GPUs costs, by the table that users edit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.plan.gpus import parse_gpus
from shared.plan.planning import price_of_jobs, price_per_hour, read_prices
from shared.settings import Settings

TABLE = """
[ours]
currency = "EUR"
date = 2026-01-02
source = "the invoice"
H100 = 2.5
L4 = 1
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(TABLE)
    return path


def test_the_table_that_comes_with_hone_has_dates_and_sources() -> None:
    for provider in ("modal", "lambda", "example"):
        prices, _, source = read_prices(Settings(provider=provider))
        assert prices and re.fullmatch(rf"prices of {provider} on 20[2-9]\d-.. ?.*\(.+\)", source)
    # Modal's 0.001097 and 0.000694 USD per second
    modal, *_ = read_prices(Settings())
    assert (modal["H100"], modal["A100-80GB"]) == (3.9492, 2.4984)


def test_the_price_of_pools_is_the_sum_of_their_gpus(table: Path) -> None:
    settings = Settings(prices=table, provider="ours")
    found = price_per_hour(settings, parse_gpus("8xH100,2xL4"))
    assert found is not None and (found.per_hour, found.currency) == (22.0, "EUR")
    assert found.source == "prices of ours on 2026-01-02 (the invoice)"
    assert price_per_hour(settings, parse_gpus("1xH100,1xA10G")) is None
    assert price_per_hour(settings, parse_gpus("cpu")) is None


def test_a_price_that_is_set_comes_before_the_table(table: Path) -> None:
    settings = Settings(prices=table, provider="none there", price_per_hour=3)
    found = price_per_hour(settings, parse_gpus("1xH100"))
    assert found is not None and (found.per_hour, found.currency) == (3, "USD")


def test_a_running_jobs_price_is_of_what_is_set() -> None:
    assert price_of_jobs(Settings()) is None
    found = price_of_jobs(Settings(gpus="2xH100"))
    assert found is not None and found.per_hour == 7.8984
    found = price_of_jobs(Settings(price_per_hour=0.5))
    assert found is not None and found.per_hour == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[ours", "is not valid TOML"),
        ("[our]\n", r"has no table \[ours\] \(HONE_PROVIDER\); did you mean 'our'\?"),
        ("ours = 3\n", r"has no table \[ours\]"),
        ('[ours]\nsource = "x"\n', r"\[ours\] needs currency = "),
        ('[ours]\nsource = "x"\ncurrency = "EUR"\n', "needs date = YYYY-MM-DD, .* got None"),
        (TABLE + "H1000 = 3\n", r"price of 'H1000', which is no GPU known here; did you mean 'H10"),
        (TABLE + 'H200 = "3"\n', "H200 is '3'; expected a price per hour, 0 or more"),
        (TABLE + "H200 = -1\n", "H200 is -1; expected a price per hour, 0 or more"),
    ],
)
def test_a_table_with_a_fault_is_refused_with_the_place(
    table: Path, text: str, message: str
) -> None:
    table.write_text(text)
    with pytest.raises(BadRequest, match=message):
        read_prices(Settings(prices=table, provider="ours"))


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"HONE_PRICES '.*/none\.toml' cannot be read: No such"):
        read_prices(Settings(prices=tmp_path / "none.toml"))
