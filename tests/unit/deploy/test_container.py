"""What a container gives the service in it: GPUs, a port, an address."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy import container, probe
from shared.errors import BadRequest, Unavailable
from shared.settings import Settings

GPUS = ("0", "1", "2", "3")


def test_each_sampler_has_gpus_a_port_and_an_address_of_its_own() -> None:
    settings = Settings(rollout_devices=("1", "2", "3"), trainer_devices=("0",))
    assert container.num_places(settings, GPUS) == 3
    for place, gpu in enumerate(("1", "2", "3")):
        variables = container.of_sampler(settings, GPUS, place, "box")
        assert variables["CUDA_VISIBLE_DEVICES"] == gpu
        assert variables["HONE_ROLLOUT_PORT"] == str(8001 + place)
        assert variables["HONE_ROLLOUT_ADVERTISE_URL"] == f"http://box:{8001 + place}"
        assert float(variables["HONE_GPU_MEMORY_UTILIZATION"]) == 0.85


def test_a_sampler_over_two_gpus_takes_two_at_a_time() -> None:
    settings = Settings(
        rollout_devices=("0", "1", "2", "3"), trainer_devices=("3",), tensor_parallel_size=2
    )
    assert container.num_places(settings, GPUS) == 2
    first, second = (container.of_sampler(settings, GPUS, place, "box") for place in (0, 1))
    assert first["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert second["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert float(first["HONE_GPU_MEMORY_UTILIZATION"]) == 0.85
    assert float(second["HONE_GPU_MEMORY_UTILIZATION"]) == 0.35, "it shares one with the trainer"


def test_a_sampler_without_a_trainer_beside_it_has_its_gpus_for_itself() -> None:
    """compose.samplers.yaml: the trainer is on another machine, so no device is said to be its."""
    alone = container.of_sampler(Settings(rollout_devices=("0",)), ("0",), 0, "box")
    assert float(alone["HONE_GPU_MEMORY_UTILIZATION"]) == 0.85
    assert alone["HONE_TRAINER_DEVICES"] == ""
    over_all = Settings(rollout_devices=GPUS, tensor_parallel_size=4)
    assert container.num_places(over_all, GPUS) == 1
    variables = container.of_sampler(over_all, GPUS, 0, "box")
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert float(variables["HONE_GPU_MEMORY_UTILIZATION"]) == 0.85


def test_who_takes_turns_takes_them_on_the_gpus_of_each_sampler() -> None:
    settings = Settings(rollout_devices=("0", "1"), trainer_devices=("0", "1"), colocate=True)
    assert container.num_places(settings, ("0", "1")) == 2
    for place, gpu in enumerate(("0", "1")):
        variables = container.of_sampler(settings, ("0", "1"), place, "box")
        assert variables["CUDA_VISIBLE_DEVICES"] == gpu
        assert float(variables["HONE_GPU_MEMORY_UTILIZATION"]) == 0.6
    assert container.of_trainer(settings, ("0", "1"))["CUDA_VISIBLE_DEVICES"] == "0,1"
    other = settings.model_copy(update={"trainer_devices": ("1",)})
    with pytest.raises(BadRequest, match="HONE_COLOCATE is set"):
        container.of_sampler(other, ("0", "1"), 0, "box")


def test_a_sampler_of_more_gpus_than_it_is_given_is_refused() -> None:
    settings = Settings(rollout_devices=("0",), trainer_devices=("1",), tensor_parallel_size=2)
    with pytest.raises(BadRequest, match="HONE_TENSOR_PARALLEL_SIZE is 2, and there are 1 device"):
        container.of_sampler(settings, ("0", "1"), 0, "box")


def test_the_trainer_has_a_rank_for_each_of_its_gpus() -> None:
    settings = Settings(rollout_devices=("0",), trainer_devices=("2", "3"))
    variables = container.of_trainer(settings, GPUS)
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert variables["HONE_TRAINER_RANKS"] == "2"
    with pytest.raises(BadRequest, match="HONE_TRAINER_RANKS is 3, and there are 2 device"):
        container.of_trainer(
            Settings(rollout_devices=("0",), trainer_devices=("2", "3"), trainer_ranks=3), GPUS
        )


def test_without_gpus_a_sampler_has_a_port_and_an_address_only() -> None:
    variables = container.of_sampler(Settings(rollout_devices=("0",)), (), 1, "box")
    assert variables == {
        "HONE_ROLLOUT_PORT": "8002",
        "HONE_ROLLOUT_ADVERTISE_URL": "http://box:8002",
    }
    assert container.of_trainer(Settings(trainer_devices=("0",)), ()) == {}
    named = Settings(rollout_advertise_url="http://proxy:80")
    assert "HONE_ROLLOUT_ADVERTISE_URL" not in container.of_sampler(named, (), 0, "box")


def test_a_place_is_one_samplers_until_it_ends(tmp_path: Path) -> None:
    """A sampler of its own process has the first place, also after it has become the service."""
    code = (
        "import os, pathlib, sys; from deploy.container import take_place; "
        f"take_place(pathlib.Path({str(tmp_path)!r}), 2); "
        "os.execv(sys.executable, [sys.executable, '-c', 'print(1, flush=True); input()'])"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin and other.stdout and other.stdout.readline() == b"1\n"
    assert container.take_place(tmp_path, 2) == 1
    with pytest.raises(Unavailable, match="all 2 places of samplers on this machine are taken"):
        container.take_place(tmp_path, 2)
    other.kill()
    other.communicate()
    assert container.take_place(tmp_path, 2) == 0


def test_a_name_that_is_no_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["container", "roll-out"])
    with pytest.raises(SystemExit, match="'roll-out' is not a service; expected one of"):
        container.main()


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("fd00::7", "[fd00::7]"),
        ("10.0.0.7", "10.0.0.7"),
        ("hone-reward", "hone-reward"),
    ],
)
def test_a_service_is_asked_where_it_listens(host: str, reached: str) -> None:
    assert container.own_url("reward", Settings(host=host)) == f"http://{reached}:8003"


class Answer(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(b"the engine is starting")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_health_check_is_that_of_readyz(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "URL", tmp_path / "url")
    for variable in ("http_proxy", "HTTP_PROXY"):  # Docker sets them from its own configuration
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SystemExit, match="No such file"):
        probe.main()
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = Settings(host="0.0.0.0", reward_port=server.server_port)
        probe.URL.write_text(container.own_url("reward", settings))
        probe.main()
        monkeypatch.setattr(Answer, "status", 503)
        with pytest.raises(SystemExit, match="the engine is starting"):
            probe.main()
        server.shutdown()
    with pytest.raises(SystemExit, match="refused"):
        probe.main()


def test_the_health_check_imports_nothing_of_ours() -> None:
    code = "import sys, deploy.probe; print([m for m in sys.modules if m.startswith('shared')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ})
    assert shown.stdout == b"[]\n"
