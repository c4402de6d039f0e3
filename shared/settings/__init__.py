"""Settings (`HONE_*`): `settings.py` has them all, `environment.py` reads them."""

from shared.settings.settings import MAX_PLACES, PREFIX, Settings

__all__ = ["MAX_PLACES", "PREFIX", "Settings"]
