"""Rules that involve several sections of a job. Each error says what was got and expected."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shared.errors import BadRequest
from shared.job.data import MAX_GENERATED, REASONING_GYM, ReasoningGymSpec
from shared.job.learning import MAX_SERVED_RANK
from shared.job.running import SYNC_METHODS, CheckpointSpec
from shared.job.sampling import MAX_KEPT

if TYPE_CHECKING:
    from shared.job.job import Job

MAX_COMPLETIONS = 1 << 20
"""Completions of a step: its groups are in the orchestrator's memory at once."""


def check(job: Job) -> None:
    """Raises ValueError for the first fault."""
    _check_length(job)
    _check_completions(job)
    _check_data(job)
    _check_generated(job)
    _check_metrics(job)
    _check_rewards(job)
    _check_sync(job)
    _check_truncated_sampling(job)
    _check_environment(job)
    _check_credit(job)
    _check_keep_prefixes(job)
    _check_pushed(job)
    _check_supervised(job)
    if job.training.min_learning_rate > job.learning_rate:
        raise ValueError(
            f"training.min_learning_rate is {job.training.min_learning_rate:g}, above "
            f"training.learning_rate {job.learning_rate:g}"
        )
    if job.steps and job.warmup.steps >= job.steps:
        raise ValueError(all_warm_up(job))


def check_groups(job: Job) -> None:
    """Raises BadRequest for groups of one. Only a job that trains nothing may have them."""
    alone = job.is_pushed or (job.teacher is not None and not job.rewards)
    alone = alone or job.trains_without_sampling
    if job.trains and job.sampling.group_size == 1 and not alone:
        raise BadRequest(
            "sampling.group_size is 1: a single completion has nothing to be compared with; "
            "expected 2 or more"
        )


def _check_environment(job: Job) -> None:
    if job.environment is None:
        if any(reward.grader == "environment" for reward in job.rewards):
            raise ValueError(
                'a reward has grader "environment", and the job has no [environment]; expected both'
            )
        return
    if job.sampling.overlong_prompts == "truncate":
        raise ValueError(
            'sampling.overlong_prompts is "truncate", and a job with [environment] has '
            'conversations, which lose no first tokens; expected "error" or "drop"'
        )


def _check_credit(job: Job) -> None:
    credit = job.advantages.credit
    got = f'advantages.credit is "{credit}"'
    if job.teacher is not None:
        _check_token_ratio(job, f"the job has a teacher, {job.teacher.model!r}")
    if credit == "episode":
        if job.advantages.turn_discount != 1:
            raise ValueError(
                f"advantages.turn_discount is {job.advantages.turn_discount:g} and "
                'advantages.credit "episode", which credits all turns with the same; expected '
                'credit "returns" or "turns", or turn_discount = 1'
            )
        return
    _check_token_ratio(job, got)
    if job.environment is None:
        raise ValueError(
            f"{got} and the job has no [environment], so a rollout has one turn; expected credit "
            '"episode", or an [environment]'
        )
    if not job.rewards:
        raise ValueError(
            f"{got} and there are no [[rewards]], and a teacher rewards each token alone; "
            'expected credit "episode", or [[rewards]]'
        )
    if job.advantages.combine != "sum_then_normalize":
        raise ValueError(
            f'{got} and advantages.combine "{job.advantages.combine}", which normalizes each '
            'reward of an episode; expected combine "sum_then_normalize"'
        )


def _check_token_ratio(job: Job, got: str) -> None:
    training = job.training
    if training.ratio_of == "sequence":
        raise ValueError(
            f"{got}, so tokens of one sequence have different advantages, and training.loss is "
            f'"{training.loss}" with importance "{training.importance}", whose ratio is of the '
            'sequence and would average them; expected a loss other than "gspo" and importance '
            '"token"'
        )


