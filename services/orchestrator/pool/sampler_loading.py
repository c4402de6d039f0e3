"""What a sampler is brought to: the job's model, then a published version of its weights. And that
it is one sampler that answers, and the same one throughout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.orchestrator.errors import MustPause
from services.orchestrator.pool.replica import Replica
from services.orchestrator.tasks import all_of
from shared.errors import StateLost
from shared.http.client import Client
from shared.settings import Settings
from shared.wire import ModelRequest, SentWeights, ServingWeights, WeightsRef

NUM_ASKED_WHO = 4
"""Times that a sampler is asked who it is before it serves: at once, so on connections of their
own. A load balancer between two samplers that chooses at random goes unnoticed once in 16 times,
and then at the latest when weights are loaded."""

NOT_HERE = frozenset({"not_seen", "no_adapters", "not_met"})
"""Codes of samplers that cannot take weights this way, now or later: one that does not see their
folder, one whose engine takes no such adapter, and one that the trainer's GPU does not reach."""

NUM_LIVES = 3
"""Times that a sampler is given the model, if each time it dies before it says who it is."""


@dataclass(frozen=True)
class Push:
    """A published version: as it goes to all samplers (`ref`), what returns it as it goes to one
    that failed to load it (`again`), and what raises unless a sampler serves it (`prove`). `drain`:
    each sampler finishes its groups before it loads. `is_trial`: whether all can take it so is to
    be seen."""

    ref: WeightsRef
    again: Callable[[], Awaitable[WeightsRef]]
    prove: Callable[[Client, WeightsRef, ServingWeights], Awaitable[None]]
    drain: bool = False
    is_trial: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether it goes from device to device, to the samplers that are there at the time."""
        return isinstance(self.ref.root, SentWeights)

    async def for_sampler(self, replica: Replica, *, late: bool = False) -> WeightsRef:
        """Returns the version as this sampler is to load it. Raises what `again` does."""
        files = self.is_sent and (late or replica.by_files)
        return await self.again() if replica.failed_sync or files else self.ref


async def give_model(
    replica: Replica, spec: ModelRequest, settings: Settings, patience_s: float
) -> ServingWeights:
    """Returns what the one sampler at this URL answered that serves the model. Raises MustPause if
    different samplers answer there: each has a model and weights of its own, and only one of them
    would get what all need. One that died meanwhile, and answers as another, is given the model
    again."""
    for _ in range(NUM_LIVES):
        serving = await replica.client.call(
            "PUT",
            "/model",
            spec,
            ServingWeights,
            deadline_s=settings.start_deadline_s,
            patience_s=patience_s,
        )
        others = await _others(replica, serving, settings, patience_s)
        if not others:
            return serving
        again = await _others(replica, serving, settings, patience_s)
        if len(again) < NUM_ASKED_WHO:  # what has died does not answer again
            other = others[0]
            names = (
                f"as two samplers {serving.replica!r} and {other.replica!r}"
                if other.replica != serving.replica
                else f"as two engines of the name {serving.replica!r}"
            )
            raise MustPause(
                f"{replica.url} answers {names}, as a load balancer does; name each sampler in "
                'HONE_ROLLOUT_URL, or set that to "registered", and HONE_ROLLOUT_ADVERTISE_URL at '
                "each sampler"
            )
    raise StateLost(
        f"{replica.url} was started anew {NUM_LIVES} times while it was given the model"
    )


async def _others(
    replica: Replica, serving: ServingWeights, settings: Settings, patience_s: float
) -> list[ServingWeights]:
    """Returns those of NUM_ASKED_WHO answers that are not of this life of this sampler."""
    answers = await all_of(
        replica.client.call(
            "GET",
            "/weights",
            None,
            ServingWeights,
            deadline_s=settings.start_deadline_s,
            patience_s=patience_s,
        )
        for _ in range(NUM_ASKED_WHO)
    )
    who = serving.replica, serving.boot_id
    return [answer for answer in answers if (answer.replica, answer.boot_id) != who]


async def load(
    replica: Replica, push: Push, settings: Settings, patience_s: float, *, late: bool = False
) -> ServingWeights:
    """Returns what the sampler answered once it serves the version, proven. `late`: it joins after
    the version was sent. Raises StateLost if another sampler or engine answers than the one that
    has the model."""
    replica.num_loads += 1
    try:
        ref = await push.for_sampler(replica, late=late)
        if push.drain and replica.up:
            replica.held = True
            await replica.idle.wait()
        serving = await replica.client.call(
            "POST",
            "/reload_weights",
            ref,
            ServingWeights,
            deadline_s=settings.sync_deadline_s,
            patience_s=patience_s,
        )
        if serving.replica != replica.name:
            raise StateLost(
                f"sampler {serving.replica!r} answers at {replica.url}, and {replica.name!r} "
                "did when the model was loaded"
            )
        if serving.boot_id != replica.boot_id:
            raise StateLost(
                f"sampler {replica.name!r} has another engine than the one that the job's "
                "model was loaded into"
            )
        await push.prove(replica.client, ref, serving)
        return serving
    finally:
        replica.num_loads -= 1
