"""From the trainer's weights to the sampler's, proven by their digest."""

from __future__ import annotations

from services.orchestrator.loop.decisions import SyncFailed
from services.orchestrator.loop.peers import Peers
from services.orchestrator.record.journal import Journal
from shared.errors import Conflict, Failed
from shared.job import Job
from shared.wire import ServingWeights

NOT_OF_THE_SYNC = frozenset({"stale", "tensors_differ", "disk_full", "out_of_memory"})
"""Codes of errors that another push does not mend."""


async def sync_weights(peers: Peers, job: Job, version: int, journal: Journal) -> ServingWeights:
    """Makes the sampler serve the trainer's `version`, and returns its answer, which has that
    version and the digest of what was published. What did not arrive is pushed once more; then
    raises SyncFailed."""
    try:
        return await _push(peers, job, version)
    except SyncFailed as error:
        await journal.warn(f"{error.detail}; the weights are pushed again")
        return await _push(peers, job, version)


async def _push(peers: Peers, job: Job, version: int) -> ServingWeights:
    published = await peers.publish_weights(version, job.weight_sync)
    try:
        serving = await peers.reload_weights(published)
    except (Failed, Conflict) as error:
        if error.code in NOT_OF_THE_SYNC:
            raise
        raise SyncFailed(f"weight sync: {error.detail}") from error
    digest = published.root.digest
    if (serving.version, serving.digest) != (version, digest):
        raise SyncFailed(
            f"weight sync: the trainer published version {version} with digest {digest[:12]}, but "
            f"the sampler serves version {serving.version} with digest {str(serving.digest)[:12]}"
        )
    return serving