def _check_keep_prefixes(job: Job) -> None:
    if not job.sampling.keep_prefixes:
        return
    if job.max_staleness == 0:
        raise ValueError(
            "sampling.keep_prefixes is true and max_staleness 0: nothing is under way when new "
            "weights arrive; expected max_staleness of 1 or more"
        )
    if job.lora and job.weight_sync in ("auto", "lora"):
        raise ValueError(
            "sampling.keep_prefixes is true, lora is set and weight_sync is "
            f"{job.weight_sync!r}: prefixes cached for one adapter cannot be used by another; "
            "expected a weight_sync that merges the adapter, or keep_prefixes = false"
        )


def _check_pushed(job: Job) -> None:
    """Checks a job of kind "pushed": its groups come with their rewards, so `[[rewards]]` are only
    for held-out problems, and the keys that order training problems may not be set."""
    if not job.is_pushed:
        return
    unused = {
        "data.train": job.data.train is not None,
        "data.epochs": job.data.epochs is not None,
        "difficulty": job.difficulty.skips,
        "teacher": job.teacher is not None,
        "advantages.credit": job.advantages.credit != "episode",
        'advantages.combine = "normalize_then_sum"': job.advantages.combine != "sum_then_normalize",
    }
    for key in (key for key, is_set in unused.items() if is_set):
        raise ValueError(
            f'{key} is set and environment.kind is "pushed", whose groups come with their prompts '
            f"and one reward for each completion; expected none"
        )
    own = [reward.label for reward in job.rewards if reward.grader != "environment"]
    if job.evaluates and len(own) < len(job.rewards):
        raise ValueError(
            'there are held-out problems and environment.kind is "pushed", which grades none of '
            'them; expected [[rewards]] other than grader "environment"'
        )
    if own and not job.evaluates:
        raise ValueError(
            f'a reward {own[0]!r} is set and environment.kind is "pushed", whose groups come with '
            "their rewards; expected [[rewards]] only with held-out problems"
        )


def _check_supervised(job: Job) -> None:
    """Checks that supervised steps have answers, and no keys for sampled completions."""
    training, warms_up = job.training, job.warmup.steps > 0
    if training.objective != "sft" and not warms_up:
        unused = {
            "data.answer": job.data.answer is not None,
            "training.train_on": training.train_on == "all",
        }
        for key in (key for key, is_set in unused.items() if is_set):
            raise ValueError(
                f"{key} is set, and no step learns one answer to each prompt; expected "
                'training.objective "sft", or warmup.steps of 1 or more'
            )
    if training.start_optimizer and training.start_from is None:
        raise ValueError(
            "training.start_optimizer is true and there is no training.start_from; expected the "
            "checkpoint whose optimizer state is loaded"
        )
    default = type(training).model_fields["dpo_beta"].default
    if training.objective != "dpo" and training.dpo_beta != default:
        raise ValueError(
            f"training.dpo_beta is {training.dpo_beta:g} and training.objective "
            f'"{training.objective}"; expected it with "dpo" only'
        )
    if not warms_up and job.warmup.learning_rate is not None:
        raise ValueError(
            f"warmup.learning_rate is {job.warmup.learning_rate:g} and warmup.steps 0; expected "
            "warmup.steps of 1 or more with it"
        )
    if not job.trains_without_sampling and not warms_up:
        return
    got = f"warmup.steps is {job.warmup.steps}"
    if job.trains_without_sampling:
        got = f'training.objective is "{training.objective}"'
    if job.environment is not None:
        raise ValueError(
            f"{got} and the job has an [environment], which cannot replay answers of the data; "
            "expected none"
        )
    if not job.trains_without_sampling:
        return
    if job.is_program and (job.data.train is not None or job.evaluates):
        raise ValueError(
            f"{got} and there is data; expected none: the program sends what is trained on"
        )
    unused = {
        "warmup.steps": warms_up,
        "teacher": job.teacher is not None,
        "difficulty": job.difficulty.skips,
        "training.beta": training.beta > 0,
    }
    for key in (key for key, is_set in unused.items() if is_set):
        raise ValueError(f"{got} and {key} is set, which is for sampled completions; expected none")
    if training.objective == "dpo" and training.epochs * training.minibatches > 1:
        raise ValueError(
            f"{got}, training.epochs {training.epochs} and training.minibatches "
            f"{training.minibatches}; expected 1 of each: preferences are of the weights before "
            "the optimizer step"
        )
    if not job.rewards and job.stop.target is not None:
        raise ValueError(
            f"{got}, stop.target is {job.stop.target:g} and there are no [[rewards]]; expected "
            "[[rewards]] that grade completions of the held-out problems"
        )
    if job.rewards and not job.evaluates:
        raise ValueError(
            f"{got} and there is a reward {job.rewards[0].label!r}, and no held-out problems; "
            "expected [[rewards]] only with data.eval or evaluation.sets: nothing else is graded"
        )


