"""What a job leaves, over the API: events, metrics, stored rollouts, checkpoints."""

from __future__ import annotations

import asyncio
import json
import shutil
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from hone.long_calls import Download
from services.orchestrator.api import history
from shared.errors import BadRequest, Failed, NotFound, Unavailable
from shared.http import retry
from shared.job import CheckpointSpec, RolloutsSpec
from shared.wire import (
    CheckpointFile,
    CheckpointFiles,
    CheckpointList,
    EventList,
    MetricsList,
    Part,
    RolloutList,
    ScoreItem,
)
from tests.support import orchestrator_stack
from tests.support.orchestrator_stack import Stack

pytestmark = pytest.mark.slow

job, stack = orchestrator_stack.job, orchestrator_stack.stack  # fixtures


async def test_events_are_a_page_or_a_stream_that_resumes_without_a_gap(stack: Stack) -> None:
    record = await stack.run()
    page = (await stack.client.get(f"/v1/jobs/{record.id}/events", EventList)).events
    kinds = [event.type for event in page]
    assert (
        kinds[:2] == ["status", "status"] and kinds.count("step") == 8 and kinds.count("eval") == 3
    )
    assert kinds.count("checkpoint") == 1 and page[-1].message == "succeeded"
    streamed = [part async for part in stack.client.events(f"/v1/jobs/{record.id}/events")]
    assert [part[0] for part in streamed[:-1]] == [event.id for event in page] and streamed[-1][
        1
    ] == "end"
    middle = page[5].id
    rest = [
        part async for part in stack.client.events(f"/v1/jobs/{record.id}/events", last_id=middle)
    ]
    assert [part[0] for part in rest[:-1]] == [event.id for event in page[6:]]
    path = f"/v1/jobs/{record.id}/events"
    found: list[str] = []
    after: str | None = "0"
    while after is not None:
        part_of = await stack.client.get(f"{path}?limit=7&after={after}", EventList)
        found += [event.id for event in part_of]
        assert part_of.next_after in (None, part_of[-1].id)
        after = part_of.next_after
    assert found == [event.id for event in page] and len(found) > 10
    last = await stack.client.get(f"{path}?last=3", EventList)
    assert last.events == page[-3:] and last.next_after is None


async def test_one_follower_too_many_is_told_to_come_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_FOLLOWERS", 0)
    record = await stack.run()
    accept = {"accept": "text/event-stream"}
    response = await stack.http.get(f"/v1/jobs/{record.id}/events", headers=accept)
    assert response.status_code == 429 and "follow events already" in response.json()["detail"]
    monkeypatch.setattr(history, "MAX_FOLLOWERS", 1)
    for _ in range(3):  # each leaves its place when it ends
        response = await stack.http.get(f"/v1/jobs/{record.id}/events", headers=accept)
        assert response.status_code == 200 and response.text.endswith("event: end\ndata: {}\n\n")


async def test_numbers_out_of_range_are_the_callers_fault(stack: Stack) -> None:
    record = await stack.submit()
    huge = "9" * 30
    for path in (
        f"/events?after={huge}",
        f"/events?after={huge}-{huge}",
        "/events?after=-",
        f"/rollouts?step={huge}",
        "/rollouts?step=-1",
        f"/metrics?after_step={huge}",
    ):
        response = await stack.http.get(f"/v1/jobs/{record.id}{path}")
        assert response.status_code == 422, (path, response.text)
    for last in (f"{huge}-0", "yesterday"):
        headers = {"accept": "text/event-stream", "last-event-id": last}
        response = await stack.http.get(f"/v1/jobs/{record.id}/events", headers=headers)
        assert response.status_code == 422 and "Last-Event-ID" in response.json()["detail"]
    assert (await stack.http.get(f"/v1/jobs/{record.id}:events")).status_code == 404
    assert (await stack.http.get(f"/v1/jobs?after={huge}")).status_code == 404


