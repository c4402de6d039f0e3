"""Samples of a model's snapshots, or of its base model. An order is on disk before it is
acknowledged. The process that runs the model carries it out: at once, or within `driving.LOOK_S` if
another process accepted it, or it failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field

from services.orchestrator.extensions.tinker.log import OperationLog
from services.orchestrator.samplers.services import Services
from services.orchestrator.tasks import to_disk
from shared.errors import BadRequest, Conflict, Failed, HoneError
from shared.host.logs import get_logger
from shared.wire import DeliveredSamples, RolloutGroup, SampleOrder, SamplingSession

AGAIN_S = 1.0
"""Seconds after a failure before an order is carried out again: the snapshot may not serve yet,
because what a trainer lost is being done again."""

MAX_FAILED = 5
"""How often a sampler may fail at an order, for example because it read half of an adapter's
folder, before the error is the order's result."""


@dataclass
class SampleOrders:
    """The models that this process runs, by job, and the orders that it carries out."""

    services: dict[str, Services] = field(default_factory=dict[str, Services])
    _under_way: dict[tuple[str, str], asyncio.Task[None]] = field(
        default_factory=dict[tuple[str, str], "asyncio.Task[None]"]
    )

    _num_failures: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """How often a sampler failed at an order that is not delivered; 0: it was something else."""

    @contextlib.contextmanager
    def running(self, job_id: str, services: Services) -> Generator[None]:
        """Makes the job's model one that this process runs."""
        self.services[job_id] = services
        try:
            yield
        finally:
            del self.services[job_id]
            for which in [which for which in self._num_failures if which[0] == job_id]:
                del self._num_failures[which]

    def has_under_way(self, services: Services) -> bool:
        """Whether samples of the model with these services are under way, and did not fail
        before."""
        orders = self._under_way.keys() - self._num_failures.keys()
        return any(self.services.get(job_id) is services for job_id, _ in orders)

    def carry_out(self, job_id: str, id: str, log: OperationLog) -> None:
        """Begins to carry out the order, unless that is under way or this process does not run the
        model."""
        which = job_id, id
        if which in self._under_way or job_id not in self.services:
            return
        task = asyncio.create_task(self._carried_out(job_id, id, log))
        self._under_way[which] = task
        task.add_done_callback(lambda _: self._under_way.pop(which, None))

    async def _carried_out(self, job_id: str, id: str, log: OperationLog) -> None:
        order = await asyncio.to_thread(log.ordered, id)
        if order is None:
            return
        which = job_id, id
        try:
            samples = await _sampled(
                self.services[job_id], id, order, self._num_failures.get(which, 0)
            )
        except (HoneError, KeyError) as error:  # the model's run tries it again
            self._num_failures[which] = self._num_failures.get(which, 0) + isinstance(error, Failed)
            get_logger().warning("not sampled", job=job_id, sample=id, reason=str(error))
            await asyncio.sleep(AGAIN_S)
            return
        await to_disk(log.deliver, id, samples)
        self._num_failures.pop(which, None)


async def _sampled(
    services: Services, id: str, order: SampleOrder, num_failures: int
) -> DeliveredSamples:
    """Returns the samples, or the error that is the order's own. Raises errors that time may
    heal."""
    key = f"{services.owner}:sample:{id}"
    try:
        group = await services.sample(order, key=key)
    except BadRequest as error:
        return DeliveredSamples(error=error.detail)
    except Failed as error:
        if error.code == "disk_full" or num_failures + 1 < MAX_FAILED:
            raise
        return DeliveredSamples(error=error.detail)
    except Conflict as error:
        if error.code != "no_adapters":
            raise
        return DeliveredSamples(error=error.detail)
    return DeliveredSamples(group=group, error=_why_wrong(group, order.session))


def _why_wrong(group: RolloutGroup, session: SamplingSession) -> str | None:
    for rollout in group.rollouts:
        if rollout.went_wrong:
            return rollout.error or "the sample went wrong"
        if not session.own_weights and set(rollout.versions) - {session.step}:
            return (
                f"the snapshot of version {session.step} does not serve any more (weights of "
                f"{list(rollout.versions)} sampled); expected samples of the newest snapshot of a "
                "model that has no adapter: save_weights_for_sampler makes one"
            )
    return None
