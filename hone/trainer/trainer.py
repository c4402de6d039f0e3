"""READ FIRST. `hone.Trainer`: a job from a script or notebook, by the names that people use for
GRPO.

    trainer = hone.Trainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=[right, brief],
        train_dataset=rows,
        num_generations=8,
        max_steps=100,
    )
    trainer.train()

The constructor makes the job and refuses what is wrong, without a stack. `train` starts or finds
the stack (modes.py), uploads the rows (dataset.py), submits, and follows (run.py). Rewards become
source text (source.py, rewards.py), parameters the job's keys (parameters.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from hone.trainer import parameters
from hone.trainer.dataset import Problems, problems
from hone.trainer.modes import Local, Mode
from hone.trainer.rewards import environment_of, packages_of, rewards_of
from hone.trainer.run import Run, TrainOutput
from hone.trainer.simple import Simple, SimpleRun
from shared.errors import BadRequest
from shared.explain import elide
from shared.job import Job, name_of
from shared.job.checks import check_groups
from shared.job.file import load_job, make_job

EPOCHS = 3.0
"""Passes over the rows if nothing says how long to train, as in TRL."""


class Trainer:
    """Trains `model` by GRPO on `train_dataset` for `reward_funcs`, where `mode` says.

    With `environment` rollouts are conversations: a class with `reset` and tools, as TRL's
    `environment_factory`, a dict of such classes by the row's `environment`, or the table of a job.
    Its `get_reward` is a reward beside `reward_funcs`. `tools` are functions in place of a class.
    `args` is a whole `trl.GRPOConfig`, `peft_config` a `peft.LoraConfig`; `recipe` are parameters
    by the names of docs/trainer.md, or the job's own keys and sections. They go over `args`. Raises
    BadRequest with a sentence for each fault.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        reward_weights: Sequence[float] | None = None,
        mode: Mode | None = None,
        peft_config: Any = None,
        processing_class: Any = None,
        output_dir: str | Path | None = None,
        environment: Any = None,
        environment_factory: Any = None,
        tools: Any = None,
        **recipe: Any,
    ) -> None:
        given = {} if args is None else parameters.explicit_parameters(args)
        translation = parameters.translate(given | {"peft_config": peft_config} | recipe)
        parameters.check(translation, "Trainer")
        sources = {
            key: problems(dataset, f"{key}_dataset")
            for key, dataset in (("train", train_dataset), ("eval", eval_dataset))
            if dataset is not None
        }
        document = translation.job
        document["model"] = _model(model, processing_class)
        played = environment_of(tools, environment_factory if environment is None else environment)
        if played is not None:
            document["environment"] = played.table
        if reward_funcs is not None or not ((played and played.rewards) or "rewards" in document):
            own = getattr(args, "reward_weights", None)
            weights = own if reward_weights is None else reward_weights
            document["rewards"] = rewards_of(reward_funcs, weights)
        if played is not None and played.rewards:
            document["rewards"] = [*document.get("rewards", ()), {"grader": "environment"}]
        if not isinstance(given := document.get("data", {}), dict):
            raise BadRequest(
                f'data is {elide(given)}; expected a dict such as {{"config": "main"}}'
            )
        data: dict[str, Any] = {**given, **{key: found.source for key, found in sources.items()}}
        document["data"] = data
        if not document.get("steps") and "epochs" not in data and data.get("train") is not None:
            data["epochs"] = EPOCHS
        folder = _folder(output_dir)
        document.setdefault("name", _name(getattr(args, "output_dir", None) or output_dir, model))
        job = make_job(document, (), "Trainer")
        check_groups(job)
        self._assign(job, mode, sources, packages_of(reward_funcs))
        self.output_dir = folder

    def _assign(
        self,
        job: Job,
        mode: Mode | None,
        sources: Mapping[str, Problems],
        packages: tuple[str, ...] = (),
    ) -> None:
        self.job = job
        self.mode = _checked(Local() if mode is None else mode)
        self.mode.check(job)
        self.output_dir: Path | None = None
        self.run: Run | SimpleRun | None = None
        self._sources = sources
        self._packages = packages

    @classmethod
    def of_job(cls, job: Job, mode: Mode | None = None) -> Trainer:
        """Returns the Trainer of an existing job."""
        trainer = cls.__new__(cls)
        trainer._assign(job, mode, {})
        return trainer

    @overload
    def train(self, *, detach: Literal[True]) -> Run | SimpleRun: ...
    @overload
    def train(self, *, detach: Literal[False] = False) -> TrainOutput: ...

    def train(self, *, detach: bool = False) -> TrainOutput | Run | SimpleRun:
        """Trains, shows progress, and returns what training came to; with `detach` returns the
        submitted job at once. Ctrl-C raises Detached and leaves the job running; in the mode Simple
        it ends the run."""
        self.run = self.submit()
        if detach:
            return self.run
        output = self.run.follow()
        if self.output_dir is not None:
            self.save_model(self.output_dir)
        return output

    def submit(self) -> Run | SimpleRun:
        """Returns the job once the orchestrator has accepted it; in the mode Simple, once its
        process has begun."""
        if isinstance(self.mode, Simple):
            return self.mode.start(self.job, self._sources)
        address = self.mode.stack(self._packages)
        with address.connect() as client:
            changes = {
                key: source.uploaded(client)
                for key, source in self._sources.items()
                if source.lines or (source.path and not address.shares_files)
            }
            data = self.job.data.model_copy(update=changes)
            job = self.job.model_copy(update={"data": data})
            return Run(
                client.submit(job).id, address
            )  # withdrawn if Ctrl-C comes before the answer

    def save_model(self, folder: str | Path) -> Path:
        """Downloads the newest checkpoint of the job, as `transformers` loads it, into `folder`."""
        if self.run is None:
            raise BadRequest("nothing is trained yet; expected train() before save_model()")
        return self.run.checkpoint(folder)

    def to_toml(self, path: str | Path | None = None) -> str:
        """Returns the job as the text of a job file, and writes it to `path`, with its rows beside
        it. Without `path` rows are in the text; BadRequest if they are too many for a job."""
        import tomli_w

        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise BadRequest(f"{elide(str(path))} cannot be written; expected a file in a folder")
        document = self.job.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        for key, source in self._sources.items():
            if path is not None:
                document["data"][key] = source.saved(Path(path).with_suffix(f".{key}.jsonl"))
            elif source.lines:
                raise BadRequest(
                    f"the rows of data.{key} are too many for a job file; expected a path, to "
                    "write them beside it"
                )
        text = tomli_w.dumps(document, multiline_strings=True)
        if path is not None:
            Path(path).write_text(text)
        return text