async def test_metrics_and_rollouts_come_in_pages(stack: Stack) -> None:
    record = await stack.run()
    at = f"/v1/jobs/{record.id}"
    page = await stack.client.get(f"{at}/metrics?limit=3", MetricsList)
    assert ([row.step for row in page.rows], page.next_after_step) == ([0, 1, 2], 2)
    page = await stack.client.get(f"{at}/metrics?after_step=5&limit=3", MetricsList)
    assert ([row.step for row in page.rows], page.next_after_step) == ([6, 7, 8], None)
    assert (await stack.client.get(f"{at}/rollouts", RolloutList)).step == 8
    whole = await stack.client.get(f"{at}/rollouts?step=4", RolloutList)
    assert whole.step == 4 and len(whole.rollouts) == 2 * 4
    assert {rollout.completion for rollout in whole.rollouts} <= {"right", "wrong"}
    for rollout in whole.rollouts:
        assert rollout.reward == float(rollout.completion == "right")
    page = await stack.client.get(f"{at}/rollouts?step=4&limit=5", RolloutList)
    assert (page.rollouts, page.next_after) == (whole.rollouts[:5], 5)
    page = await stack.client.get(f"{at}/rollouts?step=4&after=5&limit=4", RolloutList)
    assert (page.rollouts, page.next_after) == (whole.rollouts[5:], None)


async def test_held_out_completions_are_stored_for_people(stack: Stack) -> None:
    record = await stack.run()
    at = f"/v1/jobs/{record.id}"
    rows = (await stack.client.get(f"{at}/metrics", MetricsList)).rows
    evaluated = [row.step for row in rows if "eval/reward" in row.metrics]
    for step in evaluated:
        found = await stack.client.get(f"{at}/held_out?step={step}", RolloutList)
        rewards = [rollout.reward for rollout in found.rollouts]
        assert found.step == step and rewards == [
            float(rollout.completion == "right") for rollout in found.rollouts
        ]
        mean = sum(reward or 0.0 for reward in rewards) / len(rewards)
        assert mean == pytest.approx(rows[step].metrics["eval/reward"])
        assert {version for rollout in found.rollouts for version in rollout.versions} == {step}
    newest = await stack.client.get(f"{at}/held_out", RolloutList)
    assert newest.step == evaluated[-1] == 8
    first = await stack.client.get(f"{at}/held_out?limit=3", RolloutList)
    assert (first.rollouts, first.next_after) == (newest.rollouts[:3], 3)
    rest = await stack.client.get(f"{at}/held_out?after=3", RolloutList)
    assert (rest.rollouts, rest.next_after) == (newest.rollouts[3:], None)
    with pytest.raises(
        NotFound, match="step 1 has no stored held-out completions; stored: steps 0, "
    ):
        await stack.client.get(f"{at}/held_out?step=1", RolloutList)
    with pytest.raises(NotFound, match=r"of the set 'other'; stored: none\. They exist after "):
        await stack.client.get(f"{at}/held_out?name=other", RolloutList)
    with pytest.raises(BadRequest, match="name"):
        await stack.client.get(f"{at}/held_out?name=../rollouts", RolloutList)


async def test_rollouts_are_kept_as_far_back_as_the_job_says(stack: Stack) -> None:
    changes = {
        "rollouts": RolloutsSpec(keep_last=2),
        "checkpoints": CheckpointSpec(every=2, keep_last=2),
    }
    record = await stack.run(**changes)
    assert stack.folder(record.id).batch_steps() == [7, 8]
    response = await stack.http.get(f"/v1/jobs/{record.id}/rollouts?step=3")
    assert response.status_code == 404 and "steps 7 to 8 have" in response.json()["detail"]


async def test_checkpoints_that_were_removed_since_are_not_listed(stack: Stack) -> None:
    spec = CheckpointSpec(every=1, keep_last=2, keep_every=3)
    record = await stack.run(checkpoints=spec)
    listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
    assert [checkpoint.step for checkpoint in listed.checkpoints] == [
        3,
        4,
        6,
        7,
        8,
    ]  # 4: best so far


WEIGHTS = bytes(range(256)) * 5000
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "trainer/rank-0.pt": b"state"}


async def with_checkpoint(stack: Stack) -> tuple[str, int, Path]:
    """Returns a job that has ended, the step of its checkpoint, and its folder, which has files."""
    record = await stack.run()
    listed = await stack.client.get(f"/v1/jobs/{record.id}/checkpoints", CheckpointList)
    (checkpoint,) = listed.checkpoints
    write_checkpoint(Path(checkpoint.path))
    return record.id, checkpoint.step, Path(checkpoint.path)


