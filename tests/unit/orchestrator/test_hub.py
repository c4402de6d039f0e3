"""Which model folders a job may name, and how sentences call the Hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.orchestrator.data.hub import hub_url, named_model_folder
from shared.errors import BadRequest
from shared.settings import Settings
from tests.support.model_folders import make_model_folder

ONLY = "jobs may name model folders below these only: "


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A folder with models in `models`, in `runs`, and beside them."""
    make_model_folder(tmp_path / "models/one")
    for copy in ("runs/demo-1/checkpoints/step-000001", "private/one"):
        shutil.copytree(tmp_path / "models/one", tmp_path / copy)
    (tmp_path / "models/link").symlink_to(tmp_path / "private/one")
    return tmp_path


def test_jobs_name_models_of_the_folders_that_they_may_and_no_others(folders: Path) -> None:
    settings = Settings(model_dirs=(folders / "models",), runs_dir=folders / "runs")
    for name in ("models/one", "runs/demo-1/checkpoints/step-000001"):
        assert named_model_folder(str(folders / name), settings) == folders / name
    for name in ("private/one", "private/none", "models/link", "models/../private/one", "models2"):
        with pytest.raises(BadRequest, match=f"{ONLY}{folders}/runs, {folders}/models; a Hugging"):
            named_model_folder(str(folders / name), settings)
    with pytest.raises(BadRequest, match="there is no folder"):
        named_model_folder(str(folders / "models/two"), settings)
    assert named_model_folder("Qwen/Qwen2.5-0.5B", settings) is None
    for text in ("a\0b", "x" * 5000):
        with pytest.raises(BadRequest, match="'model'"):
            named_model_folder(text, settings)


def test_without_folders_any_is_named_on_this_machine_and_none_beyond(folders: Path) -> None:
    model, runs = str(folders / "private/one"), folders / "runs"
    here = Settings(runs_dir=runs)
    assert named_model_folder(model, here) == folders / "private/one"
    beyond = Settings(host="0.0.0.0", token=SecretStr("x" * 8), runs_dir=runs)
    with pytest.raises(BadRequest, match=f"{ONLY}{runs}, as HONE_MODEL_DIRS is not set"):
        named_model_folder(model, beyond)


def test_a_folder_that_looks_like_an_id_of_the_hub_is_none(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model_dirs=(folders / "models",), runs_dir=folders / "runs")
    monkeypatch.chdir(folders)
    assert named_model_folder("models/one", settings) == folders / "models/one"
    with pytest.raises(BadRequest, match=ONLY):
        named_model_folder("private/one", settings)


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://me:secret@mirror.lan:8443/hf/", "https://mirror.lan:8443/hf"),
        ("https://mirror.lan/a@b", "https://mirror.lan/a@b"),
    ],
)
def test_a_mirror_of_the_hub_is_named_without_its_password(
    endpoint: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert hub_url() == shown
