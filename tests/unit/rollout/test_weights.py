"""What a published version must be before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.rollout.weights import (
    compare,
    has_tied_embeddings,
    published_folder,
    verify,
)
from shared.digest import digest_of
from shared.errors import BadRequest, Failed
from shared.wire import FolderWeights

MODEL = {"embed": (4, 2), "norm": (2,)}


def ref(path: Path, digest: str = "") -> FolderWeights:
    return FolderWeights(
        job_id="job", version=3, method="shm", path=str(path), digest=digest, size_bytes=0
    )


def test_the_same_tensors_do_not_differ() -> None:
    assert compare(dict(MODEL), MODEL, tied=False) is None


def test_a_missing_tensor_is_named() -> None:
    assert (
        compare({"norm": (2,)}, MODEL, tied=False)
        == "1 of 2 tensors are missing, the first is 'embed'"
    )


def test_an_unknown_tensor_is_named() -> None:
    assert (
        compare({**MODEL, "lora_A": (1,)}, MODEL, tied=False)
        == "1 tensors are unknown to the model, the first is 'lora_A'"
    )


def test_another_shape_is_named() -> None:
    assert (
        compare({**MODEL, "embed": (2, 4)}, MODEL, tied=False)
        == "'embed' has shape [2, 4], expected [4, 2]"
    )


def test_the_output_matrix_is_optional_only_where_it_is_tied() -> None:
    with_head = {**MODEL, "lm_head.weight": (4, 2)}
    assert compare(MODEL, with_head, tied=True) is None
    assert compare(with_head, MODEL, tied=True) is None
    assert (
        compare(MODEL, with_head, tied=False)
        == "1 of 3 tensors are missing, the first is 'lm_head.weight'"
    )


def test_verify_returns_the_digest_of_the_tensors(tmp_path: Path) -> None:
    save_file({"norm": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    digest = digest_of(tmp_path)
    assert verify(ref(tmp_path, digest), tmp_path, {"norm": (2,)}, tied=False) == digest


def test_other_bytes_are_refused_with_both_digests(tmp_path: Path) -> None:
    save_file({"norm": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(Failed, match=r"has digest [0-9a-f]{64}, expected abc; it was not loaded"):
        verify(ref(tmp_path, "abc"), tmp_path, {"norm": (2,)}, tied=False)


def test_weights_lie_below_a_root(tmp_path: Path) -> None:
    inside = tmp_path / "shm" / "job" / "v3"
    inside.mkdir(parents=True)
    assert published_folder(ref(inside), (tmp_path / "runs", tmp_path / "shm")) == inside


@pytest.mark.parametrize("path", ["/etc", "shm/../elsewhere", "shm/link", "shm"])
def test_weights_elsewhere_are_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRequest, match="weights are loaded only from below"):
        published_folder(ref(tmp_path / path), (tmp_path / "shm",))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="v9', which is not a folder here"):
        published_folder(ref(tmp_path / "v9"), (tmp_path,))


@pytest.mark.parametrize(
    ("config", "tied"),
    [({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False), ({}, False)],
)
def test_tied_embeddings_are_what_the_config_says(
    tmp_path: Path, config: dict[str, bool], tied: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_tied_embeddings(tmp_path) is tied
