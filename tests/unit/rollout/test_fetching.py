"""Weights that come over the network: whole, resumed, and from nowhere but the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pydantic
import pytest
from safetensors.numpy import save

from services.rollout.weights.copies import Copies, Fetcher
from services.rollout.weights.loading import verify
from services.rollout.weights.proofs import ExpectedVersion
from shared.errors import Failed, Unavailable
from shared.weights.folders import digest, stored_tensors, tensor_digests
from shared.wire import HttpWeights, WeightFile
from tests.support.cut_server import CutServer

PATH = "/weights/job/v3/model.safetensors"
DATA = bytes(range(256)) * 400


@pytest.fixture
def server() -> Iterator[CutServer]:
    with CutServer({PATH: DATA}).running() as server:
        yield server


def fetch(server: CutServer, folder: Path, size_bytes: int = len(DATA), **settings: object) -> int:
    fetcher = Fetcher(server.url, **{"patience_s": 0.5, **settings})  # pyright: ignore[reportArgumentType]
    return fetcher.fetch((WeightFile(path=PATH, size_bytes=size_bytes),), folder)


def test_a_file_is_fetched_with_the_token(server: CutServer, tmp_path: Path) -> None:
    assert fetch(server, tmp_path / "new", token="secret") == len(DATA)
    assert (tmp_path / "new/model.safetensors").read_bytes() == DATA
    assert (server.ranges, server.authorizations) == ([None], ["Bearer secret"])


def test_a_cut_transfer_continues_where_it_broke_off(server: CutServer, tmp_path: Path) -> None:
    server.cuts = [70_000, 10, 0]
    assert fetch(server, tmp_path) == len(DATA)
    assert (tmp_path / "model.safetensors").read_bytes() == DATA
    assert server.ranges == [None, "bytes=70000-", "bytes=70010-", "bytes=70010-"]


def test_a_server_that_ignores_ranges_is_read_from_the_start(
    server: CutServer, tmp_path: Path
) -> None:
    server.cuts, server.takes_ranges = [1000], False
    fetch(server, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == DATA


def test_a_trainer_that_is_unreachable_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9: .* is HONE_TRAINER_URL"):
        Fetcher("http://127.0.0.1:9", patience_s=0.0).fetch(
            (WeightFile(path=PATH, size_bytes=5),), tmp_path
        )


def test_what_stays_cut_is_unavailable_and_kept_for_the_next_call(
    server: CutServer, tmp_path: Path
) -> None:
    server.cuts = [100] + [0] * 100
    with pytest.raises(Unavailable, match=r"ended|RemoteProtocolError"):
        fetch(server, tmp_path, patience_s=0.2)
    server.cuts = []
    assert fetch(server, tmp_path) == len(DATA) - 100


def test_bytes_that_were_there_before_are_no_progress(server: CutServer, tmp_path: Path) -> None:
    server.cuts, server.takes_ranges = [1000] * 10_000, False
    with pytest.raises(Unavailable, match="RemoteProtocolError"):
        fetch(server, tmp_path)
    assert len(server.ranges) < 10


def test_a_transfer_that_ends_early_is_unavailable_and_kept(
    server: CutServer, tmp_path: Path
) -> None:
    server.files[PATH] = DATA[:1000]
    with pytest.raises(Unavailable, match=f"after 1000 of {len(DATA)} bytes"):
        fetch(server, tmp_path)
    server.files[PATH] = DATA
    assert fetch(server, tmp_path) == len(DATA) - 1000


def test_a_version_that_is_gone_is_not_waited_for(server: CutServer, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(Failed, match="404") as caught:
        fetch(server, tmp_path)
    assert (caught.value.code, len(server.ranges)) == ("digest_differs", 1)


@pytest.mark.parametrize("size_bytes", [10, len(DATA) - 1])
def test_a_file_longer_than_published_is_refused_with_both_sizes(
    server: CutServer, tmp_path: Path, size_bytes: int
) -> None:
    with pytest.raises(Failed, match=f"bytes or more, expected {size_bytes}"):
        fetch(server, tmp_path, size_bytes)
    assert not (tmp_path / "model.safetensors").exists()


def test_redirects_are_not_followed(server: CutServer, tmp_path: Path) -> None:
    with CutServer({PATH: DATA}).running() as elsewhere:
        server.status, server.headers = 307, {"location": elsewhere.url + PATH}
        with pytest.raises((Failed, Unavailable)):
            fetch(server, tmp_path, patience_s=0.0)
        assert elsewhere.ranges == []


@pytest.mark.parametrize(
    "path",
    [
        "http://elsewhere/weights/job/v3/model.safetensors",
        "//elsewhere/weights/job/v3/a",
        "/weights/../state/x",
        "/weights/job/../../state",
        "/weights/job/v3/.hidden",
        "/weights/job/v3/a/b",
        "/state",
        "/weights/job/v3/a?x=1",
    ],
)
def test_a_path_that_is_no_file_of_a_version_is_refused(path: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="pattern"):
        WeightFile(path=path, size_bytes=1)


def test_too_little_space_is_named_before_anything_is_fetched(
    server: CutServer, tmp_path: Path
) -> None:
    with pytest.raises(Failed, match="no space to fetch weights into") as caught:
        fetch(server, tmp_path, 10**18)
    assert (caught.value.code, server.ranges) == ("disk_full", [])


def http_ref(server: CutServer, data: bytes, tmp_path: Path) -> HttpWeights:
    (tmp_path / "published").mkdir()
    (tmp_path / "published/model.safetensors").write_bytes(data)
    tensors = tensor_digests(stored_tensors(tmp_path / "published"))
    server.files[PATH] = data
    return HttpWeights(
        job_id="job",
        version=3,
        method="http",
        digest=digest(tensors),
        tensors=tensors,
        size_bytes=len(data),
        files=(WeightFile(path=PATH, size_bytes=len(data)),),
    )


async def test_bytes_that_changed_on_the_way_are_refused_and_fetched_again(
    server: CutServer, tmp_path: Path
) -> None:
    data = save({"a": np.arange(8, dtype=np.float32), "b": np.zeros(8, np.float32)})
    ref = http_ref(server, data, tmp_path)
    expected = ExpectedVersion({"a": (8,), "b": (8,)}, tied=False, roots=())
    copies = Copies(tmp_path / "copies", Fetcher(server.url))
    server.files[PATH] = data[:-1] + b"\x01"
    with pytest.raises(Failed, match="1 tensors differ, the first is 'b'") as caught:
        await verify(ref, expected, copies)
    assert caught.value.code == "digest_differs"
    server.files[PATH] = data
    verified = await verify(ref, expected, copies)
    assert (verified.digest, verified.received_bytes) == (ref.digest, len(data))
