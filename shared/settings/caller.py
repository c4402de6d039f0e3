"""The settings of a program that only calls services."""

from __future__ import annotations

from shared.settings.addresses import Addresses
from shared.settings.every_service import EveryService


class CallerSettings(Addresses, EveryService):
    """Where the services are, and the token. A command that only asks reads these instead of all
    settings, in a fraction of the time."""
