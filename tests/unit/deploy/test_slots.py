"""Several trainers on one machine: who is where."""

import pytest

from deploy import machine
from shared.errors import BadRequest
from shared.settings import Settings


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def test_each_trainer_has_its_own_samplers():
    settings = Settings(trainers=2, rollout_replicas=2, trainer_port=7000, rollout_port=9000)
    assert machine.ports(settings) == {
        "reward": 8003,
        "trainer": 7000,
        "rollout": 9000,
        "orchestrator": 8000,
        "trainer-7001": 7001,
        "rollout-9001": 9001,
        "rollout-9002": 9002,
        "rollout-9003": 9003,
    }
    first, second = machine.slots(settings)
    assert machine.variables([second], url) == {
        "HONE_TRAINER_URL": "http://127.0.0.1:7001",
        "HONE_ROLLOUT_URL": "http://127.0.0.1:9002,http://127.0.0.1:9003",
    }
    named = Settings.model_validate(machine.places([first, second], url))
    assert [(one.trainer_url, one.rollout_urls) for one in named.per_trainer] == [
        (url(7000), (url(9000), url(9001))),
        (url(7001), (url(9002), url(9003))),
    ]


def test_a_port_of_two_services_is_named():
    taken = "port 8002 would be taken by both trainer and rollout-8002"
    with pytest.raises(BadRequest, match=taken):
        machine.ports(Settings(rollout_replicas=2))
    with pytest.raises(BadRequest, match=r"port 8003 .* expected HONE_TRAINER_PORT"):
        machine.ports(Settings(trainers=2, rollout_port=9000))
