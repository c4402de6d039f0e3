"""The run of a program's model: its operations one after the other. READ FIRST. The trainer numbers
what changes its gradient or weights (`forward_backward`, `optim_step`), and resumes from its newest
checkpoint. So after its death the operations since then are done again, under the same numbers: on
a CPU the weights are the same to the bit. An operation that has an outcome already keeps it.

Samples are of a model's snapshots, or of its base model. An order is on disk before it is
acknowledged. The process that runs the model carries it out: at once, or within LOOK_S if another
process accepted it, or it failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from services.orchestrator.errors import OperatorActionNeeded, Preempted
from services.orchestrator.extensions.tinker.log import OperationLog, SavedFolder
from services.orchestrator.samplers.services import Services
from services.orchestrator.samplers.syncing import sync_weights
from services.orchestrator.seams import Program
from services.orchestrator.store.leases import SUPERVISED
from services.orchestrator.tasks import write_despite_cancel
from shared.errors import BadRequest, Conflict, Failed, HoneError
from shared.host.logs import get_logger
from shared.wire import (
    AdapterWeights,
    DeliveredSamples,
    LogStart,
    MetricsRow,
    OperationOutcome,
    ProgramOperation,
    RolloutGroup,
    SampleOrder,
    SamplingSession,
    SavedWeights,
)

POLL_S = 0.05
"""Seconds between two checks for the next operation."""

LOOK_S = 1.0
"""Seconds between two reads of the numbers that have arrived."""

FORGET_S = 600.0
"""Seconds between two removals of old samples."""

GAP_S = 30.0
"""Seconds after which a missing number is skipped: its request was refused or lost, and later ones
have arrived."""

TOO_LATE = (
    f"it arrived more than {GAP_S:g} s after later operations, and was skipped; expected a new "
    "number"
)

CHECKPOINT_EVERY_S = 120.0
"""Seconds after which an optimizer step is followed by a checkpoint: the most work that is repeated
after a failure."""

IDLE_S = 10.0
"""Seconds without an operation after which a model is preempted by a job that waits."""

REFUSED = frozenset({"not_finite", "out_of_memory"})
"""Codes of errors that affect only their operation: the model continues unchanged."""

NOT_NAMED = {"tensors": {}, "canary": None}
"""The fields of an adapter that requests for samples leave out: the digest covers all tensors."""


@dataclass
class OperationRunner:
    """The run of one attempt; `samples` carries out orders of samples."""

    program: Program
    samples: SampleOrders
    _num_done: int = 0  # how many operations the trainer has counted
    _passed_below: int = 0  # missing numbers below this were waited for already
    _samples_due_at: float = 0.0
    _forget_due_at: float = 0.0
    _newest_due_at: float = 0.0  # the time of the next read of the numbers that have arrived
    _num_calls: int = 0  # calls of this attempt since the last optimizer step
    _warned_of_surrogate: bool = False
    _loss: float = 0.0  # of the calls since the last optimizer step
    _checkpoint_due_at: float = field(default_factory=lambda: time.monotonic() + CHECKPOINT_EVERY_S)
    _at_checkpoint: LogStart | None = None  # of the newest checkpoint of this attempt

    def __post_init__(self) -> None:
        self.services, self.journal = self.program.services, self.program.journal
        self._log = OperationLog(self.program.folder.path)
        self._saved = SavedFolder(self.program.folder.path)
        self.last = self._serves = self.program.last  # the trainer's last operation

    async def run(self) -> int:
        """Does the operations until the model is unloaded. Returns the trainer's last one. A model
        that begins with another job's checkpoint is checkpointed before its first operation."""
        if self.program.job.training.start_from and not self.last:
            await self.services.trainer.checkpoint(0)
        start = await asyncio.to_thread(self._log.start)
        if self.last < start.done:
            raise OperatorActionNeeded(
                f"the trainer continued from operation {self.last}, and the log begins after "
                f"operation {start.done}: the checkpoints since then are damaged or missing"
            )
        self._num_done, number = start.done, start.number - 1
        while True:
            number += 1
            operation = await self._next(number)
            if operation is None:
                await write_despite_cancel(
                    self._log.finish, number, OperationOutcome(error=TOO_LATE)
                )
                continue
            outcome = await write_despite_cancel(self._log.outcome, number)
            if outcome is None or self._is_lost(operation, outcome):
                outcome = await self._perform(number, operation, outcome)
            elif operation.is_numbered and outcome.error is None:
                self._num_done += 1
            if operation.kind == "unload":
                return self._num_done

    async def _perform(
        self, number: int, operation: ProgramOperation, known: OperationOutcome | None
    ) -> OperationOutcome:
        """Does the operation, and returns its outcome; a `known` outcome is kept."""
        outcome = await self._attempt(operation)
        if operation.kind in ("checkpoint", "export") and outcome.error is None:
            await self._checkpointed(number)
        elif operation.kind == "optim_step" and time.monotonic() > self._checkpoint_due_at:
            await self.services.trainer.checkpoint(self.last, await self._kept_steps())
            await self._checkpointed(number)
        if known is None and outcome.error is None:
            outcome = await self._list_saved(number, operation, outcome)
        if operation.kind == "forward_backward" and outcome.error is None:
            self._num_calls += 1
        if operation.kind == "optim_step":
            self._num_calls = 0
        if known is None:
            await write_despite_cancel(self._log.finish, number, outcome)
            return outcome
        if outcome.error is not None and known.error is None:
            raise Failed(
                f"operation {number} succeeded before, and fails when it is repeated: "
                f"{outcome.error}"
            )
        return known

    async def _list_saved(
        self, number: int, operation: ProgramOperation, outcome: OperationOutcome
    ) -> OperationOutcome:
        """Adds the operation's saved weights, if there are any, to the list."""
        if operation.saves is None:
            return outcome
        ref = None
        if operation.kind == "snapshot" and isinstance(
            self.services.samplers.published, AdapterWeights
        ):
            ref = (await self.services.trainer.publish_weights(self.last, "lora", number)).root
            assert isinstance(ref, AdapterWeights)
            outcome = outcome.model_copy(update={"adapter": ref.model_copy(update=NOT_NAMED)})
        now = time.time()
        saved = SavedWeights(
            number=number,
            kind=operation.saves,
            name=operation.name,
            step=outcome.step,
            made_at=now,
            expires_at=None if operation.ttl_s is None else now + operation.ttl_s,
            size_bytes=ref.size_bytes if ref else outcome.size_bytes,
            path=outcome.path,
            adapter=outcome.adapter,
        )
        await write_despite_cancel(self._saved.add, saved)
        return outcome

    async def _checkpointed(self, number: int) -> None:
        """Makes the log begin at the checkpoint before this one, to which the model can go back if
        this one is damaged."""
        self._checkpoint_due_at = time.monotonic() + CHECKPOINT_EVERY_S
        before = self._at_checkpoint
        if before is not None and before.done < self._num_done:
            # otherwise both are the same folder
            await write_despite_cancel(self._log.advance, before)
        self._at_checkpoint = LogStart(number=number + 1, done=self._num_done)

    async def _kept_steps(self) -> tuple[int, ...]:
        return await asyncio.to_thread(self._saved.steps)

    def _is_lost(self, operation: ProgramOperation, outcome: OperationOutcome) -> bool:
        """Whether the present trainer or samplers lack the operation's effect. A refused optimizer
        step counts too, because it dropped the gradient."""
        if outcome.error is not None:
            return operation.kind == "optim_step" and self._num_calls > 0
        if operation.is_numbered:
            return self._num_done + 1 > self.last
        is_now = operation.kind == "snapshot" and outcome.step == self.last == self._num_done
        return is_now and self._serves != self.last

    async def _next(self, number: int) -> ProgramOperation | None:
        """Returns the operation once it has arrived; None if later ones arrived and it did not."""
        gap_since: float | None = None
        since = time.monotonic()
        with self.services.status.on("the program", f"operation {number}"):
            while True:
                operation = await asyncio.to_thread(self._log.operation, number)
                if operation is not None:
                    return operation
                outcome = await asyncio.to_thread(self._log.outcome, number)
                if number < self._passed_below or outcome is not None:  # it was passed over
                    return None
                await self._look_at_samples()
                if gap_since or await asyncio.to_thread(self._later_ones_came, number):
                    gap_since = gap_since or time.monotonic()
                    if time.monotonic() - gap_since > GAP_S:
                        self._passed_below = await asyncio.to_thread(self._log.newest)
                        await self.journal.warn(
                            f"operation {number} did not arrive, and later ones did; it is skipped"
                        )
                        return None
                elif self.samples.has_under_way(self.services):
                    since = time.monotonic()
                elif time.monotonic() - since > IDLE_S:
                    await self._make_room()
                    since = time.monotonic()
                await asyncio.sleep(POLL_S)

    async def _look_at_samples(self) -> None:
        """Begins orders of samples that other processes accepted, or this one before it died, and
        removes old samples."""
        if time.monotonic() < self._samples_due_at:
            return
        self._samples_due_at = time.monotonic() + LOOK_S
        for id in await asyncio.to_thread(self._log.undelivered):
            self.samples.carry_out(self.program.folder.path.name, id, self._log)
        if time.monotonic() > self._forget_due_at:
            self._forget_due_at = time.monotonic() + FORGET_S
            await write_despite_cancel(self._log.forget_samples)

    def _later_ones_came(self, number: int) -> bool:
        """Whether later operations than this one have arrived."""
        if time.monotonic() < self._newest_due_at:
            return False
        self._newest_due_at = time.monotonic() + LOOK_S
        return self._log.newest() > number

    async def _make_room(self) -> None:
        """Raises Preempted if another job waits for the trainer."""
        if not self.program.num_queued():
            return
        try:
            if self.last:
                await self.services.trainer.checkpoint(self.last, await self._kept_steps())
        except Conflict as error:  # the gradient is lost: its calls are repeated later
            await self.journal.log(error.detail)
        raise Preempted(
            f"preempted: its program sent nothing for {IDLE_S:g} s, and another job waits; the "
            "next operation brings it back"
        )

    async def _attempt(self, operation: ProgramOperation) -> OperationOutcome:
        """Returns the operation's outcome, or the error if it affects only this operation."""
        try:
            return await self._dispatch(operation)
        except (BadRequest, Failed, Conflict) as error:
            if isinstance(error, Failed) and error.code not in REFUSED:
                raise
            if isinstance(error, Conflict) and operation.kind not in ("checkpoint", "export"):
                raise
            return OperationOutcome(step=self.last, error=error.detail)

    async def _dispatch(self, operation: ProgramOperation) -> OperationOutcome:
        services = self.services
        if operation.kind == "refused":
            raise BadRequest("the request of this operation could not be read")
        if operation.kind == "forward":
            found = await services.trainer.forward(self.last, operation.examples)
            weights = [one for e in operation.examples for one in e.advantages]
            loss = -math.fsum(map(float.__mul__, weights, found.logprobs))
            return OperationOutcome(step=self.last, logprobs=found.logprobs, loss=loss)
        if operation.kind == "forward_backward":
            assert operation.loss is not None
            await self._warn_of_surrogate(operation)
            step = self._num_done + 1
            done = await services.trainer.forward_backward(step, operation.examples, operation.loss)
            self._num_done = self.last = step
            self._loss += done.loss
            return OperationOutcome(step=step, loss=done.loss, logprobs=done.logprobs)
        if operation.kind == "optim_step":
            return await self._optim_step(operation)
        if operation.kind in ("checkpoint", "export"):
            keep = {*await self._kept_steps(), self.last}
            checkpoint = await services.trainer.checkpoint(self.last, tuple(sorted(keep)))
            await self.journal.checkpoint(checkpoint)
            return OperationOutcome(
                step=self.last, path=checkpoint.path, size_bytes=checkpoint.size_bytes
            )
        if operation.kind == "snapshot":
            await sync_weights(services, self.program.folder, self.last, self.journal)
            self._serves = self.last
        return OperationOutcome(step=self.last)

    async def _warn_of_surrogate(self, operation: ProgramOperation) -> None:
        """Warns, once in an attempt, that a substitute for the program's loss is computed."""
        if operation.loss_name and operation.loss and not self._warned_of_surrogate:
            self._warned_of_surrogate = True
            await self.journal.warn(
                f"the program's loss {operation.loss_name!r} is computed as "
                f"{operation.loss.name!r} with ratios bounded by {operation.loss.bounds}"
            )

    async def _optim_step(self, operation: ProgramOperation) -> OperationOutcome:
        assert operation.optimization is not None
        step = self._num_done + 1
        is_again = step <= self.last
        done = await self.services.trainer.optim_step(step, operation.optimization)
        self._num_done = self.last = step
        loss, self._loss = self._loss, 0.0
        if not is_again:
            await self._record(step, operation.optimization.learning_rate, done.grad_norm, loss)
        self.program.tell(step)
        return OperationOutcome(step=step, grad_norm=done.grad_norm)

    async def _record(self, step: int, learning_rate: float, grad_norm: float, loss: float) -> None:
        """Writes the step's row of metrics, unless an earlier attempt did."""
        if await asyncio.to_thread(self.program.folder.metrics, step - 1):
            return
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            SUPERVISED: 1.0,
        }
        row = MetricsRow(step=step, metrics=metrics)
        await write_despite_cancel(self.program.folder.append_metrics, row)
        await self.journal.operation(row)


