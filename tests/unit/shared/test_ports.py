"""Free ports: none that the kernel gives to others, and none that is taken."""

from __future__ import annotations

import socket

import pytest

from shared.host import processes


def test_a_free_port_is_below_the_ephemeral_ports() -> None:
    found = {processes.free_port() for _ in range(20)}
    assert len(found) > 1 and all(10_000 <= port < 32_768 for port in found)


def test_ports_of_which_one_is_taken_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free = processes.free_port(in_a_row=4)
    drawn = iter([free - 10_000, free + 2 - 10_000])
    monkeypatch.setattr(processes.secrets, "randbelow", lambda _: next(drawn))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free + 1))
        taken.listen()
        assert processes.free_port(in_a_row=2) == free + 2
