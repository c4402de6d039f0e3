"""What `model` may name, checked alike by every service."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.weights.model_folder import model_folder
from tests.support.safetensors_files import safetensors


def test_a_folder_with_a_model_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors(w=b"weights"))
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_folder_whose_weights_are_garbage_is_refused_by_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 100)
    with pytest.raises(BadRequest) as raised:
        model_folder(str(tmp_path))
    assert raised.value.detail.startswith(
        f"'model': '{tmp_path}/model.safetensors' is not a whole safetensors file: its header would"
    )


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "01-ai/Yi-6B"])
def test_a_hugging_face_id_is_left_to_the_hub(model: str) -> None:
    assert model_folder(model) is None


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing", "../missing", "~/model", "a/b/c", "a b", "a/", "/a"]
)
def test_what_is_neither_is_refused_by_name(model: str) -> None:
    with pytest.raises(BadRequest) as raised:
        model_folder(model)
    assert raised.value.detail.startswith(f"'model': there is no folder {model!r} here; expected")


def test_a_name_that_no_file_may_have_is_refused() -> None:
    with pytest.raises(
        BadRequest, match=r"^'model': 'aaa.*: File name too long; expected a folder"
    ):
        model_folder("a" * 300)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"has no config\.json"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadRequest, match=r"has no \*\.safetensors"):
        model_folder(str(tmp_path))
    with pytest.raises(BadRequest, match="is a file"):
        model_folder(str(tmp_path / "config.json"))
