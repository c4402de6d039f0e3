"""Published weights: complete or absent, written once, the last two kept, with a digest anyone can
recompute."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from services.trainer.disk import folders
from services.trainer.publishing import METHODS, Publisher, published_file
from shared.errors import Failed
from shared.job import SyncMethod
from shared.settings import Settings
from shared.weights.folders import CONFIG, FILES, WEIGHTS, digest_of, stored_tensors, tensor_digests
from shared.wire import PublishRequest
from tests.support.safetensors_files import hashing, safetensors


def saving_tensor(data: bytes):
    """Saves as the engine does."""
    torch = pytest.importorskip("torch")
    from services.trainer import transfer

    tensor = torch.tensor(list(data), dtype=torch.uint8)
    return lambda folder: transfer.write_tensors({"w": tensor}, folder / "model.safetensors")


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")


def request(version: int, method: str) -> PublishRequest:
    return PublishRequest(job_id="a", version=version, method=method)


def saving(data: bytes):
    return hashing(lambda folder: (folder / "model.safetensors").write_bytes(safetensors(w=data)))


def test_a_published_version_says_where_it_is_and_what_it_holds(settings, tmp_path):
    ref = Publisher(settings, "a").publish(request(3, "shm"), 5, saving(b"bytes"))
    assert (ref.job_id, ref.version, ref.method) == ("a", 3, "shm")
    assert ref.path == str(tmp_path / "shm/a/v3")
    file = Path(ref.path) / "model.safetensors"
    assert (ref.digest, ref.size_bytes) == (digest_of(Path(ref.path)), file.stat().st_size)
    assert ref.tensors == tensor_digests(stored_tensors(Path(ref.path)))


def test_the_same_version_again_is_not_written_again(settings):
    publisher = Publisher(settings, "a")
    first = publisher.publish(request(3, "shm"), 5, saving(b"bytes"))
    assert publisher.publish(request(3, "shm"), 5, saving(b"other")) == first
    assert (Path(first.path) / "model.safetensors").read_bytes() == safetensors(w=b"bytes")


@pytest.mark.parametrize("method", ["shm", "disk"])
def test_the_last_two_versions_are_kept(settings, method):
    publisher = Publisher(settings, "a")
    refs = [
        publisher.publish(request(version, method), 5, saving(b"bytes")) for version in range(4)
    ]
    assert [Path(ref.path).exists() for ref in refs] == [False, False, True, True]


def test_latest_names_the_newest_on_disk(settings, tmp_path):
    publisher = Publisher(settings, "a")
    for version in (1, 2):
        publisher.publish(request(version, "disk"), 5, saving(b"bytes"))
    assert (tmp_path / "runs/a/weights/latest").read_text() == "v2\n"


def test_what_is_on_the_volume_is_committed_and_what_is_in_memory_is_not(tmp_path):
    committed = tmp_path / "committed"
    settings = Settings(
        shm_dir=tmp_path / "shm",
        runs_dir=tmp_path / "runs",
        runs_commit=f"cp -r {tmp_path}/runs/a/weights {committed}",
    )
    publisher = Publisher(settings, "a")
    publisher.publish(request(1, "shm"), 5, saving(b"bytes"))
    assert not committed.exists()
    publisher.publish(request(1, "disk"), 5, saving(b"bytes"))
    assert (committed / "latest").read_text() == "v1\n"
    assert (committed / "v1/model.safetensors").read_bytes() == safetensors(w=b"bytes")


def test_a_version_that_was_not_committed_is_published_again(tmp_path):
    allowed = tmp_path / "allowed"
    commit = f"ls {allowed}"
    settings = Settings(shm_dir=tmp_path, runs_dir=tmp_path / "runs", runs_commit=commit)
    publisher = Publisher(settings, "a")
    with pytest.raises(Failed, match=r"samplers cannot be shown the weights: 'ls .*' ended with"):
        publisher.publish(request(1, "disk"), 5, saving(b"bytes"))
    allowed.touch()
    ref = publisher.publish(request(1, "disk"), 5, saving(b"other"))
    assert (Path(ref.path) / "model.safetensors").read_bytes() == safetensors(w=b"other")


def test_an_earlier_life_of_the_job_leaves_nothing_that_could_be_mistaken(settings, tmp_path):
    Publisher(settings, "a").publish(request(3, "shm"), 5, saving(b"stale"))
    Publisher(settings, "a").publish(request(3, "disk"), 5, saving(b"stale"))
    again = Publisher(settings, "a")
    assert (tmp_path / "shm/a").exists(), "a constructor removes nothing"
    again.close()
    assert not (tmp_path / "shm/a").exists()
    ref = again.publish(request(3, "disk"), 5, saving(b"fresh"))
    assert (Path(ref.path) / "model.safetensors").read_bytes() == safetensors(w=b"fresh")


def test_without_enough_space_nothing_is_written(settings, tmp_path):
    with pytest.raises(
        Failed,
        match=r"no space to write '.*/shm/a/v1': about 1000000000000000000 bytes are needed "
        r"and \d+ are free",
    ):
        Publisher(settings, "a").publish(request(1, "shm"), 10**18, saving(b"bytes"))
    assert list((tmp_path / "shm/a").iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing(settings, tmp_path):
    def save(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Failed, match=r"no space to write .*: about 5 bytes are needed"):
        Publisher(settings, "a").publish(request(1, "disk"), 5, save)
    assert list((tmp_path / "runs/a/weights").iterdir()) == []


def test_an_error_of_the_writer_leaves_nothing_and_passes_through(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        folders.write_atomically(tmp_path / "v1", 1, durable=True) as aside,
    ):
        (aside / "half").write_bytes(b"half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_two_who_write_one_folder_do_not_disturb_each_other(tmp_path):
    """A trainer that was superseded as it wrote a checkpoint, and the job's trainer now."""
    target = tmp_path / "step-000003"
    with folders.write_atomically(target, 1, durable=True) as late:
        (late / "model").write_bytes(b"of the superseded one")
        with folders.write_atomically(target, 1, durable=True) as own:
            (own / "manifest").write_bytes(b"of the other one")
        assert [path.name for path in target.iterdir()] == ["manifest"]
        (late / "state").write_bytes(b"of the superseded one")
    assert sorted(path.name for path in target.iterdir()) == ["model", "state"]
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_swept_while_it_is_written_does_not_become_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rmtree_beside_a_writer(folder: Path, **_: object) -> None:
        (folder / "b").unlink()  # and the folder stays: another file came into it meanwhile

    target = tmp_path / "v1"
    with pytest.raises(Failed), folders.write_atomically(target, 1, durable=False) as late:
        (late / "a").write_text("")
        (late / "b").write_text("")
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", rmtree_beside_a_writer)
            folders.sweep(tmp_path)
    assert not target.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    target = tmp_path / "file" / "v1"
    with (
        pytest.raises(Failed, match=r"cannot write '.*/file/v1'"),
        folders.write_atomically(target, 1, durable=False),
    ):
        pass