def from_toml(path: str | Path, *, mode: Mode | None = None) -> Trainer:
    """Returns a Trainer of the job in the file `path`."""
    return Trainer.of_job(load_job(path), mode)


def _checked(mode: Any) -> Mode:
    if isinstance(mode, Mode):
        return mode
    hint = f"{mode.__name__}(...), with its arguments" if isinstance(mode, type) else "hone.Local()"
    raise BadRequest(
        f"mode is {elide(mode)}; expected {hint}: one of Local(), Remote(url), SingleNode(gpu), "
        "Distributed(actor, rollout), Simple()"
    )


def _model(model: Any, processing_class: Any) -> str:
    if not isinstance(model, str | Path) or not str(model):
        raise BadRequest(
            f"model is {elide(model)}; expected a folder in Hugging Face format or a name of the "
            "Hub: save a model in memory by its save_pretrained first"
        )
    own = getattr(processing_class, "name_or_path", None)
    if processing_class is not None and own != str(model):
        raise BadRequest(
            f"processing_class is {elide(own or processing_class)}; expected the tokenizer of "
            f"{str(model)!r}, which the job takes automatically"
        )
    return str(model)


def _folder(output_dir: Any) -> Path | None:
    if output_dir is None:
        return None
    if not isinstance(output_dir, str | Path) or Path(output_dir).is_file():
        raise BadRequest(f"output_dir is {elide(output_dir)}; expected a folder, or one to be made")
    return Path(output_dir)


def _name(output_dir: Any, model: Any) -> str:
    """Returns a job's name made of the output folder's, else of the model's."""
    base = Path(str(output_dir)).name if output_dir else f"{Path(str(model)).name}-grpo"
    return name_of(base, "grpo")
