"""The mode Simple: TRL's `GRPOTrainer` trains the job in a process here, without a stack.
`deploy/simple.py` is that process. The job becomes the parameters of a `trl.GRPOConfig`: the
inverse of parameters.py. What TRL has no parameter for is refused, a sentence for each key."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from hone.stack import check_installed, version_of
from hone.trainer.dataset import Problems
from hone.trainer.modes import Mode
from hone.trainer.run import MetricsRun, TrainOutput
from hone.trainer.single import SAME
from hone.view import Follower
from shared.errors import BadRequest, Failed, how_to_install
from shared.explain import elide
from shared.host.processes import ending_with_parent
from shared.job import Job
from shared.job.section import Section
from shared.weights.folders import step_of
from shared.wire import Event, MetricsRow

LOOK_S = 0.3
END_S = 20.0
"""Seconds that a run has to stop before it is killed."""

LOG, LOG_SHOWN = "trl.log", 500


@dataclass(frozen=True)
class Simple(Mode):
    """TRL's `GRPOTrainer`, in a process of its own that ends with this one. The run folder is
    `folder`/<name>-<time>; None: `simple` in HONE_RUNS_DIR."""

    folder: str | Path | None = None

    def check(self, job: Job) -> None:
        folder: Any = self.folder
        if folder is not None and (not isinstance(folder, str | Path) or Path(folder).is_file()):
            raise BadRequest(f"folder is {elide(folder)}; expected a folder, or one to be made")
        check(job)

    def start(self, job: Job, sources: Mapping[str, Problems]) -> SimpleRun:
        """Returns the run, as soon as its process has begun. Raises BadRequest for what TRL cannot
        do, and if TRL is missing."""
        from shared.settings import load_settings

        self.check(job)
        if version_of("trl") is None:
            raise BadRequest(f"the mode Simple runs TRL: {how_to_install('simple')}")
        check_installed("simple", "orchestrator")
        parent = Path(self.folder or load_settings().runs_dir / "simple").resolve()
        path = parent / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        path.mkdir(parents=True)
        rows = {
            key: source.saved(path / f"{key}.jsonl")
            for key, source in sources.items()
            if source.lines
        }
        job = job.model_copy(update={"data": job.data.model_copy(update=rows)})
        return SimpleRun.begin(path, job)


class SimpleRun(MetricsRun):
    """A run of TRL's trainer, with its run folder at `path`."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(path.name)
        self.path = path
        self._process = process

    @classmethod
    def begin(cls, path: Path, job: Job) -> Self:
        with (path / LOG).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.simple", str(path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"TOKENIZERS_PARALLELISM": "false"} | os.environ,
                start_new_session=True,  # Ctrl-C is for this process, which then cancels
                preexec_fn=ending_with_parent(),
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # it may end at once
            stdin.write(job.model_dump_json().encode())
        return cls(path, process)

    def __repr__(self) -> str:
        return f"<{self.status} run of TRL in {str(self.path)!r}>"

    @property
    def status(self) -> str:
        """ "running", "succeeded", "failed" or "cancelled"."""
        if self._process.poll() is None:
            return "running"
        found = str(self._read("record.json").get("status"))
        return found if found in ("succeeded", "cancelled") else "failed"

    def wait(self, timeout_s: float | None = None) -> TrainOutput:
        """Returns what training came to. Raises TimeoutError after `timeout_s`, and Failed for a
        run that failed or was cancelled."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"run {self.id} continues after {timeout_s:g} s") from error
        if self.status != "succeeded":
            raise Failed(f"run {self.id} {self.status}: {self._why()}")
        return TrainOutput.of(self._rows(), self._read("summary.json"))

    def follow(self) -> TrainOutput:
        """Shows progress until the end, and returns as `wait` does. Ctrl-C ends the run."""
        try:
            with Follower(Console()) as view:
                for event in self.events():
                    view.show(event)
        except KeyboardInterrupt:
            self.cancel()
            raise
        return self.wait()

    def cancel(self) -> None:
        """Ends the run; what it wrote stays."""
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        finally:  # also at a second Ctrl-C
            self._process.kill()
            self._process.wait()

    def checkpoint(self, to: str | Path | None = None, *, step: int | None = None) -> Path:
        """Returns the folder of the newest checkpoint, or of `step`, as `transformers` loads it;
        copied to `to`, unless that is None."""
        found = {
            each: path
            for path in (self.path / "checkpoints").glob("*")
            if (each := step_of(path.name)) is not None and step in (None, each)
        }
        if not found:
            raise self._no_checkpoint(step)
        newest = found[max(found)]
        return newest if to is None else Path(shutil.copytree(newest, to, dirs_exist_ok=True))

    def events(self) -> Generator[Event]:
        """Yields an event for each step and evaluation, until the process ends."""
        yield self._event("status", f"TRL trains; its output is in {str(self.path / LOG)!r}")
        shown, ended = -1, False
        while not ended:
            ended = self._process.poll() is not None
            for row in self._rows():
                if row.step <= shown:
                    continue
                shown, steps = row.step, self._read("job.json").get("steps", 0)
                told = {"step": row.step, "steps": steps, "metrics": row.metrics}
                if row.step:
                    yield self._event("step", f"step {row.step} of {steps}", told)
                if (held_out := row.metrics.get("eval/reward")) is not None:
                    said = f"held-out reward {held_out:.3f} after step {row.step}"
                    yield self._event("eval", said, told)
            time.sleep(0 if ended else LOOK_S)

    def _event(self, kind: Any, message: str, data: dict[str, Any] | None = None) -> Event:
        return Event(
            id="0", job_id=self.id, time=time.time(), type=kind, message=message, data=data or {}
        )

    def _rows(self) -> Sequence[MetricsRow]:
        path = self.path / "metrics.jsonl"
        return MetricsRow.stored(path) if path.exists() else ()

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return json.loads(path.read_bytes()) if path.exists() else {}

    def _why(self) -> str:
        said = (self.path / LOG).read_text(errors="replace").strip()[-LOG_SHOWN:]
        return self._read("record.json").get("error") or f"its output ends: {said}"


# --- a job as parameters of TRL ------------------------------------------------------------------

NAMES = (
    *("num_generations", "max_completion_length", "temperature", "chat_template_kwargs"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "beta"),
    *("delta", "sapo_temperature_pos", "sapo_temperature_neg", "importance_sampling_level"),
    "mask_truncated_completions",
)
"""Names of the table `SAME` that TRL has too."""

TAKEN = frozenset(
    {
        *(SAME[name] for name in NAMES),
        *("sampling.prompts_per_step", "sampling.top_p", "sampling.top_k", "sampling.min_p"),
        *("training.epochs", "training.minibatches", "training.clip_low", "training.clip_high"),
        *("training.min_learning_rate", "training.schedule", "training.warmup_steps"),
        *("advantages.std", "advantages.combine"),
        *("correction.sequence_ratio", "correction.low", "correction.high"),  # of a method
        "correction.truncated_sampling",
    }
)
"""Keys that TRL has, or that say nothing where the same process samples and trains."""

VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "training.loss": (
        ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo"),
        'TRL has it as loss "grpo" with importance "sequence"',
    ),
    "training.kl": (("k3", "k3_true"), "TRL estimates the divergence by these"),
    "training.dtype": (
        ("auto", "float32"),
        'TRL would keep the weights themselves in it, which "auto" does not',
    ),
    "correction.method": (("auto", "none"), "the model that is trained samples, in one process"),
}
"""Keys that TRL has with some values: which, and why no others."""

SECTIONS = ("sampling", "difficulty", "advantages", "training", "warmup", "correction", "stop")
ALONE = (
    *("environment", "teacher", "max_staleness", "drain_before_sync", "sync_every", "weight_sync"),
    *("wandb", "trackers"),
)
"""Sections whose keys are checked, and keys of no section."""


def check(job: Job) -> None:
    """Raises BadRequest with a sentence for each key that TRL has no parameter for."""
    usual, faults = Job.model_construct(), list[str]()
    sections: dict[str, Section] = {name: getattr(usual, name) for name in SECTIONS}
    inside = [f"{name}.{key}" for name, part in sections.items() for key in type(part).model_fields]
    for key in (key for key in (*ALONE, *inside) if key not in TAKEN):
        by_default = (attrgetter(key)(usual),)
        allowed, why = VALUES.get(key, (by_default, "TRL has no parameter for it"))
        if (value := attrgetter(key)(job)) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            faults.append(f"{key} is {elide(value)}, expected {wanted}: {why}")
    if faults := [*faults, *_faults(job)]:
        raise BadRequest(f"TRL cannot run the job {job.name!r}: {'; '.join(faults)}")


def _faults(job: Job) -> list[str]:
    sampling, training = job.sampling, job.training
    faults: list[str] = []
    if not job.trains:
        faults.append("steps is 0, expected 1 or more: `hone eval` evaluates")
    if sampling.group_size < 2:
        faults.append("sampling.group_size is 1, expected 2 or more: TRL compares completions")
    if job.needs_masks:
        faults.append(
            'correction.truncated_sampling is "refuse", expected "accept" with top_p, top_k or '
            "min_p: TRL's log-probs are over the whole vocabulary"
        )
    if job.advantages.combine == "normalize_then_sum" and job.advantages.std != "group":
        faults.append(
            f'advantages.std is {job.advantages.std!r}, expected "group" with combine '
            '"normalize_then_sum": TRL divides each reward by its deviation in the group'
        )
    if training.dual_clip is not None and training.dual_clip < 1 + training.clip_high:
        faults.append(
            f"training.dual_clip is {training.dual_clip:g}, expected 1 + clip_high or more: TRL "
            "bounds by it where the advantage is positive too"
        )
    if training.beta and training.kl == "k3_true" and training.importance == "sequence":
        faults.append(
            'training.kl is "k3_true", expected "k3" with importance "sequence": TRL multiplies '
            "each token's divergence by its sequence's ratio"
        )
    if (completions := sampling.prompts_per_step * sampling.group_size) % training.minibatches:
        faults.append(
            f"training.minibatches is {training.minibatches}, expected a divisor of the step's "
            f"{completions} completions"
        )
    elif training.loss == "bnpo" and _batches(job)["gradient_accumulation_steps"] > 1:
        faults.append(
            'training.loss is "bnpo", expected "dapo", or memory.micro_batch_tokens for all of an '
            "update: TRL averages over each micro-batch's tokens"
        )
    names = [reward.label for reward in job.rewards if reward.shaping]
    return faults + [
        f"shaping of the reward {name!r} is true, expected false: TRL trains on all differences"
        for name in names
    ]


def grpo_arguments(job: Job) -> dict[str, Any]:
    """Returns the parameters of a `trl.GRPOConfig` that learns what the job says on one device.
    `data` and `lora` are none of its parameters, and deploy/simple.py has the schedule of learning
    rates, since TRL's begins at 0 and ends above the least. The job has passed `check`."""
    training, sampling = job.training, job.sampling
    return {
        **{name: attrgetter(SAME[name])(job) for name in NAMES},
        **_batches(job),
        **_clipping(job),
        "gradient_checkpointing": bool(job.memory.gradient_checkpointing),  # "auto": on
        "learning_rate": job.learning_rate,
        "num_iterations": training.epochs,
        "max_steps": job.steps * updates(job),
        "multi_objective_aggregation": job.advantages.combine,
        "scale_rewards": job.advantages.std,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "use_bias_correction_kl": training.kl == "k3_true",
        "vllm_importance_sampling_correction": False,
        "router_aux_loss_coef": 0.0,
        "disable_dropout": not (job.lora and job.lora.dropout),  # it would disable LoRA's too
        "bf16": training.dtype == "auto",
        "model_init_kwargs": _model(job),
        "seed": job.seed % 2**32,
    }


def updates(job: Job) -> int:
    """Returns how many optimizer steps a step of the job has."""
    return job.training.minibatches * job.training.epochs


def _batches(job: Job) -> dict[str, int]:
    """As many completions at a time as `memory.micro_batch_tokens` surely holds."""
    share = job.sampling.prompts_per_step * job.sampling.group_size // job.training.minibatches
    longest = job.max_model_len or 2 * job.sampling.max_tokens
    most = min(max(job.memory.micro_batch_tokens // longest, 1), share)
    at_a_time = next(size for size in range(most, 0, -1) if share % size == 0)
    parts = share // at_a_time
    return {
        "per_device_train_batch_size": at_a_time,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts * job.training.minibatches,
    }


def _clipping(job: Job) -> dict[str, Any]:
    training = job.training
    high = training.clip_high + (1 if training.loss == "cispo" else 0)
    return {"loss_type": training.loss, "epsilon": training.clip_low, "epsilon_high": high}


def _model(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.training.dtype == "float32":
        found["dtype"] = "float32"
    if job.model_revision:
        found["revision"] = job.model_revision
    if job.memory.attention != "auto":
        found["attn_implementation"] = job.memory.attention
    return found