def all_warm_up(job: Job) -> str:
    """Returns the sentence about a job whose warm-up does not end before the job does."""
    return (
        f"warmup.steps is {job.warmup.steps} and steps {job.steps}; expected fewer than steps, "
        'or training.objective "sft" for supervised steps alone'
    )


def _check_length(job: Job) -> None:
    if "steps" not in job.model_fields_set and job.data.epochs is None:
        raise ValueError("neither steps nor data.epochs is set; expected one of them")
    if job.data.epochs is not None and job.data.streaming:
        raise ValueError(
            f"data.epochs is {job.data.epochs:g} and data.streaming true; how many rows a stream "
            "has is not known, so expected steps in place of data.epochs"
        )
    if job.difficulty.skips and job.data.streaming:
        raise ValueError(
            "difficulty skips problems and data.streaming is true; a stream is not read by row "
            "number, so expected data.streaming = false"
        )


def _check_generated(job: Job) -> None:
    """Checks generated problems: a shuffle or a second pass would undo the order of levels."""
    data = job.data
    sources = (data.train, data.eval, *(each.source for each in job.evaluation.sets.values()))
    named = [one for one in sources if isinstance(one, str) and one.startswith(REASONING_GYM)]
    if not named and data.reasoning_gym != ReasoningGymSpec():
        raise ValueError(
            f"data.reasoning_gym is set and no source is generated; expected data.train = "
            f'"{REASONING_GYM}TASK"'
        )
    given = data.reasoning_gym
    if not given.levels or data.train not in named or not job.trains:
        return
    if data.shuffle:
        raise ValueError(
            f"data.reasoning_gym.levels is {list(given.levels)}, which sorts problems from easy to "
            "hard, and data.shuffle is true; expected data.shuffle = false"
        )
    taken = job.steps * job.sampling.prompts_per_step
    if data.epochs is None and taken > given.size:
        raise ValueError(
            f"data.reasoning_gym.size is {given.size} with levels, and {job.steps} steps take "
            f"{taken} problems: a second pass would begin with the easiest again; expected a size "
            f"of at least {taken}, at most {MAX_GENERATED}, or fewer steps"
        )


def _check_completions(job: Job) -> None:
    sampling = job.sampling
    count = sampling.prompts_per_step * sampling.group_size
    if count > MAX_COMPLETIONS:
        raise ValueError(
            f"sampling.prompts_per_step is {sampling.prompts_per_step} and sampling.group_size "
            f"{sampling.group_size}: {count} completions in a step; expected at most "
            f"{MAX_COMPLETIONS}"
        )


def _check_data(job: Job) -> None:
    if job.trains and job.data.train is None and not (job.is_pushed or job.is_program):
        raise ValueError("'data.train' is missing; expected the training problems")
    if job.trains and job.evaluation.models:
        raise ValueError(
            f"evaluation.models names {len(job.evaluation.models)} model(s) and the job trains; "
            "expected none, or steps = 0: only a job that trains nothing compares models"
        )
    if not job.trains and not job.evaluates:
        raise ValueError(
            "steps is 0, so the job only evaluates, and there are no held-out problems; expected "
            "data.eval, or evaluation.sets, or steps from 1 on"
        )


