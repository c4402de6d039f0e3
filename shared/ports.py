"""Is a port free? Asked before anything is started, so that the answer is a sentence and not a dead
process."""

from __future__ import annotations

import socket

from shared.errors import BadRequest


def check_port(host: str, port: int, service: str) -> None:
    """Raises BadRequest naming the service, the port and the setting if nothing can listen
    there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BadRequest(
                f"the {service} service cannot listen on {host}:{port}: {error.strerror}; stop "
                "what uses the port, or set "
                f"HONE_{service.upper()}_PORT to a free one"
            ) from error
