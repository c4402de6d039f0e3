"""Calls every public method of the clients of Tinker's SDK, and prints as JSON what each gave:
"works", or the sentence of its error. An asynchronous twin is called as the method is. A method
that `calls` lacks is told as "not called", so that a newer SDK's are noticed; one that is called
twice, as "again"."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState

Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""A method's name, the client, and the arguments."""

CLASSES = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)


def data(**inputs: list[float]) -> list[types.Datum]:
    given = {name: np.array(values, np.float32) for name, values in inputs.items()}
    targets = {"target_tokens": np.array([6, 7])}
    read = types.ModelInput.from_ints([5, 6])
    return [types.Datum(model_input=read, loss_fn_inputs={**targets, **given})]


def negative_log_likelihood(data: Any, logprobs: Any) -> Any:
    loss = -logprobs[0].sum()
    return loss, {"nll": loss.item()}


def calls(base_model: str) -> Iterator[Call]:
    """Yields the calls, those that end something last."""
    service, rest, admin = tinker.ServiceClient(), tinker.RestClient(), tinker.AdminClient()
    yield "get_console_url", service, (), {}
    yield "get_telemetry", service, (), {}
    yield "get_server_capabilities", service, (), {}
    yield "create_rest_client", service, (), {}
    yield "create_lora_training_client", service, (base_model,), {"rank": 4}
    training = service.create_lora_training_client(base_model, rank=4).result()
    yield from training_calls(service, training)
    weights = training.save_state("end").result().path
    snapshot = training.save_weights_for_sampler("shot").result().path
    yield "create_training_client_from_state", service, (weights,), {}
    yield "create_training_client_from_state_with_optimizer", service, (weights,), {}
    yield "create_sampling_client", service, (), {"base_model": base_model}
    handle = yield from sampling_calls(service, snapshot)
    yield "delete_checkpoint_from_tinker_path", tinker.RestClient(), (weights,), {}
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    weights = training.save_state("last").result().path  # no model begins with this one
    export = training.save_weights_external("export").result().path
    yield "copy_weights", service, (weights,), {}
    ranks: dict[str, Any] = {"logprobs": 1, "weights": 1}
    yield "create_custom_loss", service, (weighted, ranks), {}
    model = weights.split("/")[2]
    session = service.holder.get_session_id()
    yield from rest_calls(rest, model, weights, export, session, handle)
    yield "get_audit_log", admin, (), {}
    yield "get_billing_usage", admin, ("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z"), {}
    yield "get_current_checkpoint_storage_usage", admin, (), {}
    yield "get_telemetry", admin, (), {}
    yield "close", service, ("success",), {}


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def training_calls(service: Any, training: Any) -> Iterator[Call]:
    one = data(weights=[0, 1])
    yield "get_console_url", training, (), {}
    yield "get_telemetry", training, (), {}
    yield "get_info", training, (), {}
    yield "get_tokenizer", training, (), {}
    yield "forward", training, (one, "cross_entropy"), {}
    yield "forward_backward", training, (one, "cross_entropy"), {}
    yield "forward_backward_custom", training, (one, negative_log_likelihood), {}
    yield "optim_step", training, (types.AdamParams(learning_rate=0.1),), {}
    yield "save_state", training, ("one",), {"ttl_seconds": 60}
    yield "save_weights_for_sampler", training, ("first",), {}
    yield "save_weights_external", training, ("out",), {}
    yield "save_weights_and_get_sampling_client", training, (), {"record_stability_info": True}
    path = training.save_weights_for_sampler("second").result().path
    yield "create_sampling_client", training, (path,), {}
    path = training.save_state("loaded").result().path
    yield "load_state", training, (path,), {}
    yield "load_state_with_optimizer", training, (path,), {}


def sampling_calls(service: Any, snapshot: str) -> Any:
    """Returns a session of samples."""
    sampling = service.create_sampling_client(snapshot, record_stability_info=True).result()
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=4)
    yield "sample", sampling, (prompt, 2, params), {}
    yield "compute_logprobs", sampling, (prompt,), {}
    yield "get_tokenizer", sampling, (), {}
    yield "get_base_model", sampling, (), {}
    yield "get_telemetry", sampling, (), {}
    yield "get_sampler_handle", sampling, (), {}
    yield "from_sampler_handle", sampling, (sampling.get_sampler_handle(),), {}
    yield "on_queue_state_change", sampling, (QueueState.ACTIVE, None), {}
    yield "create", sampling, (service.holder,), {"model_path": snapshot}
    return sampling._sampling_session_id


def rest_calls(
    rest: Any, model: str, weights: str, export: str, session: str, sampler: str
) -> Iterator[Call]:
    yield "get_telemetry", rest, (), {}
    yield "get_server_capabilities", rest, (), {}
    yield "whoami", rest, (), {}
    yield "list_training_runs", rest, (), {"access_scope": "accessible"}
    yield "get_training_run", rest, (model,), {}
    yield "get_training_run_by_tinker_path", rest, (weights,), {}
    yield "get_weights_info_by_tinker_path", rest, (weights,), {}
    yield "list_checkpoints", rest, (model,), {}
    yield "list_user_checkpoints", rest, (), {}
    out = export.split("/", 3)[3]
    yield "get_external_weights_urls", rest, (export,), {}
    yield "set_checkpoint_ttl_from_tinker_path", rest, (weights, 60), {}
    yield "publish_checkpoint_from_tinker_path", rest, (weights,), {}
    yield "unpublish_checkpoint_from_tinker_path", rest, (weights,), {}
    yield "copy_weights", rest, (weights, "project"), {}
    yield "list_sessions", rest, (), {}
    yield "get_session", rest, (session,), {}
    request = types.SessionSearchRequest(display_name="nightly")
    yield "search_sessions", rest, (request,), {}
    yield "assign_session_project", rest, (session, "project"), {}
    yield "export_session_trace", rest, (session,), {}
    yield "get_sampler", rest, (sampler,), {}
    yield "get_audit_log", rest, (), {}
    yield "get_billing_usage", rest, ("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z"), {}
    yield "get_current_checkpoint_storage_usage", rest, (), {}
    yield "delete_checkpoint", rest, (model, out), {}
    yield "delete_checkpoint_from_tinker_path", rest, (weights,), {}


def awaited(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    async def run() -> Any:
        found = await method(*args, **kwargs)
        return await found.result_async() if hasattr(found, "result_async") else found

    return asyncio.run(run())


def told(call: Callable[[], Any]) -> str:
    try:
        found = call()
        if hasattr(found, "result"):
            found.result()
    except Exception as error:  # whatever the SDK raises is what the table is of
        body = getattr(error, "body", None)
        return (body.get("detail") if isinstance(body, dict) else None) or str(error)
    return "works"


def main(base_model: str) -> None:
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for name, client, args, kwargs in calls(base_model):
        for twin in (name, f"{name}_async"):
            if (method := getattr(client, twin, None)) is None:
                continue
            is_async = inspect.iscoroutinefunction(inspect.unwrap(method))
            called = functools.partial(awaited, method) if is_async else method
            outcome = told(functools.partial(called, *args, **kwargs))
            which = f"{type(client).__name__}.{twin}"
            found[f"{which} again" if which in found else which] = outcome
    for kind in CLASSES:
        for name in dir(kind):
            if not name.startswith("_") and callable(getattr(kind, name)):
                found.setdefault(f"{kind.__name__}.{name}", "not called")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
