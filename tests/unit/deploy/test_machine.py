"""Several trainers on one machine, and who gets which GPU, by hand."""

import pytest

from deploy import machine
from deploy.machine import Plan, plan, visible_devices
from shared.errors import BadRequest
from shared.settings import Settings


@pytest.mark.parametrize(
    ("visible", "settings", "expected"),
    [
        (("0",), {}, Plan(("0",), ("0",), 0.35)),
        (("0",), {"gpu_memory_utilization": 0.5}, Plan(("0",), ("0",), 0.5)),
        (("0", "1"), {}, Plan(("0",), ("1",), 0.85)),
        (("4", "5"), {}, Plan(("4",), ("5",), 0.85)),
        (("0", "1"), {"trainer_ranks": 2}, Plan(("0",), ("0", "1"), 0.35)),
        (
            ("0", "1", "2", "3"),
            {"tensor_parallel_size": 2, "trainer_ranks": 2},
            Plan(("0", "1"), ("2", "3"), 0.85),
        ),
        (("0", "1", "2"), {"trainer_ranks": 2}, Plan(("0",), ("1", "2"), 0.85)),
        (("0", "1"), {"trainer_devices": ("0",)}, Plan(("1",), ("0",), 0.85)),
        (("0", "1"), {"rollout_devices": ("1",)}, Plan(("1",), ("0",), 0.85)),
        (
            ("0", "1"),
            {"rollout_devices": ("1",), "trainer_devices": ("1",)},
            Plan(("1",), ("1",), 0.35),
        ),
        (("0", "1"), {"colocate": True}, Plan(("0",), ("0",), 0.6)),
        (("0", "1"), {"colocate": True, "trainer_ranks": 2}, Plan(("0", "1"), ("0", "1"), 0.6)),
        (("0", "1"), {"colocate": True, "trainer_devices": ("1",)}, Plan(("1",), ("1",), 0.6)),
    ],
)
def test_devices_are_split_where_there_are_enough_and_shared_else(visible, settings, expected):
    assert plan(visible, Settings(**settings)) == expected


def test_without_a_gpu_nothing_is_planned():
    assert plan((), Settings()) is None


def test_more_ranks_than_devices_is_one_sentence():
    with pytest.raises(BadRequest, match=r"HONE_TRAINER_RANKS is 4, and there are 2 device\(s\)"):
        plan(("0", "1"), Settings(trainer_ranks=4))


def test_services_without_a_gpu_are_started_as_they_are():
    shared = plan(("0",), Settings())
    assert shared is not None
    assert shared.environment("reward") == {}
    assert shared.environment("rollout") == {
        "CUDA_VISIBLE_DEVICES": "0",
        "HONE_GPU_MEMORY_UTILIZATION": "0.35",
        "HONE_ROLLOUT_DEVICES": "0",
        "HONE_TRAINER_DEVICES": "0",
    }


def test_who_takes_turns_has_the_same_devices():
    settings = Settings(colocate=True, rollout_devices=("0",), trainer_devices=("1",))
    with pytest.raises(BadRequest, match=r"HONE_ROLLOUT_DEVICES \(0\) are not HONE_TRAINER_D"):
        plan(("0", "1"), settings)


def test_devices_are_those_of_cuda_visible_devices_or_of_the_machine(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(tmp_path) == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_devices(tmp_path) == ("3", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_devices(tmp_path) == ()


def test_devices_come_from_the_environment_as_one_text(monkeypatch):
    monkeypatch.setenv("HONE_ROLLOUT_DEVICES", "0, 1")
    assert Settings().rollout_devices == ("0", "1")


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
