"""Finds models and starts vLLM for them. The event loop does not wait for it, and vLLM is imported
only when it is needed."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from services.rollout.engine import Engine
from services.rollout.on_vllm.processes import (
    TemporaryFolder,
    root_cause,
    set_environment,
    stage_of,
    stop_children,
)
from shared.errors import BadRequest, Failed
from shared.host.processes import in_own_thread
from shared.settings import Settings
from shared.weights.folders import stored_tensors
from shared.weights.model_folder import check_hub, model_folder
from shared.wire import EngineSpec, Sampling

if TYPE_CHECKING:
    from services.rollout.on_vllm.engine import VllmEngine


class VllmStarter:
    """Starts engines. Must exist before anything imports vLLM: vLLM reads its environment at
    import."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = TemporaryFolder()
        self._errors, self._progress = set_environment(self._folder.make())

    async def preload(self) -> None:
        """Imports vLLM, so that the first engine starts in half the time. Raises Failed if it
        cannot be imported."""
        try:
            await in_own_thread(lambda: importlib.import_module("services.rollout.on_vllm.engine"))
        except ImportError as error:
            raise Failed(f"vLLM cannot be imported: {error}") from error

    async def find_model(self, spec: EngineSpec) -> Path:
        """Returns the folder of the model's config.json. Raises BadRequest if there is no such
        model."""
        folder = model_folder(spec.model)
        return folder or await in_own_thread(lambda: _hub_folder(spec))

    async def start(self, spec: EngineSpec, folder: Path) -> Engine:
        """Returns a started engine. Raises Failed with the first error of any of its processes."""
        self._errors.unlink(missing_ok=True)
        self._progress.unlink(missing_ok=True)
        try:
            engine = await in_own_thread(lambda: self._start(spec, folder))
            await engine.find_gpus()
            # A model it cannot run fails here, not in a job's step.
            await engine.sample([0], Sampling(max_tokens=1), owner="", salt="")
            return engine
        except (BadRequest, asyncio.CancelledError):
            stop_children()
            raise
        except ValidationError as error:
            faults = "; ".join(
                fault["msg"].removeprefix("Value error, ") for fault in error.errors()
            )
            raise BadRequest(
                f"vLLM refuses to serve {spec.model!r} with max_model_len "
                f"{spec.max_model_len or 'of the model'} and dtype {spec.dtype}: {faults}"
            ) from error
        except Exception as error:  # vLLM, torch and the model's own code raise of any class
            stop_children()
            cause = (
                root_cause(self._errors)
                or f"{type(error).__name__}: {' '.join(str(error).split())}"
            )
            raise Failed(f"the engine for {spec.model!r} did not start: {cause}") from error

    def stage(self) -> str | None:
        return stage_of(self._progress)

    def close(self) -> None:
        stop_children()
        self._folder.remove()

    def _start(self, spec: EngineSpec, folder: Path) -> VllmEngine:
        from services.rollout.on_vllm.engine import VllmEngine

        engine = VllmEngine(spec, folder, self._settings, self._errors)
        if not stored_tensors(folder):
            engine.shut_down()
            raise BadRequest(
                f"model {spec.model!r} has no *.safetensors files, which weight sync compares "
                "against"
            )
        return engine


def _hub_folder(spec: EngineSpec) -> Path:
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(spec.model, "config.json", revision=spec.revision)
    except OSError as error:
        check_hub(spec.model)
        raise BadRequest(
            f"'model': got {spec.model!r}, no folder here and no model on the hub: "
            f"{' '.join(str(error).split())}"
        ) from error
    assert config is not None
    return Path(config).parent
