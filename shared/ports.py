"""Ports: which are free, and whether one is. Asked before anything is started, so that the answer
is a sentence and not a dead process."""

from __future__ import annotations

import contextlib
import secrets
import socket

from shared.errors import BadRequest

FREE = range(10_000, 32_768)
"""Below those that Linux gives to connections and to whoever asks for any port: one of them would
be somebody else's by the time that a service listens on it."""


def free_port(in_a_row: int = 1) -> int:
    """Returns a port, drawn at random, that nothing of this machine listens on, nor on those after
    it: so many in a row."""
    while True:
        port = FREE[secrets.randbelow(len(FREE) - in_a_row)]
        with contextlib.ExitStack() as probes:
            try:
                for number in range(in_a_row):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except OSError:  # one is taken
                continue
            return port


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
