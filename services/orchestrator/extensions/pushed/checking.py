"""Checks a group that was sampled and scored elsewhere, and makes of it what the loop trains on.
Pure but for the model's files. Errors name the rollout and the index of its token, both from 0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.orchestrator.data.fitting import tokenizer_folder
from shared.errors import BadRequest, Unavailable
from shared.job import Job, TrainingSpec
from shared.templates import CannotCount, PromptReader, prompt_reader
from shared.weights.model_folder import read_config, window_of
from shared.wire import (
    Packed,
    Part,
    Prompt,
    PushedGroup,
    PushedRollout,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    Span,
    TokenIds,
)

REWARD = "environment"
"""The name of a pushed reward in metrics, as of every reward that no grader gave."""

MAX_LOGPROB = 0.01
"""Rounding may make a log-prob slightly positive."""

COLUMNS = ("sampled", "logprobs", "advantages")


@dataclass(frozen=True)
class Model:
    """What is known of a job's model: the number of its token ids, and the most tokens of prompt
    and completion, None if that is not known. `reader` is None for a model without a
    tokenizer.json."""

    name: str
    vocabulary: int
    window: int | None
    reader: PromptReader | None

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids; "" without a tokenizer."""
        return self.reader.decode(ids) if self.reader else ""


def model_of(job: Job) -> Model:
    """Reads the model's files. Raises Unavailable if they are not on this machine."""
    try:
        folder = tokenizer_folder(job)
        config = read_config(folder)
    except CannotCount as error:
        raise Unavailable(f"groups of the job cannot be checked here: {error}") from error
    inner: Any = config.get("text_config") or config
    limits = [limit for limit in (job.max_model_len, window_of(config)) if limit is not None]
    try:
        reader = prompt_reader(job.model, folder, job.sampling.template_args)
    except CannotCount:
        reader = None
    return Model(job.model, int(inner["vocab_size"]), min(limits, default=None), reader)


def scored_group(group: PushedGroup, model: Model) -> ScoredGroup:
    """Returns the group as the loop trains on it. Raises BadRequest for the first fault."""
    prompt = _prompt_ids(group, model)
    _check_ids("prompt_token_ids", prompt, model)
    for index, rollout in enumerate(group.rollouts):
        _check(f"rollout {index}", rollout, len(prompt), model)
    if all(each.reward is None and not each.advantages for each in group.rollouts):
        raise BadRequest(
            f"none of the {len(group.rollouts)} rollouts has a reward or advantages; expected them "
            "of at least one"
        )
    content = group.prompt if group.prompt is not None else model.text(prompt)
    return ScoredGroup(
        prompt=Prompt(index=0, content=content, row={}),
        group=RolloutGroup(
            prompt_token_ids=prompt,
            rollouts=tuple(_rollout(each, model) for each in group.rollouts),
        ),
        scores=tuple(_scored(each.reward) for each in group.rollouts),
    )


def check_ratio(group: PushedGroup, training: TrainingSpec) -> None:
    """Raises BadRequest for a rollout whose tokens have different advantages, if the job's ratio is
    of the sequence: it would average them."""
    if training.ratio_of != "sequence":
        return
    for index, rollout in enumerate(group.rollouts):
        given = list(itertools.compress(rollout.advantages, _sampled(rollout)))
        at = next((at for at, one in enumerate(given) if one != given[0]), None)
        if at is not None:
            raise BadRequest(
                f"rollout {index}, advantages: got {given[0]:g} and {given[at]:g}, and "
                f'training.loss is "{training.loss}" with importance "{training.importance}", '
                "whose ratio is of the sequence and would average them; expected the same for all "
                "sampled tokens"
            )


def check_versions(group: PushedGroup, oldest: int, newest: int, step: int) -> None:
    """Raises BadRequest, "too_stale", for a token that weights older than `oldest` sampled, and
    BadRequest for one of weights newer than `newest`. Tokens of unknown weights pass."""
    for index, rollout in enumerate(group.rollouts):
        for at, version in _dated(rollout):
            if oldest <= version <= newest:
                continue
            where = f"rollout {index}, versions: got {version} at token {at}; expected"
            if version > newest:
                raise BadRequest(f"{where} at most {newest}, the newest version that there is")
            raise BadRequest(
                f"{where} {oldest} to {newest}: step {step} trains the group, and max_staleness "
                f"is {step - 1 - oldest}",
                code="too_stale",
            )


