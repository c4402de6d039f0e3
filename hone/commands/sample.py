"""`hone sample`: what a model answers, by the sampler alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.shell import Output, OutputOption, command, show
from shared.errors import BadRequest, HoneError, NotFound, Unavailable, from_problem

if TYPE_CHECKING:
    import httpx2 as httpx
    from rich.table import Table

    from shared.settings import Settings

ANSWER_S = 600.0
POLICY = "policy"
"""The sampler's name for the weights that serve at present."""


@command
def sample(
    model: Annotated[
        str | None,
        typer.Argument(help="as the sampler calls it (default: the weights that serve)"),
    ] = None,
    prompt: Annotated[str, typer.Option(help="what is asked; - reads it from stdin")] = "-",
    chat: Annotated[
        bool, typer.Option("--chat", help="ask through the model's chat template")
    ] = False,
    system: Annotated[str | None, typer.Option(help="a system message, with --chat")] = None,
    count: Annotated[int, typer.Option("-n", help="how many completions", min=1)] = 1,
    max_tokens: Annotated[int, typer.Option(help="longest completion, in tokens", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy decoding", min=0)] = 1.0,
    output: OutputOption = Output.table,
) -> None:
    """Ask a running sampler for completions of a prompt.

    It needs no other service. Without a sampler of its own URL the orchestrator is asked."""
    if system is not None and not chat:
        raise BadRequest("--system is a message; expected --chat beside it")
    said = sys.stdin.read() if prompt == "-" else prompt
    messages = [{"role": "system", "content": system}] if system is not None else []
    asked: dict[str, Any] = {"n": count, "max_tokens": max_tokens, "temperature": temperature}
    asked |= {"messages": [*messages, {"role": "user", "content": said}]} if chat else {}
    answer = completions(model, asked if chat else asked | {"prompt": said})
    from shared.wire import CallAnswer

    show(output, CallAnswer(answer), lambda: _table(answer))


def completions(model: str | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampler's answer in OpenAI's shape: a chat completion for `messages`. Raises its
    error, and NotFound for a model that it does not serve."""
    from hone import stack
    from shared.http.urls import REGISTERED
    from shared.settings import load_settings

    settings = stack.with_stack_urls(load_settings())
    first = settings.rollout_urls[0]
    url = settings.orchestrator_url if first == REGISTERED else first
    with _client(settings, url) as http:
        served = [each["id"] for each in _called(http, url, "GET", "/v1/models")["data"]]
        if model not in (None, *served) and POLICY in served and first != REGISTERED:
            state = _called(http, url, "GET", "/weights")
            model = POLICY if state.get("job_id") == model else model  # its own weights, no adapter
        name = model or (POLICY if POLICY in served else next(iter(served), POLICY))
        if name not in served:
            names = ", ".join(map(repr, served)) or "none: no job has loaded one yet"
            raise NotFound(
                f"{url} does not serve {name!r}; its models are {names}, where {POLICY!r} is the "
                "weights that serve now"
            )
        route = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        return _called(http, url, "POST", route, asked | {"model": name})


def _client(settings: Settings, url: str) -> httpx.Client:
    import httpx2 as httpx

    from shared.http.connecting import client_options

    timeout = httpx.Timeout(ANSWER_S, connect=5.0)
    return httpx.Client(**client_options(url, settings.bearer()), timeout=timeout)


def _called(
    http: httpx.Client, url: str, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    import httpx2 as httpx

    try:
        answer = http.request(method, path, json=body)
        document: dict[str, Any] = answer.json()
    except httpx.RequestError as error:
        raise Unavailable(
            f"no sampler answers at {url} ({type(error).__name__}); `hone up` starts a stack, "
            "HONE_ROLLOUT_URL names another"
        ) from error
    except ValueError as error:
        raise Unavailable(f"{url} answers what is no JSON; expected a sampler there") from error
    if answer.status_code != 200:
        raise _error(answer.status_code, document, url)
    return document


def _error(status: int, document: dict[str, Any], url: str) -> HoneError:
    """Returns the error of an answer: a problem of Hone's, or an error in OpenAI's shape."""
    match document:
        case {"error": {"message": str(message)}}:
            problem: dict[str, Any] = {"detail": message, "status": status}
        case _:
            problem = document
    return from_problem(status, problem, f"the sampler at {url}")


def _table(answer: dict[str, Any]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    shown = Table("completion", "ended by", box=None, pad_edge=False)
    for choice in answer["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        shown.add_row(escape(text or ""), str(choice["finish_reason"]))
    return shown
