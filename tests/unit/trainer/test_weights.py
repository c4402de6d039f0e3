"""Published weights: complete or absent, written once, the last two kept, with a digest anyone can
recompute."""

import errno
import hashlib
from pathlib import Path

import pytest

from services.trainer.disk import folders
from services.trainer.disk.weights import Publisher, digest
from shared.config import Settings
from shared.errors import Failed


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")


def saving(data: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def test_the_digest_is_of_the_files_bytes_in_name_order(tmp_path):
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first ")
    (tmp_path / "config.json").write_bytes(b"not this")
    assert digest(tmp_path) == hashlib.sha256(b"first second").hexdigest()


def test_a_published_version_says_where_it_is_and_what_it_holds(settings, tmp_path):
    ref = Publisher(settings, "a").publish(3, "shm", 5, saving(b"bytes"))
    assert (ref.job_id, ref.version, ref.method, ref.size_bytes) == ("a", 3, "shm", 5)
    assert ref.path == str(tmp_path / "shm/a/v3")
    assert ref.digest == hashlib.sha256(b"bytes").hexdigest()


def test_the_same_version_again_is_not_written_again(settings):
    publisher = Publisher(settings, "a")
    first = publisher.publish(3, "shm", 5, saving(b"bytes"))
    assert publisher.publish(3, "shm", 5, saving(b"other")) == first
    assert (Path(first.path) / "model.safetensors").read_bytes() == b"bytes"


@pytest.mark.parametrize("method", ["shm", "disk"])
def test_the_last_two_versions_are_kept(settings, method):
    publisher = Publisher(settings, "a")
    refs = [publisher.publish(version, method, 5, saving(b"bytes")) for version in range(4)]
    assert [Path(ref.path).exists() for ref in refs] == [False, False, True, True]


def test_latest_names_the_newest_on_disk(settings, tmp_path):
    publisher = Publisher(settings, "a")
    for version in (1, 2):
        publisher.publish(version, "disk", 5, saving(b"bytes"))
    assert (tmp_path / "runs/a/weights/latest").read_text() == "v2\n"


def test_an_earlier_life_of_the_job_leaves_nothing_that_could_be_mistaken(settings, tmp_path):
    Publisher(settings, "a").publish(3, "shm", 5, saving(b"stale"))
    Publisher(settings, "a").publish(3, "disk", 5, saving(b"stale"))
    again = Publisher(settings, "a")
    assert not (tmp_path / "shm/a").exists()
    ref = again.publish(3, "disk", 5, saving(b"fresh"))
    assert (Path(ref.path) / "model.safetensors").read_bytes() == b"fresh"


def test_without_enough_space_nothing_is_written(settings, tmp_path):
    with pytest.raises(
        Failed,
        match=r"no space to write '.*/shm/a/v1': about 1000000000000000000 bytes are needed and \d+ are free",
    ):
        Publisher(settings, "a").publish(1, "shm", 10**18, saving(b"bytes"))
    assert list((tmp_path / "shm/a").iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(settings, tmp_path):
    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Failed, match=r"no space to write .*: about 5 bytes are needed"):
        Publisher(settings, "a").publish(1, "disk", 5, save)
    assert list((tmp_path / "runs/a/weights").iterdir()) == []


def test_an_error_of_the_writer_leaves_nothing_and_passes_through(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        folders.written_aside(tmp_path / "v1", 1, durable=True) as aside,
    ):
        (aside / "half").write_bytes(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    target = tmp_path / "file" / "v1"
    with (
        pytest.raises(Failed, match=r"cannot write '.*/file/v1'"),
        folders.written_aside(target, 1, durable=False),
    ):
        pass
