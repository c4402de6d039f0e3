"""The state of the trainer service: the job, the next step, the last step's answer. Every rank has
one Trainer. READ FIRST.

All ranks get the same commands in the same order and make the same decisions. Facts that only one
rank knows are settled by `Ranks`. Idempotency is here, beside the weights that it protects, and not
in a table of requests: when a job is replaced or its weights are lost, its answers are forgotten
too.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeVar, cast

from services.trainer.disk import checkpoints
from services.trainer.disk.checkpoints import ResumePoint, newest_step, newest_undamaged
from services.trainer.disk.folders import sweep
from services.trainer.engine import Engine, OutOfMemory, PassBudget, Ranks, SaveAll, Update
from services.trainer.learning.examples import num_sampled
from services.trainer.loaded import LoadedJob, RunsVolume, Turns, learning_rate, save_checkpoint
from services.trainer.processes.launcher import RestartHistory
from services.trainer.publishing import Publisher, volume_dir
from shared.errors import BadRequest, Conflict, HoneError, StateLost
from shared.host.logs import get_logger
from shared.http import codec
from shared.http.ownership import Holders
from shared.job import SYNC_METHODS, Job
from shared.job.job import same_learning
from shared.settings import Settings
from shared.weights.meeting import memory_space
from shared.wire import (
    AnyWeights,
    Canary,
    Checkpoint,
    CheckpointList,
    CheckpointRequest,
    Fenced,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardRequest,
    ForwardResult,
    OptimStepRequest,
    OptimStepResult,
    PublishRequest,
    StepResult,
    TrainerJob,
    TrainerState,
    TrainStepRequest,
)

NOISE_EVERY = 8
"""The rounding noise of the canary is measured for the first version, and once in so many steps. It
takes twice as long as the canary itself, and a few updates hardly change it."""


@dataclass(frozen=True)
class Seams:
    """Functions that a trainer gets from outside. `start_engine` loads a model; `check_job` says
    first whether it can, before memory is freed for it; `fingerprint` tells one model from another.

    `writing` is entered while a checkpoint is written, and raises an error if the trainer is
    stopping. `remember_job` keeps the loaded job for restarted ranks. `remember_budget` keeps for
    them the micro-batch budget that fits into memory, and `budget` returns it, or the job's own.
    `device_fault` returns why this rank's device cannot be used any more; None: it works. `gpu` is
    the UUID of the GPU that this rank computes on; None: a CPU.
    """

    check_job: Callable[[Job], None]
    start_engine: Callable[[Job], Engine]
    fingerprint: Callable[[Job], str]
    writing: Callable[[], AbstractContextManager[None]]
    remember_job: Callable[[TrainerJob | None], None]
    remember_budget: Callable[[TrainerJob, PassBudget], None]
    budget: Callable[[TrainerJob], PassBudget]
    device_fault: Callable[[], str | None]
    gpu: str | None = None


T = TypeVar("T")


class Trainer:
    """One rank's part of the service. `past`: how often the ranks were restarted, and why.

    Only the newest caller of PUT /job, by attempt and epoch, is accepted, with the attempts that it
    named beside itself, even if its job could not be loaded. Requests with an older fence are
    refused as stale. Fences of different Redis servers cannot be compared
    (`shared/http/ownership.py`). Jobs that share the engine take turns (`Turns`).
    """

    def __init__(
        self, settings: Settings, ranks: Ranks, seams: Seams, past: RestartHistory | None = None
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._runs = RunsVolume.of(settings, ranks.rank)
        self._seams = seams
        self._past = past or RestartHistory()
        self._turns = Turns(ranks, seams.start_engine)
        self._holders = Holders()
        self._newest: TrainerJob | None = None
        self._boot_id = secrets.token_hex(8)

    def load_job(self, request: TrainerJob) -> TrainerState:
        """Loads the job in place of others, or beside the jobs that share the trainer with it: from
        its newest checkpoint, or at its start. The same job again changes nothing, unless another
        trainer has taken it further. Raises Conflict for checkpoints of another job or model."""
        self._let_in(request)
        folder = checkpoints.checkpoints_dir(self._settings.runs_dir, request.job_id)
        if loaded := self._turns.find(request.job_id):
            if not same_learning(loaded.request.job, request.job):
                raise Conflict(
                    f"job {request.job_id!r} is loaded with another body; the same job id must "
                    "come with the same job",
                    code="body_differs",
                )
            has_memory = loaded.request.job.memory == request.job.memory
            if has_memory and newest_step(self._ranks, folder) <= loaded.step:
                return self._continued(loaded, request)
        self._ranks.on_all_ranks(lambda: self._seams.check_job(request.job))
        model = self._ranks.from_rank_0(lambda: self._seams.fingerprint(request.job))
        self._ranks.on_all_ranks(self._runs.look)
        point = newest_undamaged(self._ranks, folder, request, model)
        self._free_superseded(request, model)
        started = time.monotonic()
        loaded = self._resumed(request, model, point)
        if self._ranks.rank == 0:
            sweep(folder)
            sweep(volume_dir(self._settings.runs_dir, request.job_id))
            self._remember()
        seconds = round(time.monotonic() - started, 2)
        get_logger().info(
            "job loaded",
            job=request.job_id,
            model=request.job.model,
            step=loaded.step,
            beside=self._turns.num_jobs - 1,
            seconds=seconds,
        )
        return self.state(loaded)

    def _let_in(self, request: TrainerJob) -> None:
        """Supersedes older attempts, except the attempts that the request names beside itself.
        Raises Conflict if it is superseded itself."""
        newest = self._newest
        if newest and not _same_owner(request, newest):
            self._holders = Holders()
        elif newest and self._holders.is_stale(request.fence):
            raise _stale(request, newest)
        self._holders.take(request.fence, request.beside)
        if self._newest is None or request.fence >= self._holders.newest:
            self._newest = request

    def _free_superseded(self, request: TrainerJob, model: str) -> None:
        """Frees the job's own previous state, and all jobs that do not share the trainer with
        it."""
        shares = request.job.shares_as

        def stays(other: LoadedJob) -> bool:
            alike = shares and (other.request.job.shares_as, other.model) == (shares, model)
            return bool(alike) and other.request.attempt in self._holders

        self._turns.free(request.job_id)
        if not self._turns.keep(stays):
            self.unload()

    def _remember(self) -> None:
        """Keeps the newest attempt's job for restarted ranks, else they would accept older ones."""
        self._seams.remember_job(self._newest)

    def _continued(self, loaded: LoadedJob, request: TrainerJob) -> TrainerState:
        """Continues with the loaded engine. The job may differ in keys that an engine does not
        use."""
        loaded.request, loaded.canary = request, None  # its noise is measured again
        if self._ranks.rank == 0:
            self._remember()
        return self.state(loaded)

    def train_step(self, request: TrainStepRequest) -> StepResult:
        """Applies the next step. A repetition of the last step, with the same body, returns the
        same result and changes no weight."""
        loaded = self._job(request)

        def apply() -> StepResult:
            if loaded.engine.num_calls:
                raise Conflict(
                    f"step {request.step} came, and the gradient of {loaded.engine.num_calls} "
                    "forward_backward calls waits for an optim_step; expected that first",
                    code="out_of_order",
                )
            result = self._apply(loaded, request)
            loaded.skipped_steps += result.skipped
            return result

        return self._in_order(loaded, request, apply)

    def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResult:
        """Adds the gradient of the examples' loss to the next `optim_step`'s, as the next
        operation. The last operation again, with the same body, returns its result."""
        loaded, started = self._job(request), time.monotonic()

        def apply() -> ForwardBackwardResult:
            loss, logprobs = self._trained(
                loaded, lambda: loaded.engine.forward_backward(request.examples, request.loss)
            )
            seconds = time.monotonic() - started
            return ForwardBackwardResult(
                step=request.step, loss=loss, logprobs=logprobs, train_s=seconds
            )

        return self._in_order(loaded, request, apply)

    def optim_step(self, request: OptimStepRequest) -> OptimStepResult:
        """Changes the weights by the gradient of the calls since the last optimizer step, as the
        next operation. The last operation again, with the same body, returns its result."""
        loaded, started = self._job(request), time.monotonic()

        def apply() -> OptimStepResult:
            num_calls = loaded.engine.num_calls
            norm = self._trained(loaded, lambda: loaded.engine.optim_step(request.optimization))
            seconds = time.monotonic() - started
            return OptimStepResult(
                step=request.step, grad_norm=norm, num_calls=num_calls, train_s=seconds
            )

        return self._in_order(loaded, request, apply)

    def _in_order(self, loaded: LoadedJob, request: Numbered, apply: Callable[[], R]) -> R:
        """Returns the result of the job's next operation, or of the last operation if the request
        repeats it."""
        fingerprint = _fingerprint(request)
        if loaded.last and request.step == loaded.step:
            if loaded.last[0] != fingerprint:
                raise Conflict(
                    f"step {request.step} was already applied, with another body; expected the "
                    "same body again",
                    code="body_differs",
                )
            return cast(R, loaded.last[1])
        if request.step != loaded.step + 1:
            raise Conflict(
                f"got step {request.step}, expected {loaded.step + 1}", code="out_of_order"
            )
        result = apply()
        loaded.step, loaded.last = request.step, (fingerprint, result)
        get_logger().info(
            "step applied",
            job=request.job_id,
            **result.model_dump(exclude={"metrics", "logprobs", "entropies"}),
        )
        return result

    def forward(self, request: ForwardRequest) -> ForwardResult:
        """Returns the examples' log-probs by the weights of the last step. Changes nothing."""
        loaded = self._job(request)
        if request.step != loaded.step:
            raise Conflict(
                f"got step {request.step}, expected {loaded.step}, the last applied step",
                code="out_of_order",
            )
        logprobs, reference = loaded.engine.forward(request.examples)
        return ForwardResult(logprobs=logprobs, reference_logprobs=reference)

    def publish_weights(self, request: PublishRequest) -> AnyWeights | None:
        """Returns the reference of the published weights on rank 0, None elsewhere."""
        loaded = self._job(request)
        if request.version != loaded.step:
            raise Conflict(
                f"got version {request.version}, expected {loaded.step}, the last applied step",
                code="out_of_order",
            )
        is_adapter = SYNC_METHODS[request.method].is_adapter
        if is_adapter and loaded.request.job.lora is None:
            raise BadRequest(
                f"got method {request.method!r} for job {request.job_id!r}, which has no [lora] "
                "and so no adapter to publish"
            )
        if request.snapshot is not None and not is_adapter:
            raise BadRequest(f'got a snapshot by method {request.method!r}; expected "lora"')
        engine, publisher = loaded.engine, loaded.publisher
        size_bytes = 4 * engine.num_trainable if is_adapter else engine.weights_bytes

        def lead(save_all: SaveAll) -> AnyWeights:
            assert publisher is not None, "rank 0 has one"
            return publisher.publish(request, size_bytes, lambda folder: save_all(folder)[0])

        canary = self._canary(loaded)
        save = engine.save_adapter if is_adapter else engine.save_weights
        try:
            published = self._ranks.write(lead, save)
        finally:  # on every rank, also if only rank 0 failed: the sampler's turn on the GPU begins
            if self._settings.colocate:
                self._ranks.on_all_ranks(engine.offload)
        return published and published.model_copy(update={"canary": canary})

    def _canary(self, loaded: LoadedJob) -> Canary | None:
        """Returns the canary of the last applied step: a collective, once per step."""
        if loaded.canary is None or loaded.canary[0] != loaded.step:
            before, noise = loaded.canary and loaded.canary[1], None
            if before and loaded.step // NOISE_EVERY == loaded.noise_at // NOISE_EVERY:
                noise = before.noise
            else:
                loaded.noise_at = loaded.step
            canary = self._ranks.on_all_ranks(lambda: loaded.engine.canary(noise))[0]
            loaded.canary = loaded.step, canary
        return loaded.canary[1]

    def write_checkpoint(self, request: CheckpointRequest) -> Checkpoint | None:
        """Returns the checkpoint on rank 0, None elsewhere. An existing checkpoint is not written
        again; old ones are removed."""
        loaded = self._job(request)
        folder = checkpoints.checkpoints_dir(self._settings.runs_dir, request.job_id)
        path = checkpoints.path_of(folder, request.step)
        known = self._ranks.from_rank_0(
            lambda: checkpoints.describe_checkpoint(path, request.step) if path.is_dir() else None
        )
        if known is None and request.step != loaded.step:
            raise Conflict(
                f"got step {request.step}, expected {loaded.step}, the last applied step",
                code="out_of_order",
            )
        if known is None and loaded.engine.num_calls:
            raise Conflict(
                f"the gradient of {loaded.engine.num_calls} forward_backward calls waits for an "
                "optim_step, and a checkpoint has none; expected a checkpoint right after an "
                "optim_step",
                code="out_of_order",
            )
        if known:
            # the removal may have failed when the checkpoint was written
            self._ranks.from_rank_0(self._runs.keep)
            return known if self._ranks.rank == 0 else None
        with ExitStack() as stack:
            self._ranks.on_all_ranks(lambda: stack.enter_context(self._seams.writing()))
            return save_checkpoint(self._ranks, loaded, path, request, self._runs)

    def state(self, loaded: LoadedJob | None = None) -> TrainerState:
        """Returns this trainer's state, with a job's state, by default of the job whose turn it is.
        Safe to call from another thread."""
        loaded = loaded or self._turns.current
        past = {
            "num_ranks": self._ranks.num_ranks,
            "restarts": self._past.restarts,
            "last_failure": self._past.last_failure,
            "boot_id": self._boot_id,
            "gpu": self._seams.gpu,
            "memory_space": memory_space(),
            "sharing": self._turns.job_ids(),
            "turn_s": self._turns.turn_s,
        }
        if loaded is None:
            return TrainerState(job_id=None, step=0, dtype="", device="", num_parameters=0, **past)
        engine = loaded.engine
        return TrainerState(
            job_id=loaded.request.job_id,
            attempt=loaded.request.attempt,
            epoch=loaded.request.epoch,
            step=loaded.step,
            dtype=engine.dtype,
            device=engine.device,
            num_parameters=engine.num_parameters,
            num_trainable=engine.num_trainable,
            without=engine.without,
            skipped_steps=loaded.skipped_steps,
            resumed_step=loaded.resumed_step,
            damaged=loaded.damaged,
            **past,
        )

    def list_checkpoints(self) -> CheckpointList:
        """Returns the checkpoints of the job whose turn it is; none without a job. Safe to call
        from another thread."""
        loaded = self._turns.current
        if loaded is None:
            return CheckpointList(checkpoints=())
        folder = checkpoints.checkpoints_dir(self._settings.runs_dir, loaded.request.job_id)
        return CheckpointList(checkpoints=checkpoints.list_checkpoints(folder))

    def unload(self) -> None:
        """Forgets all jobs: restarted ranks will not load one. Frees their memory, their shared
        memory included."""
        if self._ranks.rank == 0:
            self._seams.remember_job(None)
        self._turns.free_all()

    def device_fault(self) -> str | None:
        """Returns why this rank's device cannot be used any more; None if it works."""
        return self._seams.device_fault()

    def free_shared_memory(self) -> None:
        """Frees only the jobs' shared memory. Safe to call from another thread, while the process
        ends."""
        self._turns.free_shared_memory()

    def give_up(self, job_id: str) -> None:
        """Frees a job that only some ranks have loaded. Other jobs' state stays, in host memory."""
        self._turns.free(job_id)
        self._turns.close_engine()
        if self._ranks.rank == 0 and not self._turns.num_jobs:
            self._seams.remember_job(None)

    def _job(self, request: Fenced) -> LoadedJob:
        """Returns the loaded job, whose turn begins if it was another's. Raises StateLost if the
        request's job is not loaded, and Conflict unless it has the same fence."""
        self._turns.new_command()
        if self._newest is not None and self._holders.is_stale(request.fence):
            raise _stale(request, self._newest)
        loaded = self._turns.find(request.job_id)
        if loaded is None:
            loaded_ids = self._turns.job_ids()
            if not loaded_ids:
                raise StateLost(f"got job {request.job_id!r}, but no job is loaded; PUT /job first")
            names = " or ".join(map(repr, loaded_ids))
            raise StateLost(f"got job {request.job_id!r}, expected {names}, the one loaded")
        current = loaded.request
        if request.fence < current.fence:
            raise _stale(request, current)
        if request.fence > current.fence:
            raise Conflict(
                f"got attempt {request.attempt}, epoch {request.epoch}, expected "
                f"{current.attempt}, {current.epoch}; PUT /job first",
                code="out_of_order",
            )
        self._turns.begin(loaded)
        return loaded

    def _fitting(self, request: TrainerJob) -> Job:
        """Returns the job with the smallest budget of a micro-batch among the ranks."""
        budgets = self._ranks.on_all_ranks(lambda: self._seams.budget(request))
        tokens = min(budget.tokens for budget in budgets)
        return PassBudget(tokens, any(budget.recomputes for budget in budgets)).applied(request.job)

    def _resumed(self, request: TrainerJob, model: str, point: ResumePoint) -> LoadedJob:
        """Returns the job at its checkpoint, or at its start if there is none."""
        job = self._fitting(request)
        engine = self._turns.engine_for(job)
        publisher = None
        if self._ranks.rank == 0:
            publisher = Publisher(self._settings, request.job_id, engine.live_weights)
            publisher.close()
        loaded = LoadedJob(request, model, job, engine, publisher)
        try:
            loaded.resume(point)
        except BaseException:  # undone and raised again, for every kind of error
            self._turns.close_engine()
            raise
        self._turns.current = loaded
        return loaded

    def _trained(self, loaded: LoadedJob, train: Callable[[], T]) -> T:
        """Returns the result of `train`, which uses the engine. If it fails in a way that the
        engine cannot undo, frees the job and the engine; other jobs' state stays, in host
        memory."""
        if loaded.publisher is not None:
            loaded.publisher.stop_sending()  # tensors that are being sent must not change
        if self._settings.colocate:
            loaded.engine.reload()
        try:
            return train()
        except HoneError:
            raise
        except BaseException as error:  # undone and raised again, for every kind of error
            if isinstance(error, OutOfMemory) and error.budget:
                self._seams.remember_budget(loaded.request, error.budget)
            # An update that died on the way leaves half-filled gradient buckets: nothing can be
            # trained on top of them. If it failed because another rank died, the restarted ranks
            # load the job again, so it is not forgotten.
            self._turns.free(loaded.request.job_id)
            self._turns.close_engine()
            raise

    def _apply(self, loaded: LoadedJob, request: TrainStepRequest) -> StepResult:
        started = time.monotonic()
        rate = learning_rate(loaded.request.job, request.step)
        update = Update(0.0, 0.0, {}, num_updates=0)
        if request.examples:
            supervised = loaded.request.job.is_supervised(request.step)
            update = self._trained(
                loaded,
                lambda: loaded.engine.update(
                    request.examples,
                    rate,
                    request.totals,
                    version=loaded.step,
                    supervised=supervised,
                ),
            )
        return StepResult(
            step=request.step,
            loss=update.loss,
            grad_norm=update.grad_norm,
            learning_rate=rate,
            num_examples=len(request.examples),
            num_tokens=sum(map(num_sampled, request.examples)),
            train_s=time.monotonic() - started,
            metrics=update.metrics | self._turns.metrics(),
            num_updates=update.num_updates,
            skipped=update.skipped,
            logprobs=update.logprobs,
            entropies=update.entropies,
        )


Numbered = TrainStepRequest | ForwardBackwardRequest | OptimStepRequest

R = TypeVar("R", StepResult, ForwardBackwardResult, OptimStepResult)


def _stale(request: Fenced, current: Fenced) -> Conflict:
    return Conflict(
        f"job {request.job_id!r}: got attempt {request.attempt}, epoch {request.epoch}, which job "
        f"{current.job_id!r} has superseded with {current.attempt}, {current.epoch}",
        code="stale",
    )


def _same_owner(request: TrainerJob, other: TrainerJob) -> bool:
    """Returns whether the fences of both come from the counter of one Redis."""
    owners = [each.orchestrator and each.orchestrator.identity for each in (request, other)]
    return owners[0] == owners[1]


def _fingerprint(body: Numbered) -> str:
    """Returns a digest of the operation's content, without its caller."""
    plain = body.model_copy(update={"attempt": 0, "epoch": 0})
    return hashlib.sha256(codec.encode(plain, codec.MSGPACK)).hexdigest()
