"""Deltas from the trainer's publisher to the sampler's own copy, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.rollout.engine import Engine
from services.rollout.weights.copies import Copies, Fetcher
from services.rollout.weights.loading import VerifiedWeights, verify
from services.rollout.weights.proofs import ExpectedVersion
from services.trainer.publishing import Publisher, published_file
from shared.errors import Failed, Unavailable
from shared.settings import Settings
from shared.weights.folders import digest_of
from shared.wire import DeltaWeights, PublishRequest
from tests.support.cut_server import CutServer
from tests.support.safetensors_files import hashing

NUM = 20_000
EXPECTED = ExpectedVersion({"a": (NUM,), "b": (NUM,)}, tied=False, roots=())


@dataclass
class Both:
    """A trainer whose weights change in one element of `a` per version, and a sampler."""

    settings: Settings
    publisher: Publisher
    server: CutServer
    copies: Copies
    folder: Path

    def publish(self, version: int, *, changes: int = 1) -> DeltaWeights:
        a = np.random.default_rng(0).integers(0, 1 << 16, NUM, dtype=np.uint16)
        a[: version * changes] ^= 5
        tensors = {"a": a, "b": np.ones(NUM, np.uint16)}
        request = PublishRequest(job_id="job", version=version, method="delta")
        ref = self.publisher.publish(
            request, 5, hashing(lambda folder: save_file(tensors, folder / "model.safetensors"))
        )
        assert isinstance(ref, DeltaWeights)
        for file in (*ref.files, *(step.file for step in ref.steps)):
            path = published_file(self.settings, *file.path.split("/")[2:])
            self.server.files[file.path] = path.read_bytes()
        return ref

    loaded = Path()

    async def load(self, ref: DeltaWeights) -> VerifiedWeights:
        verified = await verify(ref, EXPECTED, self.copies)
        assert isinstance(verified, VerifiedWeights)
        await verified.load(cast(Engine, self))
        assert digest_of(self.loaded) == ref.digest == verified.digest
        return verified

    async def load_files(self, folder: Path) -> None:
        """As an engine does."""
        self.loaded = folder


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    settings = Settings(shm_dir=tmp_path / "shm", runs_dir=tmp_path / "runs")
    with CutServer().running() as server:
        copies = Copies(tmp_path / "copies", Fetcher(server.url, patience_s=0.2))
        yield Both(settings, Publisher(settings, "job"), server, copies, tmp_path)


WHOLE = 4 * NUM


async def test_the_first_version_is_fetched_whole_and_the_next_as_a_delta(both: Both) -> None:
    first = both.publish(0)
    assert first.steps == ()
    assert (await both.load(first)).received_bytes > WHOLE
    second = both.publish(1)
    assert [(step.num_changed, step.num_elements) for step in second.steps] == [(1, 2 * NUM)]
    assert (await both.load(second)).received_bytes < 1000


async def test_a_sampler_that_missed_versions_catches_up_through_a_chain(both: Both) -> None:
    await both.load(both.publish(0))
    for version in (1, 2):
        both.publish(version)
    third = both.publish(3)
    assert len(third.steps) == 3
    assert (await both.load(third)).received_bytes < 3000


async def test_a_sampler_that_missed_too_many_fetches_the_whole(both: Both) -> None:
    await both.load(both.publish(0))
    for version in range(1, 6):
        ref = both.publish(version)
    assert len(ref.steps) == 4
    assert (await both.load(ref)).received_bytes > WHOLE


async def test_one_that_joins_late_fetches_the_whole_and_continues_with_deltas(both: Both) -> None:
    both.publish(0)
    assert (await both.load(both.publish(1))).received_bytes > WHOLE
    assert (await both.load(both.publish(2))).received_bytes < 1000


async def test_the_same_version_again_fetches_nothing(both: Both) -> None:
    await both.load(both.publish(0))
    ref = both.publish(1)
    await both.load(ref)
    assert both.publish(1) == ref
    assert (await both.load(ref)).received_bytes == 0


@pytest.mark.parametrize("damage", ["flipped", "gone", "of another tensor"])
async def test_a_delta_that_is_damaged_or_gone_is_made_up_for_by_the_whole(
    both: Both, damage: str
) -> None:
    await both.load(both.publish(0))
    ref = both.publish(1)
    path = ref.steps[0].file.path
    data = both.server.files.pop(path)
    if damage == "flipped":
        both.server.files[path] = data[:-1] + bytes([data[-1] ^ 1])
    elif damage == "of another tensor":
        both.server.files[path] = data.replace(b'"a"', b'"b"')
    assert (await both.load(ref)).received_bytes > WHOLE
    assert (await both.load(both.publish(2))).received_bytes < 1000


async def test_a_copy_that_was_changed_behind_its_back_is_not_built_upon(both: Both) -> None:
    await both.load(both.publish(0))
    file = both.loaded / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert (await both.load(both.publish(1))).received_bytes > WHOLE


async def test_a_trainer_that_is_unreachable_for_a_while_costs_no_copy(both: Both) -> None:
    await both.load(both.publish(0))
    ref = both.publish(1)
    both.server.status = 503
    with pytest.raises((Unavailable, Failed)):
        await both.load(ref)
    both.server.status = 0
    assert (await both.load(ref)).received_bytes < 1000


async def test_where_most_of_it_changed_the_whole_is_sent(both: Both) -> None:
    await both.load(both.publish(0))
    ref = both.publish(1, changes=NUM)
    assert ref.steps == ()
    await both.load(ref)
    assert len(both.publish(2, changes=NUM // 2).steps) == 0  # nothing changed: both are all of it


async def test_a_first_whole_that_is_wrong_is_refused_by_tensor(both: Both) -> None:
    ref = both.publish(0)
    (path,) = (file.path for file in ref.files)
    data = bytearray(both.server.files[path])
    data[-1] ^= 1
    both.server.files[path] = bytes(data)
    with pytest.raises(Failed, match="1 tensors differ, the first is 'b'"):
        await both.load(ref)
