"""From the trainer's weights to the sampler's, proven by their digest and by what the sampler's
engine computes with them (canary.py)."""

from __future__ import annotations

from services.orchestrator.loop import canary
from services.orchestrator.loop.decisions import SyncFailed
from services.orchestrator.loop.peers import Peers
from services.orchestrator.record.journal import Journal
from shared.errors import Conflict, Failed
from shared.job import Job, SyncMethod
from shared.wire import Published, ServingWeights

NOT_OF_THE_SYNC = frozenset({"stale", "tensors_differ", "disk_full", "out_of_memory"})
"""Codes of errors that another push does not mend."""

FULLER: dict[SyncMethod, SyncMethod] = {"disk": "restart", "reload": "restart"}
"""What a version is pushed by whose first push failed, where that is not the same again."""


async def sync_weights(peers: Peers, job: Job, version: int, journal: Journal) -> ServingWeights:
    """Makes the sampler serve the trainer's `version`, and returns its answer, which has that
    version, the digest of what was published and the log-probs of its canary. What did not arrive
    is pushed once more, by a fuller method if there is one; then raises SyncFailed."""
    method = job.weight_sync
    try:
        return await _push(peers, version, method, journal)
    except SyncFailed as error:
        fuller = FULLER.get(method, method)
        how = "" if fuller == method else f' by "{fuller}"'
        await journal.warn(f"{error.detail}; the weights are pushed again{how}")
        return await _push(peers, version, fuller, journal, again=True)


async def _push(
    peers: Peers, version: int, method: SyncMethod, journal: Journal, *, again: bool = False
) -> ServingWeights:
    published = await peers.publish_weights(version, method)
    if again:
        ref = published.root.model_copy(update={"again": True})
        published = published.model_copy(update={"root": ref})
    try:
        serving = await peers.reload_weights(published)
    except (Failed, Conflict) as error:
        if error.code in NOT_OF_THE_SYNC:
            raise
        raise SyncFailed(f"weight sync: {error.detail}") from error
    if problem := fault(published.root, serving):
        raise SyncFailed(f"weight sync: {problem}")
    if published.root.canary and not serving.canary_logprobs:
        await journal.warn(
            f"the sampler gave no log-probs for version {version} (it is paused), so that it holds "
            "the trainer's weights is shown by their digest only"
        )
    return serving


def fault(published: Published, serving: ServingWeights) -> str | None:
    """Returns why what the sampler serves is not what the trainer published, or None."""
    if (serving.version, serving.digest) != (published.version, published.digest):
        return (
            f"the trainer published version {published.version} with digest "
            f"{published.digest[:12]}, but the sampler serves version {serving.version} with "
            f"digest {str(serving.digest)[:12]}"
        )
    if published.canary and serving.canary_logprobs:
        reason = canary.fault(published.canary, serving)
        return reason and f"the sampler does not compute with version {published.version}: {reason}"
    return None
