"""One trainer on two nodes, each a network namespace: the same update as on one, and both come back
when one of them dies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest

from shared.http.client import Client
from tests.support.trainer_reference import some_examples
from tests.support.trainer_service import DEADLINE_S, ROOT, Service, a_job, gone, running
from tests.support.two_nodes import ADDRESSES, INTERFACES, Forbidden, Nodes, two_nodes

pytestmark = [pytest.mark.engine, pytest.mark.system]


@dataclass(kw_only=True)
class Cluster(Service):
    """Two launchers; `process` is node 0's. HTTP goes through a Unix socket into node 0's
    loopback."""

    other: Service
    socket: Path

    def client(self) -> Client:
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket))
        return Client(
            "trainer",
            f"http://127.0.0.1:{self.port}",
            binary=True,
            patience_s=DEADLINE_S,
            transport=transport,
        )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes())
        except Forbidden as reason:
            pytest.skip(f"no two network namespaces: {reason}")
        yield nodes


@pytest.fixture
def cluster(nodes, tmp_path) -> Iterator[Cluster]:
    """Two nodes of one rank each."""

    def node(rank: int) -> contextlib.AbstractContextManager[Service]:
        return running(
            tmp_path / f"node-{rank}",
            1,
            restarts=5,
            prefix=nodes.inside(rank),
            HONE_TRAINER_NODES="2",
            HONE_TRAINER_NODE_RANK=str(rank),
            HONE_TRAINER_RENDEZVOUS=f"{ADDRESSES[0]}:29511",
            HONE_TRAINER_INTERFACE=INTERFACES[rank],
            HONE_RUNS_DIR=str(tmp_path / "runs"),
        )

    with node(0) as first, node(1) as second:
        socket = tmp_path / "http"
        relay = subprocess.Popen(
            [
                *nodes.inside(0),
                sys.executable,
                str(ROOT / "tests/support/two_nodes.py"),
                str(socket),
                str(first.port),
            ]
        )
        try:
            yield Cluster(**vars(first), other=second, socket=socket)
        finally:
            relay.kill()
            relay.wait()


def rank_of(service: Service) -> psutil.Process:
    return service.processes()[2]


@pytest.mark.soak
def test_two_nodes_give_the_update_of_one_and_come_back_when_one_dies(
    cluster, trainers, tiny_model
):
    examples, job, expected = (
        some_examples(tiny_model),
        a_job(tiny_model, micro_batch_tokens=64),
        [],
    )
    one_node = trainers[2]
    one_node.load("a", job)
    for step in (1, 2):
        one_node.step("a", step, examples)
        expected.append(one_node.publish("a", step).digest)

    assert cluster.load("a", job).num_ranks == 2
    cluster.step("a", 1, examples)
    assert cluster.publish("a", 1).digest == expected[0]
    cluster.checkpoint("a", 1)
    ranks = [rank_of(cluster), rank_of(cluster.other)]
    used = {
        connection.laddr.ip for rank in ranks for connection in rank.net_connections(kind="inet")
    }
    assert used <= {*ADDRESSES, "127.0.0.1"}, "nothing listens on every interface"

    ranks[1].kill()
    cluster.step("a", 2, examples)
    state = cluster.state()
    assert (state.step, state.resumed_step, state.restarts) == (2, 1, 1)
    assert cluster.publish("a", 2).digest == expected[1]

    everything = [*cluster.processes(), *cluster.other.processes()]
    cluster.process.terminate()
    cluster.other.process.terminate()
    assert (cluster.process.wait(60), cluster.other.process.wait(60)) == (0, 0)
    assert gone(everything)
