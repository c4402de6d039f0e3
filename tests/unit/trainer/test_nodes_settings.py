"""The settings of several nodes fit together, or one sentence says which does not and what was
expected."""

import pytest

from services.trainer.processes.launcher import check_nodes, rank_environment
from services.trainer.processes.rendezvous import Place
from shared.errors import BadRequest
from shared.settings import Settings

GOOD = {
    "trainer_nodes": 2,
    "trainer_node_rank": 1,
    "trainer_rendezvous": "10.0.0.1:29500",
    "trainer_interface": "lo",
}


def test_settings_that_fit_together_are_good():
    check_nodes(Settings())
    check_nodes(Settings(**GOOD))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"trainer_node_rank": 2},
            "HONE_TRAINER_NODE_RANK is 2 and HONE_TRAINER_NODES is 2; expected a node rank from 0 "
            "to 1",
        ),
        (
            {"trainer_rendezvous": None},
            "HONE_TRAINER_NODES is 2 and HONE_TRAINER_RENDEZVOUS is not set; expected "
            "<host>:<port>",
        ),
        (
            {"trainer_rendezvous": "10.0.0.1"},
            "HONE_TRAINER_RENDEZVOUS is '10.0.0.1'; expected <host>:<port>, such as",
        ),
        (
            {"trainer_rendezvous": "node0:99999"},
            "HONE_TRAINER_RENDEZVOUS is 'node0:99999'; expected <host>:<port>",
        ),
        (
            {"trainer_interface": None},
            "HONE_TRAINER_INTERFACE is not set; expected the network interface of this host",
        ),
        (
            {"trainer_interface": "nope9"},
            "HONE_TRAINER_INTERFACE is 'nope9'; expected an interface of this host: lo",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(change, sentence):
    with pytest.raises(BadRequest) as error:
        check_nodes(Settings(**(GOOD | change)))
    assert sentence in error.value.detail


@pytest.mark.parametrize(
    ("settings", "gloo", "nccl"),
    [
        ({}, "lo", "lo"),
        ({"host": "::1"}, "lo", "lo"),
        ({"host": "0.0.0.0"}, "lo", None),
        ({"host": "10.0.0.5"}, "lo", None),
        (GOOD | {"host": "0.0.0.0", "trainer_interface": "eth7"}, "eth7", "eth7"),
    ],
)
def test_ranks_of_one_node_meet_on_loopback_and_nccl_where_samplers_may_be(
    settings, gloo, nccl, monkeypatch
):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    environment = rank_environment(Settings(**settings))
    assert environment["GLOO_SOCKET_IFNAME"] == gloo
    assert environment.get("NCCL_SOCKET_IFNAME") == nccl


def test_an_interface_that_the_environment_names_is_left():
    """For a host with several, where NCCL would find another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", "eth7")
        assert rank_environment(Settings())["NCCL_SOCKET_IFNAME"] == "eth7"


def test_ranks_are_counted_node_by_node():
    place = Place.of(Settings(**GOOD, trainer_ranks=4), local_rank=3)
    assert (place.rank, place.num_ranks, place.shape) == (7, 8, "2 node(s) of 4 rank(s)")
