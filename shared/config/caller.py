"""The settings of those who only call services."""

from __future__ import annotations

from shared.config.addresses import Addresses
from shared.config.every_service import EveryService


class CallerSettings(Addresses, EveryService):
    """Where the services are, and the token: read in a fraction of the time that all settings
    take, which a command has that only asks."""