AGAIN_S = 1.0
"""Seconds after a failure before an order is carried out again: the snapshot may not be served yet,
because operations that a trainer lost are being repeated."""

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
    """How often a sampler failed at an order that is not delivered; 0: by other errors only."""

    async def drive(self, program: Program) -> int:
        """Carries out the program's operations until it unloads the model. Returns the number of
        the trainer's last one."""
        job_id = program.services.caller.job_id
        self.services[job_id] = program.services
        try:
            return await OperationRunner(program, self).run()
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
        except (HoneError, KeyError) as error:  # the model's run repeats it
            self._num_failures[which] = self._num_failures.get(which, 0) + isinstance(error, Failed)
            get_logger().warning("not sampled", job=job_id, sample=id, reason=str(error))
            await asyncio.sleep(AGAIN_S)
            return
        await write_despite_cancel(log.deliver, id, samples)
        self._num_failures.pop(which, None)


async def _sampled(
    services: Services, id: str, order: SampleOrder, num_failures: int
) -> DeliveredSamples:
    """Returns the samples, or the error that is the order's result. Raises transient errors."""
    key = f"{services.caller.owner}:sample:{id}"
    try:
        group = await services.samplers.sample_order(order, key=key)
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
                f"the snapshot of version {session.step} is no longer served (weights of "
                f"{list(rollout.versions)} sampled); a model without adapter serves only its "
                "newest snapshot: save_weights_for_sampler makes one"
            )
    return None
