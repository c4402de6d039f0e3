"""Writing a checkpoint, to which every rank writes its own part."""

from __future__ import annotations

from pathlib import Path

from services.trainer.disk import checkpoints
from services.trainer.disk.folders import written_aside
from services.trainer.engine import Engine
from services.trainer.loaded import Loaded
from services.trainer.processes.together import Ranks, SaveAll
from shared import volume
from shared.checkpoints import STATE, StoredFile
from shared.wire import Checkpoint, CheckpointRequest


def save_checkpoint(
    ranks: Ranks, loaded: Loaded, path: Path, request: CheckpointRequest, commit: str | None
) -> Checkpoint | None:
    """Returns the checkpoint of the loaded job, written to `path`, on rank 0, None elsewhere. Old
    ones beside it go.

    `commit` is the command that keeps what was written, if the volume needs one.
    """
    engine = loaded.engine

    def lead(save_all: SaveAll) -> Checkpoint:
        with written_aside(path, checkpoint_bytes(engine), durable=True) as aside:
            shares: list[dict[str, StoredFile]] = save_all(aside)
            files = {name: file for share in shares for name, file in share.items()}
            checkpoints.write_manifest(aside, loaded.manifest(ranks.num_ranks, files))
        volume.run(commit, "the checkpoint cannot be committed")
        checkpoints.remove_old(path.parent, loaded.request.job.checkpoints, request.keep)
        return checkpoints.described(path)

    def save_state(aside: Path) -> None:
        (aside / STATE).mkdir(exist_ok=True)
        engine.save_state(aside / STATE)

    return ranks.write(
        lead,
        lambda aside: checkpoints.check_seen(aside, ranks.rank),
        engine.save_checkpoint,
        save_state,
        lambda aside: checkpoints.measured(aside, slice(ranks.rank, None, ranks.num_ranks)),
    )


def checkpoint_bytes(engine: Engine) -> int:
    """Returns about how much a checkpoint takes: the export, and for each trained parameter the
    float32 master and Adam's two moments."""
    return engine.weights_bytes + 12 * engine.num_trainable