def test_every_method_that_a_job_can_name_can_be_published():
    assert METHODS.keys() == set(get_args(SyncMethod))


@pytest.mark.parametrize("method", ["shm", "disk"])
def test_a_published_version_that_was_damaged_is_written_again(settings, method):
    publisher = Publisher(settings, "a")
    first = publisher.publish(request(3, method), 5, saving(b"bytes"))
    file = Path(first.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"X")
    assert publisher.publish(request(3, method), 5, saving(b"bytes")) == first
    assert digest_of(Path(first.path)) == first.digest


def test_another_epoch_asks_for_the_same_version_under_its_own_name(settings):
    publisher = Publisher(settings, "a")
    first = publisher.publish(request(3, "shm"), 5, saving(b"bytes"))
    later = request(3, "shm").model_copy(update={"attempt": 4, "epoch": 2})
    again = publisher.publish(later, 5, saving(b"other"))
    assert (again.fence, again.digest) == ((4, 2), first.digest)


def saving_adapter(data: bytes, rank: int = 4):
    def save(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(safetensors(a=data))
        (folder / CONFIG).write_text(f'{{"r": {rank}}}')

    return save


def test_an_adapter_is_published_alone_under_a_name_of_its_version_and_fence(settings, tmp_path):
    fenced = request(3, "lora").model_copy(update={"attempt": 4, "epoch": 2})
    ref = Publisher(settings, "a").publish(fenced, 5, saving_adapter(b"bytes"))
    folder = tmp_path / "shm/a/a3"
    assert (ref.method, ref.adapter, ref.path) == ("lora", "a/v3-4.2", str(folder))
    assert [(file.path, file.size_bytes) for file in ref.files] == [
        (f"/weights/a/a3/{name}", (folder / name).stat().st_size) for name in FILES
    ]
    assert ref.size_bytes == sum(file.size_bytes for file in ref.files)
    assert published_file(settings, *ref.files[0].path.split("/")[2:]) == folder / CONFIG
    assert ref.tensors.keys() == {"a", CONFIG}


def test_the_configuration_of_an_adapter_is_in_its_digest(settings):
    one = Publisher(settings, "a").publish(request(3, "lora"), 5, saving_adapter(b"bytes"))
    other = Publisher(settings, "b").publish(request(3, "lora"), 5, saving_adapter(b"bytes", 8))
    assert one.digest != other.digest
    assert [name for name in one.tensors if one.tensors[name] != other.tensors[name]] == [CONFIG]


def test_a_damaged_adapter_is_written_again_and_the_last_two_are_kept(settings, tmp_path):
    publisher = Publisher(settings, "a")
    refs = [publisher.publish(request(n, "lora"), 5, saving_adapter(b"bytes")) for n in range(3)]
    (tmp_path / "shm/a/a2" / CONFIG).write_text('{"r": 5}')
    again = publisher.publish(request(2, "lora"), 5, saving_adapter(b"bytes"))
    assert (again, (tmp_path / "shm/a/a2" / CONFIG).read_text()) == (refs[2], '{"r": 4}')
    assert [Path(ref.path).exists() for ref in refs] == [False, True, True]
    publisher.close()
    assert not (tmp_path / "shm/a").exists()


def test_on_disk_files_names_and_the_pointer_are_flushed_before_they_are_named(
    settings, tmp_path, monkeypatch
):
    flushed: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flushed.append(str(path.relative_to(tmp_path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    Publisher(settings, "a").publish(request(1, "disk"), 5, saving(b"bytes"))
    weights = "runs/a/weights"
    assert {".", "runs", "runs/a"} <= set(flushed[:3])  # the folders made on the way
    file, folder, named = flushed[3:6]
    assert folder.startswith(f"{weights}/.tmp-v1.")
    assert (file, named) == (f"{folder}/model.safetensors", weights)
    pointer, names = flushed[6:]
    assert (pointer.startswith(f"{weights}/.latest."), names) == (True, weights)


def test_in_shared_memory_nothing_is_flushed(settings, tmp_path, monkeypatch):
    Publisher(settings, "a").publish(request(1, "shm"), 5, saving(b"bytes"))
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("flushed"))
    Publisher(settings, "a").publish(request(2, "shm"), 5, saving(b"bytes"))


def test_memory_of_a_forgotten_version_is_written_over(settings):
    publisher = Publisher(settings, "a")
    inodes = []
    for version in range(5):
        data = b"version %d" % version
        ref = publisher.publish(request(version, "shm"), 5, saving_tensor(data))
        file = Path(ref.path) / "model.safetensors"
        inodes.append(file.stat().st_ino)
        assert digest_of(Path(ref.path)) == ref.digest
        assert file.read_bytes().endswith(data)
    assert len(set(inodes)) == 3 and inodes[3:] == inodes[:2]


def test_what_somebody_still_maps_is_not_written_over(settings):
    from safetensors import safe_open

    publisher = Publisher(settings, "a")
    first = publisher.publish(request(0, "shm"), 5, saving_tensor(b"version 0"))
    with safe_open(Path(first.path) / "model.safetensors", "pt") as file:
        mapped = file.get_tensor("w")
    for version in range(1, 5):
        publisher.publish(request(version, "shm"), 5, saving_tensor(b"version %d" % version))
    assert bytes(mapped.tolist()) == b"version 0"


OPENED_MEANWHILE = """
import fcntl, os, sys
from pathlib import Path
from services.trainer.disk import folders

spare, folder, moment = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
real, calls = fcntl.fcntl, 0


def reader(stream, command, *argument):
    global calls
    if command == fcntl.F_SETLEASE:
        calls += 1
        if calls == moment:
            for file in (*spare.glob("*.safetensors"), *folder.glob("*.safetensors")):
                try:
                    os.open(file, os.O_RDONLY | os.O_NONBLOCK)
                except BlockingIOError:
                    pass
    return real(stream, command, *argument)


fcntl.fcntl = reader
folders.reuse(spare, folder)
"""


@pytest.mark.parametrize("moment", [1, 2], ids=["before the lease", "under the lease"])
def test_a_reader_that_opens_while_memory_is_taken_over_ends_no_trainer(tmp_path, moment):
    """To break a lease, the kernel sends its holder SIGIO, which ends a process."""
    spare, folder = tmp_path / "spare", tmp_path / "new"
    for made in (spare, folder):
        made.mkdir()
    (spare / "model.safetensors").write_bytes(b"old")
    command = [sys.executable, "-c", OPENED_MEANWHILE, str(spare), str(folder), str(moment)]
    assert subprocess.run(command, cwd=Path(__file__).parents[3]).returncode == 0
    assert [*folder.iterdir()] == ([folder / "model.safetensors"] if moment == 2 else [])
    assert not spare.exists()


def test_what_is_opened_by_its_old_name_is_never_written_over(tmp_path, monkeypatch):
    """No one finds the file by that name any more when it is looked whether it is unused."""
    spare, folder = tmp_path / "spare", tmp_path / "new"
    for made in (spare, folder):
        made.mkdir()
    file = spare / "model.safetensors"
    file.write_bytes(b"old")
    is_unused = folders._is_unused

    def opened_right_after(path):
        unused = is_unused(path)
        assert not file.exists(), "it could be opened now, and be written over"
        return unused

    monkeypatch.setattr(folders, "_is_unused", opened_right_after)
    folders.reuse(spare, folder)
    assert (folder / "model.safetensors").read_bytes() == b"old"


def test_a_smaller_version_leaves_nothing_of_the_larger_one_behind_it(settings):
    publisher = Publisher(settings, "a")
    for version, size in enumerate((5000, 4000, 3000, 20)):
        ref = publisher.publish(request(version, "shm"), 5, saving_tensor(bytes(size)))
    library = {name: each.size_bytes for name, each in stored_tensors(Path(ref.path)).items()}
    assert library == {"w": 20} and digest_of(Path(ref.path)) == ref.digest
    assert (Path(ref.path) / "model.safetensors").stat().st_size < 200