def _prompt_ids(group: PushedGroup, model: Model) -> TokenIds:
    if group.prompt_token_ids:
        return group.prompt_token_ids
    if group.prompt is None:
        raise BadRequest("the group has no prompt; expected prompt_token_ids, or prompt")
    if model.reader is None:
        raise BadRequest(
            f"the group has no prompt_token_ids, and the model {model.name!r} has no "
            "tokenizer.json to make them; expected prompt_token_ids"
        )
    ids = TokenIds(model.reader.ids(group.prompt))
    if not ids:
        raise BadRequest(f"prompt: got {group.prompt!r:.80}, which has no tokens; expected some")
    return ids


def _check(where: str, rollout: PushedRollout, num_prompt: int, model: Model) -> None:
    length = len(rollout.token_ids)
    if not length:
        raise BadRequest(f"{where}, token_ids: got none; expected at least 1")
    if model.window is not None and num_prompt + length > model.window:
        raise BadRequest(
            f"{where}, token_ids: got {length} after a prompt of {num_prompt}; expected at most "
            f"{model.window} together, which the model holds"
        )
    _check_ids(f"{where}, token_ids", rollout.token_ids, model)
    for name in COLUMNS:
        _check_length(where, name, getattr(rollout, name), length)
    if not isinstance(rollout.versions, int):
        _check_length(where, "versions", rollout.versions, length)
    _check_values(f"{where}, sampled", rollout.sampled, lambda n: n in (0, 1), "0 or 1")
    if not any(_sampled(rollout)):
        raise BadRequest(f"{where}, sampled: got no 1 among {length}; expected at least one")
    for name, limit in (("logprobs", MAX_LOGPROB), ("advantages", math.inf)):
        column = [
            number if is_sampled else 0.0
            for number, is_sampled in zip(getattr(rollout, name), _sampled(rollout), strict=False)
        ]
        most = "a finite number" if limit == math.inf else "a finite number of at most 0"
        _check_values(f"{where}, {name}", column, _is_finite_up_to(limit), most)
    for at, version in _dated(rollout):
        if version < 0:
            raise BadRequest(f"{where}, versions: got {version} at token {at}; expected 0 or more")


def _is_finite_up_to(limit: float) -> Callable[[float], bool]:
    return lambda number: math.isfinite(number) and number <= limit


def _check_ids(where: str, ids: TokenIds, model: Model) -> None:
    expected = f"0 to {model.vocabulary - 1}, the vocabulary of model {model.name!r}"
    if ids and not (min(ids) >= 0 and max(ids) < model.vocabulary):
        _check_values(where, ids, lambda id: 0 <= id < model.vocabulary, expected)


def _check_length(where: str, name: str, column: Packed[Any], length: int) -> None:
    if len(column) not in (0, length):
        raise BadRequest(
            f"{where}, {name}: got {len(column)}; expected {length}, one for each of token_ids, or "
            "none"
        )


def _check_values(
    where: str, column: Sequence[float], fits: Callable[[Any], bool], expected: str
) -> None:
    for at, number in enumerate(column):
        if not fits(number):
            raise BadRequest(f"{where}: got {number:g} at token {at}; expected {expected}")


def _sampled(rollout: PushedRollout) -> Sequence[int]:
    return rollout.sampled or [1] * len(rollout.token_ids)


def _dated(rollout: PushedRollout) -> list[tuple[int, int]]:
    """Returns the sampled tokens that are the first of their version, as (index, version)."""
    if isinstance(rollout.versions, int):
        return [(0, rollout.versions)]
    pairs = zip(rollout.versions, enumerate(_sampled(rollout)), strict=False)
    found = [(at, version) for version, (at, is_sampled) in pairs if is_sampled]
    return [next(each) for _, each in itertools.groupby(found, key=lambda pair: pair[1])]


def _rollout(pushed: PushedRollout, model: Model) -> Rollout:
    spans = [Span(version=version, start=at) for at, version in _dated(pushed)]
    if spans:
        spans[0] = spans[0].model_copy(update={"start": 0})
    return Rollout(
        text=model.text(_last_answer(pushed)),
        token_ids=pushed.token_ids,
        logprobs=pushed.logprobs,
        finish_reason=pushed.finish_reason,
        spans=tuple(spans),
        sampled=pushed.sampled,
        advantages=pushed.advantages,
        messages=pushed.messages,
    )


def _last_answer(rollout: PushedRollout) -> list[int]:
    """Returns the tokens that the policy sampled last without a break."""
    pairs = list(zip(rollout.token_ids, _sampled(rollout), strict=True))
    runs = itertools.groupby(pairs, key=lambda pair: bool(pair[1]))
    return [[id for id, _ in run] for is_sampled, run in runs if is_sampled][-1]


def _scored(reward: float | None) -> Score:
    """Returns the score that a pushed reward is; None: no reward applies."""
    if reward is None:
        return Score(value=None, parts={})
    return Score(value=reward, parts={REWARD: Part(value=reward)})
