"""Finds free ports, and checks that a port is free. Checked before a process starts, so that the
user sees a sentence and not a dead process."""

from __future__ import annotations

import contextlib
import secrets
import socket

from shared.errors import BadRequest

FREE = range(10_000, 32_768)
"""Below Linux's ephemeral port range. Linux may give a port of that range to another process before
a service listens on it."""


def free_port(in_a_row: int = 1) -> int:
    """Returns the first of `in_a_row` consecutive ports on which nothing of this machine listens.
    It is drawn at random."""
    while True:
        port = FREE[secrets.randbelow(len(FREE) - in_a_row)]
        with contextlib.ExitStack() as probes:
            try:
                for number in range(in_a_row):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except OSError:  # a port is taken
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
