"""Compares models on held-out problems: the work of a job of 0 steps. The samplers load one model
after the other, unchanged; each answers the same problems with the same seeds.

The scores of a model on a held-out set are in the run folder as soon as they are known. A later
attempt does not sample them again.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.orchestrator.errors import MustPause
from services.orchestrator.grpo.estimates import differences, estimates, of_all
from services.orchestrator.grpo.held_out import Answers, sample_held_out, set_metrics
from services.orchestrator.grpo.prompts import HeldOut
from services.orchestrator.samplers.services import Services
from services.orchestrator.store.folder import RunFolder
from services.orchestrator.store.journal import Journal
from services.orchestrator.tasks import to_disk
from shared.job import EvaluatedModel, Job
from shared.wire import EvaluationReport, ModelScores, Prompt, SetReport, Wire

ASKED = {"num_prompts", "samples", "temperature", "max_tokens", "pass_reward"}
"""Keys of `[evaluation]` that decide the scores. A paused job may continue with other values."""


class Scores(Wire):
    """The scores of a model on a held-out set, as they are stored: the metrics of each problem
    `[P]`, and the shares of completions that count nowhere. `key` identifies what was asked."""

    key: str
    model: str
    set: str
    problems: tuple[dict[str, float], ...]
    missing_rewards: float
    errored_rollouts: float

    @property
    def has_any(self) -> bool:
        """Whether any completion was sampled and graded."""
        return any("reward" in metrics for metrics in self.problems)


@dataclass
class Comparison:
    """The comparison in one attempt at the job. `tell` is called with a line that says what the
    comparison does. Call `begin` first; then `evaluate` what is `next`, until that is None."""

    job: Job
    sets: Sequence[HeldOut]
    services: Services
    folder: RunFolder
    journal: Journal
    tell: Callable[[str], None]
    _found: dict[str, Scores] = field(default_factory=dict[str, Scores], init=False)
    _prompts: dict[str, tuple[Prompt, ...]] = field(
        default_factory=dict[str, tuple[Prompt, ...]], init=False
    )
    _loaded: EvaluatedModel | None = field(default=None, init=False)

    async def begin(self) -> int:
        """Reads the scores that earlier attempts stored, and returns their number."""
        rows = await asyncio.to_thread(self.folder.scores)
        stored = [Scores.model_validate(row, extra="ignore") for row in rows]
        self._found = {scores.key: scores for scores in stored}
        return len(self._found)

    @property
    def next(self) -> tuple[EvaluatedModel, HeldOut] | None:
        """The next model and the held-out set on which its scores are not known; None: all are."""
        pairs = itertools.product(self.job.evaluated_models, self.sets)
        return next((pair for pair in pairs if self._key(*pair) not in self._found), None)

    async def evaluate(self, model: EvaluatedModel, held_out: HeldOut) -> None:
        """Samples and grades the set's problems with the model, and stores its scores."""
        await self._load(model)
        name = held_out.name
        if name not in self._prompts:
            with self.services.waits.on("data", "reading the prompts"):
                self._prompts[name] = await asyncio.to_thread(held_out.prompts)
        known = (each for each in self.sets if self._key(model, each) in self._found)
        num_known, num_done = sum(len(each.problems) for each in known), itertools.count()
        total = sum(len(each.problems) for each in self.sets)

        def tell() -> None:
            done = f"{num_known + next(num_done)} of {total} problems"
            self.tell(f"evaluating {self._named(model)}: {done}")

        tell()
        sampling = self.job.sampling.model_copy(update={"repeatable": True})
        seeded = self.job.model_copy(update={"sampling": sampling})  # so only the model differs
        answers_P = await sample_held_out(
            seeded, name, self._prompts[name], self.services, 0, done=tell
        )
        scores = _scores(self._key(model, held_out), model.label, name, answers_P)
        if scores.has_any:  # else a later attempt tries again
            stored = [rollout for answers in answers_P for rollout in answers.stored]
            number = self.job.evaluated_models.index(model)
            await to_disk(self.folder.write_held_out, name, number, stored)
            await to_disk(self.folder.append_scores, scores.model_dump())
        self._found[scores.key] = scores
        await self.journal.evaluated(model.label, name, set_metrics(answers_P))

    def report(self) -> EvaluationReport:
        """Returns the report, once all scores are known. Raises MustPause if no model has any score
        on a set."""
        return EvaluationReport(
            id=self.services.job_id,
            temperature=self.job.evaluation.temperature,
            seed=self.job.seed,
            sets=tuple(self._of_set(held_out) for held_out in self.sets),
        )

    def _of_set(self, held_out: HeldOut) -> SetReport:
        models = self.job.evaluated_models
        scores_M = [self._found[self._key(model, held_out)] for model in models]
        if not any(scores.has_any for scores in scores_M):
            raise MustPause(
                f"no completion on {held_out.where} could be sampled and graded; look into the "
                "logs of the samplers and of the reward service"
            )
        first = scores_M[0].problems
        reports = (
            ModelScores(
                name=model.label,
                metrics=estimates(scores.problems),
                differences=differences(scores.problems, first) if number else {},
                missing_rewards=scores.missing_rewards,
                errored_rollouts=scores.errored_rollouts,
            )
            for number, (model, scores) in enumerate(zip(models, scores_M, strict=True))
        )
        return SetReport(
            name=held_out.name,
            source=held_out.where,
            num_problems=len(held_out.problems),
            num_samples=self.job.evaluation.samples,
            models=tuple(reports),
        )

    async def _load(self, model: EvaluatedModel) -> None:
        if self._loaded == model:
            return
        self.tell(f"loading {self._named(model)} into the samplers")
        await self.journal.log(f"loading {self._named(model)} into the samplers")
        self.services.new_epoch()
        await self.services.serve_own_weights(model)
        self._loaded = model

    def _named(self, model: EvaluatedModel) -> str:
        models = self.job.evaluated_models
        return f"{model.label} ({models.index(model) + 1} of {len(models)})"

    def _key(self, model: EvaluatedModel, held_out: HeldOut) -> str:
        """Returns a digest of everything that decides the scores and may differ between the models
        and attempts of this job."""
        spec = self.job.evaluation
        of_set = spec.sets.get(held_out.name)
        asked = (
            model.model,
            model.revision,
            held_out.name,
            spec.model_dump(mode="json", include=ASKED),
            of_set.model_dump(mode="json") if of_set else None,
        )
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _scores(key: str, model: str, name: str, answers_P: Sequence[Answers]) -> Scores:
    metrics = set_metrics(answers_P)
    return Scores(
        key=key,
        model=model,
        set=name,
        problems=tuple(of_all([answers.metrics for answers in answers_P])),
        missing_rewards=metrics["missing_rewards"],
        errored_rollouts=metrics["errored_rollouts"],
    )
