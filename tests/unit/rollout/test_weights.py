"""What a published version must be before it is loaded; the labels beside tokens, whose weights
sampled them and which version; and a sampler that met the trainer after it was given up for late.
vLLM is imported where it is used: every worker of pytest imports the test modules."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.rollout.running import label, spans
from services.rollout.weights.copies import Copies, Fetcher
from services.rollout.weights.loading import LOADERS, published_folder, verify
from services.rollout.weights.proofs import (
    ExpectedVersion,
    Shapes,
    compare,
    expected_version,
)
from shared.errors import BadRequest, Conflict, Failed
from shared.host.disk import run_for_volume
from shared.job import SyncMethod
from shared.weights.folders import digest_of, stored_tensors, tensor_digests
from shared.wire import FolderWeights, Span

if TYPE_CHECKING:
    from services.rollout.on_vllm.inside_transfer import Incoming


MODEL: Shapes = {"embed": (4, 2), "norm": (2,)}
NO_COPIES = Copies(Path("/nonexistent"), Fetcher("http://127.0.0.1:9"))


def ref(path: Path, digest: str = "") -> FolderWeights:
    return FolderWeights(
        job_id="job", version=3, method="shm", path=str(path), digest=digest, size_bytes=0
    )


WITH_HEAD = {**MODEL, "lm_head.weight": (4, 2)}


@pytest.mark.parametrize(
    ("tensors", "expected", "tied", "difference"),
    [
        (MODEL, MODEL, False, None),
        ({"norm": (2,)}, MODEL, False, "1 of 2 tensors are missing, the first is 'embed'"),
        (
            {**MODEL, "x": (1,)},
            MODEL,
            False,
            "1 tensors are unknown to the model, the first is 'x'",
        ),
        ({**MODEL, "embed": (2, 4)}, MODEL, False, "'embed' has shape [2, 4], expected [4, 2]"),
        (MODEL, WITH_HEAD, True, None),
        (WITH_HEAD, MODEL, True, None),
        (MODEL, WITH_HEAD, False, "1 of 3 tensors are missing, the first is 'lm_head.weight'"),
    ],
)
def test_tensors_that_differ_from_the_models_are_named(
    tensors: Shapes, expected: Shapes, tied: bool, difference: str | None
) -> None:
    assert compare(tensors, expected, tied=tied) == difference


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "shm" / "v3"
    folder.mkdir(parents=True)
    save_file(
        {"norm": np.ones(2, np.float32), "bias": np.zeros(2, np.float32)},
        folder / "model.safetensors",
    )
    return folder


def expected(folder: Path, **shapes: tuple[int, ...]) -> ExpectedVersion:
    return ExpectedVersion(
        shapes or {"norm": (2,), "bias": (2,)}, tied=False, roots=(folder.parent,)
    )


async def test_a_proven_version_has_the_digest_of_its_tensors(published: Path) -> None:
    digest = digest_of(published)
    verified = await verify(ref(published, digest), expected(published), NO_COPIES)
    assert verified.digest == digest


@pytest.mark.parametrize("method", ["disk", "reload", "restart"])
async def test_what_another_host_wrote_is_brought_in_before_it_is_read(
    published: Path, tmp_path: Path, method: str
) -> None:
    digest, elsewhere = digest_of(published), tmp_path / "elsewhere"
    published.rename(elsewhere)
    there = ref(published, digest).model_copy(update={"method": method})
    unseen = expected(published)
    with pytest.raises(Failed, match="does the sampler see the trainer's volume"):
        await verify(there, unseen, NO_COPIES)
    seen = replace(unseen, refresh=lambda: run_for_volume(f"mv {elsewhere} {published}", "test"))
    assert (await verify(there, seen, NO_COPIES)).digest == digest


async def test_other_bytes_are_refused_with_both_digests_and_the_tensor(published: Path) -> None:
    tensors = {**tensor_digests(stored_tensors(published)), "norm": "as published"}
    other = ref(published, "xxh3-abc").model_copy(update={"tensors": tensors})
    with pytest.raises(
        Failed,
        match=r"has digest xxh3-[0-9a-f]{32}, expected xxh3-abc "
        r"\(1 tensors differ, the first is 'norm'\); "
        "it was not loaded",
    ) as caught:
        await verify(other, expected(published), NO_COPIES)
    assert caught.value.code == "digest_differs"


async def test_a_digest_of_another_version_of_hone_is_refused_as_that(published: Path) -> None:
    with pytest.raises(Failed, match="must be of the same version of Hone") as caught:
        await verify(ref(published, "0" * 64), expected(published), NO_COPIES)
    assert caught.value.code == "digest_differs"


async def test_tensors_of_another_model_are_another_fault_than_other_bytes(
    published: Path,
) -> None:
    with pytest.raises(Failed, match="does not fit the model") as caught:
        await verify(
            ref(published, digest_of(published)), expected(published, norm=(3,)), NO_COPIES
        )
    assert caught.value.code == "tensors_differ"


async def test_a_wrongly_typed_tensor_is_refused_with_both_dtypes(published: Path) -> None:
    model = replace(expected(published), dtypes={"norm": "BF16", "bias": "F32"})
    good = ref(published, digest_of(published))
    await verify(good, model, NO_COPIES)  # float32 stands for bfloat16
    model = replace(model, dtypes={"norm": "F32", "bias": "I64"})
    with pytest.raises(Failed, match="'bias' has dtype F32, expected I64") as caught:
        await verify(good, model, NO_COPIES)
    assert caught.value.code == "tensors_differ"


async def test_a_file_cut_short_is_refused_as_not_what_was_published(published: Path) -> None:
    whole = ref(published, digest_of(published))
    file = published / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Failed, match=r"cannot be read: .* is not a whole safetensors") as caught:
        await verify(whole, expected(published), NO_COPIES)
    assert caught.value.code == "digest_differs"


async def test_a_folder_that_is_gone_is_to_be_published_again(published: Path) -> None:
    with pytest.raises(Failed, match="v4', which is not a folder here") as caught:
        await verify(ref(published.parent / "v4"), expected(published), NO_COPIES)
    assert caught.value.code == "not_seen"


async def test_a_method_without_a_loader_is_refused_by_name(tmp_path: Path) -> None:
    unknown = ref(tmp_path).model_copy(update={"method": "pigeon"})
    with pytest.raises(BadRequest, match=r"got method 'pigeon', expected one of \['delta', 'disk'"):
        await verify(unknown, expected(tmp_path / "shm"), NO_COPIES)


def test_every_method_that_a_job_can_name_has_a_loader() -> None:
    assert LOADERS.keys() == set(get_args(SyncMethod))


@pytest.mark.parametrize(
    ("config", "tied"),
    [({"tie_word_embeddings": True}, True), ({"tie_word_embeddings": False}, False), ({}, False)],
)
def test_what_is_expected_is_what_the_models_folder_holds(
    published: Path, config: dict[str, bool], tied: bool
) -> None:
    (published / "config.json").write_text(json.dumps(config))
    assert expected_version(published, (published,)) == ExpectedVersion(
        {"norm": (2,), "bias": (2,)},
        tied=tied,
        roots=(published,),
        dtypes={"norm": "F32", "bias": "F32"},
    )


def test_weights_lie_below_a_root(tmp_path: Path) -> None:
    inside = tmp_path / "shm" / "job" / "v3"
    inside.mkdir(parents=True)
    assert published_folder(ref(inside), (tmp_path / "runs", tmp_path / "shm")) == inside


@pytest.mark.parametrize("path", ["/etc", "shm/../elsewhere", "shm/link", "shm"])
def test_weights_elsewhere_are_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Failed, match="weights are loaded only from below"):
        published_folder(ref(tmp_path / path), (tmp_path / "shm",))


def test_a_span_per_sync_says_where_it_begins() -> None:
    labels = [(label("job:2:1", 5), 0), (label("job:2:1", 6), 7)]
    assert spans(labels, "job:2:1") == (Span(version=5, start=0), Span(version=6, start=7))


def test_weights_that_no_job_published_have_no_version() -> None:
    assert spans([("default", 0)], "") == ()


@pytest.mark.parametrize("other", [label("job:2:2", 5), label("next:2:1", 5), "default"])
def test_tokens_of_another_life_are_never_a_jobs(other: str) -> None:
    labels = [(label("job:2:1", 5), 0), (other, 3)]
    with pytest.raises(Conflict, match="tokens from 3 on were sampled by weights of") as caught:
        spans(labels, "job:2:1")
    assert caught.value.code == "stale"


def test_by_hand_all_lives_are_taken() -> None:
    labels = [(label("job:2:1", 5), 0), (label("job:2:2", 3), 4)]
    assert spans(labels, "") == (Span(version=5, start=0), Span(version=3, start=4))


class Engine:
    """Meets the trainer once `met` is set. `deadline_s` after its turn began it is late."""

    def __init__(self, deadline_s: float) -> None:
        self.meet_s, self.began_at = deadline_s, time.monotonic()
        self.met, self.ended = threading.Event(), threading.Event()

    def parse_init_info(self, meeting: Any) -> Any:
        return meeting

    def init_transfer_engine(self, _: Any) -> None:
        self.met.wait(60)

    def shutdown(self) -> None:
        self.ended.set()


def incoming(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Incoming:
    from services.rollout.on_vllm import inside_transfer

    monkeypatch.setattr(inside_transfer, "WeightTransferConfig", SimpleNamespace)
    monkeypatch.setattr(
        inside_transfer,
        "WeightTransferEngineFactory",
        SimpleNamespace(create_engine=lambda *_: engine),
    )
    worker = SimpleNamespace(vllm_config=None, device=None, get_model=lambda: None)
    return inside_transfer.Incoming(cast(Any, worker), inside_transfer.SHARED, {}, [])


def test_one_that_meets_too_late_gives_back_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(deadline_s=0.0)
    coming = incoming(engine, monkeypatch)
    time.sleep(0.01)
    late = coming.problem()
    assert late == "trainer and sampler did not meet within 0 s"
    engine.met.set()
    assert engine.ended.wait(60) and coming.problem() == late


def test_one_that_meets_in_time_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(deadline_s=60.0)
    coming = incoming(engine, monkeypatch)
    engine.met.set()
    while (problem := coming.problem()) is None:
        time.sleep(0.01)
    assert problem == "" and not engine.ended.is_set()
