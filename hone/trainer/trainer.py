"""`hone.Trainer`: a job from a script or notebook, by the names that people use for GRPO. READ FIRST.

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

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, overload

from hone.trainer import parameters
from hone.trainer.dataset import problems
from hone.trainer.modes import Local, Mode
from hone.trainer.rewards import rewards_of
from hone.trainer.run import Run, TrainOutput
from shared.errors import BadRequest
from shared.explain import shown
from shared.job import Job
from shared.job.file import load_job, make_job
from shared.rewards import Reward

EPOCHS = 3.0
"""Passes over the rows if nothing says how long to train, as in TRL."""

MAX_NAME = 40
"""Most characters of a job's name."""


class Trainer:
    """Trains `model` by GRPO on `train_dataset` for `reward_funcs`, where `mode` says.

    `args` is a whole `trl.GRPOConfig`, `peft_config` a `peft.LoraConfig`; `recipe` are parameters by
    the names of docs/trainer.md, or the job's own keys and sections. They go over `args`. Raises
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
        **recipe: Any,
    ) -> None:
        self.mode = mode or Local()
        _check_mode(self.mode)
        self.output_dir = None if output_dir is None else Path(output_dir)
        given = {} if args is None else parameters.given_by(args)
        weights = reward_weights or getattr(args, "reward_weights", None)
        translation = parameters.translate(given | {"peft_config": peft_config} | recipe)
        parameters.check(translation, "Trainer")
        self.ignored = translation.ignored
        self._packages = _packages(reward_funcs)
        self._train = None if train_dataset is None else problems(train_dataset, "train_dataset")
        self._eval = None if eval_dataset is None else problems(eval_dataset, "eval_dataset")
        document = translation.job
        document["model"] = _model(model, processing_class)
        if reward_funcs is not None or "rewards" not in document:
            document["rewards"] = rewards_of(reward_funcs, weights)
        data = document.setdefault("data", {})
        for key, source in (("train", self._train), ("eval", self._eval)):
            if source is not None:
                data[key] = source.source
        if not document.get("steps") and "epochs" not in data and data.get("train") is not None:
            data["epochs"] = EPOCHS
        document.setdefault("name", _name(getattr(args, "output_dir", None) or output_dir, model))
        self.job: Job = make_job(document, (), "Trainer")
        self.run: Run | None = None

    @overload
    def train(self, *, detach: Literal[True]) -> Run: ...
    @overload
    def train(self, *, detach: Literal[False] = False) -> TrainOutput: ...

    def train(self, *, detach: bool = False) -> TrainOutput | Run:
        """Trains, shows progress, and returns what training came to; with `detach` returns the
        submitted job at once. Ctrl-C raises Detached and leaves the job running."""
        self.run = self.submit()
        if detach:
            return self.run
        output = self.run.follow()
        if self.output_dir is not None:
            self.save_model(self.output_dir)
        return output

    def submit(self) -> Run:
        """Returns the job once the orchestrator has accepted it."""
        address = self.mode.stack(self._packages)
        with address.connect() as client:
            changes = {
                key: source.uploaded(client)
                for key, source in (("train", self._train), ("eval", self._eval))
                if source is not None and not (source.path and address.shares_files)
            }
            data = self.job.data.model_copy(update=changes)
            job = self.job.model_copy(update={"data": data})
            return Run(client.submit(job, key=secrets.token_hex(12)).id, address)

    def save_model(self, folder: str | Path) -> Path:
        """Downloads the newest checkpoint of the job, as `transformers` loads it, into `folder`."""
        if self.run is None:
            raise BadRequest("nothing is trained yet; expected train() before save_model()")
        return self.run.checkpoint(folder)

    def to_toml(self, path: str | Path | None = None) -> str:
        """Returns the job as the text of a job file, and writes it to `path`. Rows that are too many
        for a job are written beside it; without `path` they raise BadRequest."""
        import tomli_w

        document = self.job.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        data = document["data"]
        for key, source in (("train", self._train), ("eval", self._eval)):
            if source is None or source.file is None:
                continue
            if path is None:
                raise BadRequest(
                    f"the rows of data.{key} are too many for a job file; expected a path, to "
                    "write them beside it"
                )
            data[key] = source.saved(Path(path).with_suffix(f".{key}.jsonl"))
        text = tomli_w.dumps(document, multiline_strings=True)
        if path is not None:
            Path(path).write_text(text)
        return text


def from_toml(path: str | Path, *, mode: Mode | None = None) -> Trainer:
    """Returns a Trainer of the job in the file `path`."""
    job = load_job(path)
    sections = {name: getattr(job, name) for name in job.model_fields_set}
    trainer = Trainer.__new__(Trainer)
    trainer.__dict__ |= {
        "mode": mode or Local(),
        "job": job,
        "run": None,
        "output_dir": None,
        "ignored": {},
        "_packages": (),
        "_train": None,
        "_eval": None,
    }
    return trainer if sections else trainer


def _check_mode(mode: Any) -> None:
    if not isinstance(mode, Mode):
        hint = "()" if isinstance(mode, type) and issubclass(mode, Mode) else ""
        raise BadRequest(
            f"mode is {shown(mode)}; expected hone.Local(), hone.Remote(url), hone.SingleNode(gpu) "
            f"or hone.Distributed(actor, rollout){' with its parentheses' if hint else ''}"
        )


def _model(model: Any, processing_class: Any) -> str:
    if not isinstance(model, str | Path) or not str(model):
        raise BadRequest(
            f"model is {shown(model)}; expected a folder in Hugging Face format or a name of the "
            "Hub: save a model in memory by its save_pretrained first"
        )
    own = getattr(processing_class, "name_or_path", None)
    if processing_class is not None and own != str(model):
        raise BadRequest(
            f"processing_class is {shown(own or processing_class)}; expected the tokenizer of "
            f"{str(model)!r}, which the job takes by itself"
        )
    return str(model)


def _packages(reward_funcs: Any) -> tuple[str, ...]:
    """Returns the packages that the rewards want in the sandbox."""
    several = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    found = [
        each.sandbox.packages for each in cast(Sequence[Any], several) if isinstance(each, Reward)
    ]
    return tuple(dict.fromkeys(package for packages in found for package in packages))


def _name(output_dir: Any, model: Any) -> str:
    """Returns a job's name made of the output folder's, else of the model's."""
    base = Path(str(output_dir)).name if output_dir else f"{Path(str(model)).name}-grpo"
    slug = re.sub(r"[^a-z0-9_-]+", "-", base.lower()).strip("-_")[:MAX_NAME]
    return slug or "grpo"
