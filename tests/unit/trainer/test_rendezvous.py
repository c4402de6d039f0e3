"""How ranks of several nodes meet, on loopback with threads for ranks: in any order, set up alike,
once in the life of a rank."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from services.trainer.processes import rendezvous
from services.trainer.processes.rendezvous import Failures, Place, meet
from shared.errors import Failed, Unavailable
from shared.host.processes import free_port
from shared.settings import Settings


def node(port: int, rank: int, nodes: int = 2, ranks: int = 1) -> tuple[Settings, Place]:
    address = f"127.0.0.1:{port}"
    settings = Settings(
        trainer_nodes=nodes, trainer_node_rank=rank, trainer_ranks=ranks, trainer_rendezvous=address
    )
    return settings, Place.of(settings, 0)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(rendezvous, "POLL_S", 0.02)


def test_ranks_meet_in_any_order_and_share_their_stores(tmp_path):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        second = pool.submit(meet, *node(port, 1), tmp_path, None)
        first = pool.submit(meet, *node(port, 0), tmp_path, None)
        one, two = first.result(20), second.result(20)
    one.group.set("key", "value")
    assert two.failures.get("key") == b"value"


def test_the_store_listens_on_the_rendezvous_address_only(tmp_path):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        meetings = [pool.submit(meet, *node(port, rank), tmp_path, None) for rank in range(2)]
        kept = [meeting.result(20) for meeting in meetings]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert len(kept) == 2


def test_an_address_that_is_not_node_0s_is_a_sentence(tmp_path):
    settings = Settings(
        trainer_nodes=2, trainer_rendezvous="192.0.2.1:29500", trainer_interface="lo"
    )
    with pytest.raises(
        Failed, match=r"HONE_TRAINER_RENDEZVOUS=192\.0\.2\.1:29500: .*expected an address of node 0"
    ):
        meet(settings, Place.of(settings, 0), tmp_path, None)


def test_nodes_that_are_set_up_differently_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_S", 1.0)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, *node(port, 0), tmp_path, None)
        with pytest.raises(
            Failed,
            match=r"is set up for 2 node\(s\) of 2 rank\(s\) "
            r"and node 0 for 2 node\(s\) of 1 rank\(s\)",
        ):
            meet(*node(port, 1, ranks=2), tmp_path, None)
        with pytest.raises(
            Failed,
            match=r"ranks \[1\] did not come within 1 s; expected 2 node\(s\) of 1 rank\(s\)",
        ):
            first.result(20)


def test_a_rank_that_begins_again_tells_the_life_before_and_waits_for_the_next(tmp_path):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        lives = [pool.submit(meet, *node(port, rank), tmp_path, None) for rank in range(2)]
        one, two = (life.result(20) for life in lives)
        again = pool.submit(meet, *node(port, 1), tmp_path, "rank 1 was killed by SIGKILL")
        one.failures.wait(["failure-1"])
        found = Failures(one.failures, 0, 2).first()  # as rank 0 looks for them
        assert isinstance(found, Unavailable)
        assert found.detail == "rank 1 was started again: rank 1 was killed by SIGKILL"
        assert not again.done()
        lives.clear()
        del one, two  # node 0's ranks end, and its store with them
        next_life = None
        while next_life is None:
            try:
                next_life = meet(*node(port, 0), tmp_path, None)
            except Failed:  # the old store still listens
                continue
        next_life.group.set("key", "value")
        assert again.result(20).group.get("key") == b"value"


def test_a_node_that_falls_silent_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.5)
    store, ended, alive = HashStore(), list[str](), threading.Event()
    listener = threading.Thread(
        target=rendezvous.watch_heartbeats, args=(store, 3, ended.append), daemon=True
    )

    def live(key: str, until: threading.Event) -> None:
        while not until.wait(0.05):
            store.add(key, 1)

    stop = threading.Event()
    threads = [
        threading.Thread(target=live, args=args)
        for args in (("heartbeat-1", alive), ("heartbeat-2", stop))
    ]
    for thread in (*threads, listener):
        thread.start()
    listener.join(1.2)
    assert listener.is_alive(), "both nodes live"
    stop.set()
    listener.join(5)
    alive.set()
    assert ended == ["node 2 has sent no heartbeat for 0.5 s"]


def test_a_node_whose_store_is_gone_ends():
    class Gone:
        def add(self, _key: str, _amount: int) -> int:
            raise RuntimeError("Broken pipe\nframe #0: ...")

    ended: list[str] = []
    rendezvous.send_heartbeats(Gone(), node(1, 1)[1], ended.append)  # pyright: ignore[reportArgumentType]
    assert ended == ["node 0 ended: Broken pipe"]
