"""Trains a job by TRL's `GRPOTrainer`: `python -m deploy.simple FOLDER < job.json`, which
hone/trainer/simple.py starts.

Rows, rewards, held-out sets, metrics and run folder are by the code of Hone's own loop, so two runs
of a job differ in what is compared: sampling (by transformers), loss and optimizer step.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from deploy.machine import exit_on_signals
from hone.reward_service import reward_service
from hone.trainer import simple
from services.orchestrator.grpo.estimates import problem_metrics
from services.orchestrator.grpo.held_out import Answers, prefixed_metrics
from services.orchestrator.grpo.metrics import WRITTEN, reward_metrics
from services.orchestrator.grpo.prompts import Prompts, load_prompts, with_steps
from services.orchestrator.jobs.prompt_checks import check_rows
from services.orchestrator.jobs.results import best_step, summarize
from services.orchestrator.samplers.clients import RewardClient
from services.orchestrator.samplers.status import Caller
from services.orchestrator.store.folder import Note, RunFolder
from services.orchestrator.tasks import gather_all
from services.trainer.disk.checkpoints import describe_checkpoint, path_of, remove_old
from services.trainer.loaded import learning_rate
from shared.errors import Failed, HoneError
from shared.job import Job
from shared.settings import load_settings
from shared.wire import (
    Batch,
    JobRecord,
    MetricsRow,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    Span,
    TokenIds,
)

HELD_OUT_AT_A_TIME = 64
"""Held-out completions that are sampled together."""

OTHER_NAMES = ("reward", "epoch", "step_time", "num_tokens", "total_flos", "train_")
"""Beginnings of TRL's metrics that Hone measures itself, or that belong to the whole run."""


def main() -> None:
    """Trains, and writes the outcome into `record.json`. Exits 1 if it failed."""
    exit_on_signals(signal.SIGTERM)
    folder, job = RunFolder(Path(sys.argv[1])), Job.model_validate_json(sys.stdin.read())
    note = Note(created_at=time.time(), status="running")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_note(note)
    ended: dict[str, Any] = {"status": "cancelled", "error": "it was interrupted"}
    try:
        train(job, folder, note.created_at)
        ended = {"status": "succeeded", "error": None}
    except Exception as error:
        why = error.detail if isinstance(error, HoneError) else repr(error)
        ended = {"status": "failed", "error": why}
        raise
    finally:
        folder.write_note(note.model_copy(update={"finished_at": time.time()} | ended))


def train(job: Job, folder: RunFolder, created_at: float) -> None:
    """Trains a job in `folder`, which is new."""
    settings = load_settings()
    prompts = load_prompts(job, settings)
    job = with_steps(job, prompts.num_train)
    first = check_rows(job, prompts)
    folder.create(job, prompts.versions)
    with reward_service(sandbox_slots=None) as (url, token), asyncio.Runner() as loop:
        bearer = SecretStr(token) if token else None
        where = settings.model_copy(update={"reward_url": url, "token": bearer})
        reward = RewardClient(Caller(job, where, folder.path.name))
        loop.run(reward.validate(prompts.columns, first))
        run = SimpleRun(job, folder, prompts, reward, loop)
        began = time.monotonic()
        run.trainer.train()
        train_s = time.monotonic() - began
        record = JobRecord(
            id=folder.path.name,
            name=job.name,
            model=job.model,
            status="succeeded",
            created_at=created_at,
            steps=job.steps,
            job=job,
            run_dir=str(folder.path),
        )
        last = describe_checkpoint(path_of(folder.checkpoints, job.steps), job.steps)
        versions = {"trl": metadata.version("trl")}
        folder.write_summary(summarize(record, folder.metrics(), last, train_s, versions))
        loop.run(reward.client.close())