def write_checkpoint(folder: Path) -> None:
    """As the trainer does: its manifest names all other files."""
    (folder / "trainer").mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    files = {
        name: {"size_bytes": len(content), "crc32": zlib.crc32(content)}
        for name, content in FILES.items()
    }
    (folder / "trainer" / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


async def test_the_files_of_a_checkpoint_are_listed_with_their_checksums(stack: Stack) -> None:
    job_id, step, folder = await with_checkpoint(stack)
    found = await stack.client.get(f"/v1/jobs/{job_id}/checkpoints/{step}", CheckpointFiles)
    manifest = (folder / "trainer" / "manifest.json").read_bytes()
    expected = {**FILES, "trainer/manifest.json": manifest}
    assert [(file.name, file.size_bytes, file.crc32) for file in found.files] == [
        (name, len(expected[name]), zlib.crc32(expected[name])) for name in sorted(expected)
    ]
    with pytest.raises(NotFound, match="no checkpoint of step 7; it has checkpoints of steps 8"):
        await stack.client.get(f"/v1/jobs/{job_id}/checkpoints/7", CheckpointFiles)
    shutil.rmtree(folder)
    with pytest.raises(NotFound, match="has no checkpoint of step 8; it has none"):
        await stack.client.get(f"/v1/jobs/{job_id}/checkpoints/{step}", CheckpointFiles)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "manifest.json").write_text("[]")
    with pytest.raises(Failed, match="cannot be read"):
        await stack.client.get(f"/v1/jobs/{job_id}/checkpoints/{step}", CheckpointFiles)


async def test_files_of_a_checkpoint_alone_are_sent_whole_or_from_a_byte_on(stack: Stack) -> None:
    job_id, step, folder = await with_checkpoint(stack)
    files = f"/v1/jobs/{job_id}/checkpoints/{step}/files"
    whole = await stack.http.get(f"{files}/model.safetensors")
    assert (whole.status_code, whole.content) == (200, WEIGHTS)
    rest = await stack.http.get(f"{files}/model.safetensors", headers={"range": "bytes=1000000-"})
    assert (rest.status_code, rest.content) == (206, WEIGHTS[1_000_000:])
    beyond = {"range": f"bytes={len(WEIGHTS)}-"}
    assert (await stack.http.get(f"{files}/model.safetensors", headers=beyond)).status_code == 416
    assert (await stack.http.get(f"{files}/trainer/rank-0.pt")).content == b"state"
    (folder / "secret").write_text("not of the checkpoint")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/hostname")
    for name in ("secret", "..%2F..%2Fjob.json", "%2Fetc%2Fhostname", "config.json", "trainer"):
        refused = await stack.http.get(f"{files}/{name}")
        assert refused.status_code == 404, name
        assert "the checkpoint has no file" in refused.json()["detail"]


async def test_a_file_that_is_shorter_than_its_manifest_says_is_damaged(
    stack: Stack, tmp_path: Path
) -> None:
    """Downloading ends, and does not ask for ever."""
    job_id, step, folder = await with_checkpoint(stack)
    path = f"/v1/jobs/{job_id}/checkpoints/{step}"
    files = (await stack.client.get(path, CheckpointFiles)).files
    for content in (b"", WEIGHTS[:1000]):
        (folder / "model.safetensors").write_bytes(content)
        download = Download(stack.client, f"{path}/files", tmp_path / "to", lambda *_: None)
        async with asyncio.timeout(90):
            with pytest.raises(Failed, match=f"damaged: it has {len(content)} bytes; expected"):
                await download.all(files)


