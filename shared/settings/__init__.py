"""Settings (`HONE_*`): `settings.py` has them all, `environment.py` reads them."""

from shared.settings.settings import PREFIX, Settings

__all__ = ["PREFIX", "Settings"]