def _check_metrics(job: Job) -> None:
    if job.stop.target is not None and not job.evaluates:
        raise ValueError(
            f"stop.target is {job.stop.target:g} and there are no held-out problems; expected "
            "data.eval, or evaluation.sets"
        )
    if job.stop.target is not None:
        _check_metric(job, "stop.metric", job.stop.metric)
    best = job.checkpoints.keep_best
    if best not in (None, CheckpointSpec().keep_best) and job.evaluates:
        _check_metric(job, "checkpoints.keep_best", best)


def _check_metric(job: Job, key: str, metric: str) -> None:
    sets = [*([""] if job.data.eval is not None else []), *job.evaluation.sets]
    prefixes = [f"{name}/" if name else "" for name in sets]
    known = {prefix + each for prefix in prefixes for each in _measured(job)}
    if metric not in known:
        raise ValueError(
            f"{key} is {metric!r}; expected one of {', '.join(map(repr, sorted(known)))}"
        )


def _measured(job: Job) -> list[str]:
    """Returns the metrics of a held-out set for which more is better."""
    samples = job.evaluation.samples
    passes = {*(2**power for power in range(samples.bit_length())), samples}
    return [
        "reward",
        *(f"pass@{k}" for k in sorted(passes)),
        *(f"rewards/{reward.label}/mean" for reward in job.rewards),
    ]


def _check_rewards(job: Job) -> None:
    needs_none = bool(job.rewards) or (job.trains_without_sampling and job.trains)
    if not needs_none and job.teacher is None:
        raise ValueError("'rewards': got []; expected at least 1 in the list, or a [teacher]")
    if not needs_none and job.evaluates:
        raise ValueError(
            "rewards is empty, and there are held-out problems, whose answers a [teacher] does not "
            "grade; expected [[rewards]], with weight = 0 if only the teacher is to train"
        )
    labels = [reward.label for reward in job.rewards] + ["teacher"] * (job.teacher is not None)
    twice = sorted(label for label, times in Counter(labels).items() if times > 1)
    if twice:
        raise ValueError(
            f'two rewards are called {twice[0]!r}; give one of them another name = "..."'
        )


def _check_sync(job: Job) -> None:
    if SYNC_METHODS[job.weight_sync].ends_requests and job.max_staleness:
        raise ValueError(
            f'weight_sync is "{job.weight_sync}", which ends requests under way, and '
            f"max_staleness is {job.max_staleness}, expected 0"
        )
    if SYNC_METHODS[job.weight_sync].is_live and not job.has_live_weights:
        why = "lora is set" if job.lora else "memory.zero_stage is 3"
        raise ValueError(
            f'weight_sync is "{job.weight_sync}", which reads weights where they are trained, '
            f'and {why}: they are not whole there; expected "shm", "disk", "http" or "delta"'
        )
    if job.weight_sync == "lora" and job.lora is None:
        raise ValueError(
            'weight_sync is "lora" and the job has no [lora], so there is no adapter to sync; '
            'expected [lora], or weight_sync = "auto"'
        )
    if job.weight_sync == "lora" and job.lora and job.lora.rank > MAX_SERVED_RANK:
        raise ValueError(
            f'weight_sync is "lora" and lora.rank {job.lora.rank}, expected at most '
            f'{MAX_SERVED_RANK}, the largest that vLLM serves; "auto" merges larger ones'
        )
    if job.sync_every > job.max_staleness + 1:
        raise ValueError(
            f"sync_every is {job.sync_every} and max_staleness {job.max_staleness}; expected "
            f"sync_every up to {job.max_staleness + 1}: a step may not be sampled by older "
            "weights"
        )


def _check_truncated_sampling(job: Job) -> None:
    top_p, top_k, min_p = job.sampling.top_p, job.sampling.top_k, job.sampling.min_p
    if job.needs_masks and not 1 <= top_k <= MAX_KEPT:
        raise ValueError(
            f"sampling.top_p is {top_p:g}, sampling.min_p {min_p:g} and sampling.top_k "
            f"{top_k}, expected a top_k from 1 to {MAX_KEPT} with them: the sampler returns "
            "the tokens that each token could have been, so that the trainer trains the sampled "
            "distribution, and top_k bounds their number. To train without these, "
            'set correction.truncated_sampling = "accept"'
        )
