"""The price of an hour of the GPUs: from a table in a file that users edit, or from the settings.

The file is TOML, a table for each provider: `currency`, `date` and `source` of the prices, and the
price of an hour by the name of the GPU. `prices.toml` beside this module is used unless HONE_PRICES
names another.
"""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.errors import BadRequest
from shared.explain import nearest
from shared.plan.gpus import TABLE, GpuGroup, parse_gpus
from shared.settings import Settings

OWN = Path(__file__).with_name("prices.toml")
HEADS = ("currency", "date", "source")


@dataclass(frozen=True)
class Price:
    """The price of an hour of everything in `currency`, and its source as part of a sentence."""

    per_hour: float
    currency: str
    source: str


@dataclass(frozen=True)
class PriceList:
    """One provider's prices of an hour, by GPU."""

    provider: str
    currency: str
    date: datetime.date
    source: str
    per_hour: dict[str, float]

    def of(self, pools: tuple[GpuGroup, ...]) -> Price | None:
        """Returns the price of an hour of these GPUs; None if one of them has no price."""
        if any(pool.gpu.name not in self.per_hour for pool in pools):
            return None
        total = sum(pool.count * self.per_hour[pool.gpu.name] for pool in pools)
        where = f"prices of {self.provider} on {self.date.isoformat()} ({self.source})"
        return Price(round(total, 4), self.currency, where)


def price_per_hour(settings: Settings, pools: tuple[GpuGroup, ...]) -> Price | None:
    """Returns the price of an hour of `pools`: HONE_PRICE_PER_HOUR if it is set, else the sum of
    the table's prices; None if a GPU is not in the table. Raises BadRequest for a table that cannot
    be read."""
    if settings.price_per_hour is not None:
        return Price(settings.price_per_hour, settings.currency, "HONE_PRICE_PER_HOUR")
    return read_prices(settings).of(pools)


def price_of_jobs(settings: Settings) -> Price | None:
    """Returns the price of an hour of a running job by the settings alone: HONE_PRICE_PER_HOUR, or
    the table's prices of HONE_GPUS. None if neither is set."""
    if settings.price_per_hour is None and settings.gpus is None:
        return None
    pools = parse_gpus(settings.gpus, "HONE_GPUS") if settings.gpus else ()
    return price_per_hour(settings, pools)


def read_prices(settings: Settings) -> PriceList:
    """Returns the prices of HONE_PROVIDER in HONE_PRICES. Raises BadRequest with what is wrong and
    where."""
    path = settings.prices or OWN
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"HONE_PRICES {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"HONE_PRICES {str(path)!r} is not valid TOML: {error}") from error
    table = tables.get(settings.provider)
    if not isinstance(table, dict):
        hint = nearest(settings.provider, list(tables), "the providers there")
        raise BadRequest(f"{path} has no table [{settings.provider}] (HONE_PROVIDER); {hint}")
    return _price_list(settings.provider, cast(dict[str, Any], table), path)


def _price_list(provider: str, table: dict[str, Any], path: Path) -> PriceList:
    where = f"{path}: [{provider}]"
    currency, date, source = (table.get(head) for head in HEADS)
    if not isinstance(currency, str) or not isinstance(source, str):
        raise BadRequest(f'{where} needs currency = "..." and source = "..."; got {table!r:.200}')
    if not isinstance(date, datetime.date):
        raise BadRequest(f"{where} needs date = YYYY-MM-DD, the day of its prices; got {date!r}")
    prices: dict[str, float] = {}
    for name, price in table.items():
        if name in HEADS:
            continue
        if name not in TABLE:
            hint = nearest(name, list(TABLE), "the GPUs")
            raise BadRequest(f"{where} has a price of {name!r}, which is no GPU known here; {hint}")
        if isinstance(price, bool) or not isinstance(price, int | float) or price < 0:
            raise BadRequest(f"{where} {name} is {price!r}; expected a price per hour, 0 or more")
        prices[name] = float(price)
    return PriceList(provider, currency, date, source, prices)