async def test_a_download_that_brings_nothing_ends(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CheckpointFile(name="config.json", size_bytes=2, crc32=0)
    (tmp_path / "config.json.part").write_bytes(b"{")
    num_asked = 0

    async def nothing(path: str, *, first_byte: int = 0) -> AsyncGenerator[bytes]:
        nonlocal num_asked
        num_asked += 1
        assert num_asked == 1 and first_byte == 1
        for piece in ():
            yield piece

    monkeypatch.setattr(stack.client, "pieces", nothing)
    with pytest.raises(Failed, match=r"config\.json ended after 1 bytes; the checkpoint's has 2"):
        await Download(stack.client, "/files", tmp_path, lambda *_: None).all([file])
    assert not (tmp_path / "config.json.part").exists()


async def test_a_download_continues_where_it_was_cut_and_keeps_only_right_bytes(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, step, _ = await with_checkpoint(stack)
    files = (await stack.client.get(f"/v1/jobs/{job_id}/checkpoints/{step}", CheckpointFiles)).files
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    firsts, pieces = list[int](), stack.client.pieces

    async def cut(path: str, *, first_byte: int = 0) -> AsyncGenerator[bytes]:
        firsts.append(first_byte)
        async for piece in pieces(path, first_byte=first_byte):
            if len(firsts) == 1:
                yield piece[:500_000]
                raise Unavailable("the connection broke")
            yield piece

    monkeypatch.setattr(stack.client, "pieces", cut)
    to, seen = tmp_path / "to", dict[str, tuple[int, int]]()

    def download() -> Download:
        path = f"/v1/jobs/{job_id}/checkpoints/{step}/files"
        return Download(
            stack.client, path, to, lambda name, have, size: seen.update({name: (have, size)})
        )

    (weights,) = (file for file in files if file.name == "model.safetensors")
    await download().all([weights])
    assert firsts == [0, 500_000] and (to / "model.safetensors").read_bytes() == WEIGHTS
    assert seen == {"model.safetensors": (len(WEIGHTS), len(WEIGHTS))}
    (to / "model.safetensors").rename(to / "model.safetensors.part")
    await download().all(files)
    assert firsts.count(0) == 4, "of the weights nothing was missing"
    assert {name: (to / name).read_bytes() for name in FILES} == FILES
    await download().all(files)
    assert len(firsts) == 5, "all is there"
    (to / "config.json").write_bytes(b"[]")
    await download().all(files)
    assert (to / "config.json").read_bytes() == b"{}"
    (to / "model.safetensors").unlink()
    (to / "model.safetensors.part").write_bytes(b"x" * len(WEIGHTS))
    with pytest.raises(Failed, match="arrived with other bytes"):
        await download().all(files)
    await download().all(files)
    assert (to / "model.safetensors").read_bytes() == WEIGHTS
    outside = weights.model_copy(update={"name": "../x"})
    with pytest.raises(BadRequest, match="expected one within its folder"):
        await download().all([outside])


async def test_a_stream_ends_at_a_pause_if_that_is_asked_for(stack: Stack) -> None:
    record = await stack.submit()
    await stack.post(f"{record.id}/pause")
    await stack.until(record.id, "paused")
    response = await stack.http.get(
        f"/v1/jobs/{record.id}/events?until_paused=true", headers={"accept": "text/event-stream"}
    )
    *_, paused, end, rest = response.text.split("\n\n")
    assert '"status":"paused"' in paused and (end, rest) == ("event: end\ndata: {}", "")


async def test_a_reward_that_fails_on_some_texts_is_told_once_in_a_step(stack: Stack) -> None:
    failed = Part(value=0.0, verdict="wrong", detail="log(0)", errors=("formula_parse_error",))

    def grade(item: ScoreItem) -> Part:
        return failed if stack.fakes.step == 2 and item.row["answer"] % 2 else Part(value=1.0)

    stack.fakes.grade = grade
    sampling = stack.job.sampling.model_copy(update={"prompts_per_step": 6})
    data = stack.job.data.model_copy(update={"eval": None})
    changes = {"steps": 3, "sampling": sampling, "data": data}
    job_id = (await stack.submit(stack.job.model_copy(update=changes))).id
    await stack.until(job_id)
    (told,) = await stack.warnings(job_id)
    scores = [score for scores_G in stack.folder(job_id).batch(3).scores for score in scores_G]
    num_failed = sum(bool(part.errors) for score in scores for part in score.parts.values())
    assert 0 < num_failed < len(scores)
    assert told.message == (
        f"step 3: reward 'right' fails on {num_failed} of {len(scores)} completions, which get the "
        "least of their row (log(0))"
    )
    assert told.data == {"step": 3}