class SimpleRun:
    """One run: TRL's trainer, and the functions that it calls for rewards and after each step."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        prompts: Prompts,
        reward: RewardClient,
        loop: asyncio.Runner,
    ) -> None:
        self._job = job
        self.folder = folder
        self._prompts = prompts
        self._held_out = prompts.held_out()
        self._reward = reward
        self._loop = loop
        self._began = time.monotonic()
        self._scores_PG: list[tuple[Score, ...]] = []
        self._measured: dict[str, float] = {}
        self.for_step = functools.lru_cache(maxsize=2)(prompts.for_step)
        self.trainer = _trainer(job, self)

    def rows(self) -> Any:
        """Returns the problems of all steps in the job's order, made when they are read."""
        from datasets import Dataset

        count = self._job.sampling.prompts_per_step

        def made(rows: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
            prompts = [self.prompt_at(row) for row in rows["row"]]
            return {"row": [*rows["row"]], "prompt": [_content(each) for each in prompts]}

        rows = Dataset.from_dict({"row": range(count * self._job.steps)})
        rows.set_format("custom", transform=made)
        return rows

    def prompt_at(self, row: int) -> Prompt:
        step, place = divmod(row, self._job.sampling.prompts_per_step)
        return self.for_step(step + 1)[place]

    def reward_functions(self) -> list[Callable[..., list[float | None]]]:
        """Returns a function for each reward of the job. The first has the reward service grade the
        completions by all rewards; the others return the results. A completion without a reward has
        none from any function, so TRL leaves it out."""

        def function(place: int, label: str) -> Callable[..., list[float | None]]:
            def reward(
                completions: Sequence[Any],
                completion_ids: Sequence[Sequence[int]],
                row: Sequence[int],
                **_: Any,
            ) -> list[float | None]:
                if place == 0:
                    self.grade([_said(each) for each in completions], completion_ids, row)
                scores = [score for scores_G in self._scores_PG for score in scores_G]
                return [None if s.value is None else s.parts[label].value for s in scores]

            reward.__name__ = label
            return reward

        return [function(place, each.label) for place, each in enumerate(self._job.rewards)]

    def grade(
        self, texts: Sequence[str], ids: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> None:
        """Has a step's completions graded, and stores them."""
        size, began = self._job.sampling.group_size, time.monotonic()
        step = rows[0] // self._job.sampling.prompts_per_step + 1
        rollouts = [self._rollout(*each, step - 1) for each in zip(texts, ids, strict=True)]
        prompts = tuple(self.prompt_at(row) for row in rows[::size])
        groups = [_group(rollouts[at : at + size]) for at in range(0, len(rollouts), size)]
        self._scores_PG = self.scores(prompts, groups)
        self.folder.write_batch(
            Batch(
                step=step,
                version=step - 1,
                prompts=prompts,
                groups=tuple(groups),
                scores=tuple(self._scores_PG),
            )
        )
        self._measured = {
            **reward_metrics(self._scores_PG, self._job),
            "num_tokens": sum(map(len, ids)),
            "time/reward": time.monotonic() - began,
        }

    def scores(
        self, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup]
    ) -> list[tuple[Score, ...]]:
        pairs = zip(prompts, groups, strict=True)
        return self._loop.run(gather_all(self._reward.score(*pair) for pair in pairs))

    def _rollout(self, text: str, ids: Sequence[int], version: int) -> Rollout:
        ended = bool(ids) and ids[-1] in self.trainer.eos_token_ids
        return Rollout(
            text=text,
            token_ids=TokenIds(ids),
            finish_reason="stop" if ended else "length",
            spans=(Span(version=version, start=0),),
        )

    def begin(self) -> None:
        """Evaluates the untrained model: step 0."""
        if self._job.evaluates:
            self.folder.append_metrics(MetricsRow(step=0, metrics=self.evaluate(0)))
        self._began = time.monotonic()

    def end_step(self, step: int, told: Mapping[str, Any]) -> None:
        """Writes the row of a step, with TRL's measurements, after the evaluation and the
        checkpoint that are due. Raises Failed if loss or gradient is not finite."""
        metrics = {**_named(told), **self._measured}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics.get(name, 0.0)):
                raise Failed(f"{name} of step {step} is {metrics[name]}", code="not_finite")
        is_last, job = step == self._job.steps, self._job
        if job.evaluates and (is_last or step % job.evaluation.every == 0):
            metrics |= self.evaluate(step)
        if is_last or (job.checkpoints.every and step % job.checkpoints.every == 0):
            metrics[WRITTEN] = self.write_checkpoint(step)
        metrics["time/step"] = time.monotonic() - self._began
        self._began = time.monotonic()
        self.folder.append_metrics(MetricsRow(step=step, metrics=metrics))
        best = best_step(job, self.folder.metrics())
        remove_old(self.folder.checkpoints, job.checkpoints, () if best is None else (best,))

    def evaluate(self, version: int) -> dict[str, float]:
        """Returns the metrics of the held-out sets, with the names that Hone's loop gives them."""
        began, metrics = time.monotonic(), dict[str, float]()
        for name, prompts in self._held_out.items():
            groups = self.sample(prompts, version)
            graded = [
                ScoredGroup(prompt=prompt, group=group, scores=scores)
                for prompt, group, scores in zip(
                    prompts, groups, self.scores(prompts, groups), strict=True
                )
            ]
            answers = [Answers(each.scores, problem_metrics(each, self._job)) for each in graded]
            metrics |= prefixed_metrics(name, answers)
        return metrics | {"time/eval": time.monotonic() - began}

    def sample(self, prompts: Sequence[Prompt], version: int) -> list[RolloutGroup]:
        """Returns the completions of held-out prompts by `[evaluation]`."""
        from transformers import GenerationConfig
        from trl.models.utils import unwrap_model_for_generation

        spec, trainer = self._job.evaluation, self.trainer
        drawn = {"do_sample": True, "temperature": spec.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=spec.max_tokens or self._job.sampling.max_tokens,
            num_return_sequences=spec.samples,
            pad_token_id=trainer.processing_class.pad_token_id,
            eos_token_id=trainer.eos_token_ids,
            repetition_penalty=1.0,  # other options are from the model's file
            **(drawn if spec.temperature else {"do_sample": False}),
        )
        groups: list[RolloutGroup] = []
        size = max(HELD_OUT_AT_A_TIME // spec.samples, 1)
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as found:
            model: Any = found
            model.eval()
            for at in range(0, len(prompts), size):
                several = _tokens(trainer, prompts[at : at + size], self._job)
                made = model.generate(**several, generation_config=config)
                rows = made[:, several["input_ids"].shape[1] :].tolist()
                rollouts = [self._rollout(*_cut(trainer, row), version) for row in rows]
                groups += [
                    _group(rollouts[first : first + spec.samples])
                    for first in range(0, len(rollouts), spec.samples)
                ]
            model.train()
        return groups

    def write_checkpoint(self, step: int) -> float:
        """Writes the model in the form that `transformers` loads, with an adapter merged into it;
        returns the seconds that this took."""
        began, path = time.monotonic(), path_of(self.folder.checkpoints, step)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if self._job.lora:
            model = copy.deepcopy(model).merge_and_unload()
        aside = path.with_name(f".{path.name}")
        model.save_pretrained(aside)
        self.trainer.processing_class.save_pretrained(aside)
        aside.rename(path)
        return time.monotonic() - began


def _trainer(job: Job, run: SimpleRun) -> Any:
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Trainer(GRPOTrainer):
        """TRL's trainer with the job's learning rates."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            peak, updates = job.learning_rate or 1.0, simple.updates(job)
            trained: Any = optimizer or self.optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                trained,
                lambda update: learning_rate(job, min(update // updates + 1, job.steps)) / peak,
            )
            return self.lr_scheduler

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            run.begin()

        def on_log(self, _: Any, state: Any, *__: Any, logs: Any, **___: Any) -> None:
            if "loss" in logs:
                run.end_step(state.global_step // simple.updates(job), logs)

    arguments = simple.grpo_arguments(job)
    arguments["bf16"] &= torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    config = GRPOConfig(
        **arguments,
        output_dir=str(run.folder.path / "trl"),
        reward_weights=[each.weight for each in job.rewards],
        shuffle_dataset=False,  # the rows are in the job's order
        logging_steps=simple.updates(job),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(
        job.model, revision=job.model_revision, padding_side="left"
    )
    return Trainer(
        model=job.model,
        reward_funcs=run.reward_functions(),  # pyright: ignore[reportArgumentType]
        args=config,
        train_dataset=run.rows(),
        processing_class=tokenizer,
        callbacks=[Steps()],
        peft_config=_adapter(job),
    )


def _adapter(job: Job) -> Any:
    if job.lora is None:
        return None
    from peft import LoraConfig

    modules = job.lora.target_modules
    return LoraConfig(
        r=job.lora.rank,
        lora_alpha=job.lora.alpha,  # pyright: ignore[reportArgumentType]  (a float too)
        lora_dropout=job.lora.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )


def _tokens(trainer: Any, prompts: Sequence[Prompt], job: Job) -> Any:
    """Returns the prompts' token ids, padded on the left."""
    tokenizer = trainer.processing_class
    ids = [
        tokenizer(prompt.content)["input_ids"]
        if isinstance(prompt.content, str)
        else tokenizer.apply_chat_template(
            _content(prompt),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **job.sampling.template_args,
        )["input_ids"]
        for prompt in prompts
    ]
    padded = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    return padded.to(trainer.accelerator.device)


def _cut(trainer: Any, ids: list[int]) -> tuple[str, list[int]]:
    """Returns a completion's text and its token ids up to the first end token."""
    end = next((at for at, each in enumerate(ids) if each in trainer.eos_token_ids), len(ids))
    ids = ids[: end + 1]
    return trainer.processing_class.decode(ids, skip_special_tokens=True), ids


def _content(prompt: Prompt) -> Any:
    return prompt.content if isinstance(prompt.content, str) else [*prompt.content]


def _said(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def _group(rollouts: Sequence[Rollout]) -> RolloutGroup:
    return RolloutGroup(prompt_token_ids=TokenIds(), rollouts=tuple(rollouts), replica="trl")


def _named(told: Mapping[str, Any]) -> dict[str, float]:
    """Returns TRL's metrics that Hone does not measure itself."""
    return {
        name: float(value)
        for name, value in told.items()
        if isinstance(value, int | float) and not name.startswith(OTHER_NAMES)
    }


if __name__ == "__main__":
    main()
