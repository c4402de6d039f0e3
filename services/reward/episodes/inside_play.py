"""One episode, in a child of its own: makes the environment, calls its tools. Standard library
only.

    service: {open: {kind, names, name, tools, row}}
             child: {observation, tools, has_reward}, {mistake} of the file, or {error} of this row
    service: {step: [{name, arguments}, ...]}    child: {results: [{content, failed}], done}
    service: {close: {attributes}}               child: {has_reward, reward, attributes}

The last two answer {error} too. Everything is checked again on the trusted side.

JSON schemas of tools are made from type hints and Google docstrings: the same as
`transformers.utils.get_json_schema` makes, which a sandbox may not have.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from services.reward.job_code.inside_file import elide, explain, find_definition, number
from services.reward.sandbox.inside import frames

_SECTION = re.compile(r"(Args|Returns|Raises):")
_ARGUMENT = re.compile(r"\s*(\w+):\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_NAMES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
}


class NoSchema(Exception):
    """A tool has no schema; the message says what it lacks."""


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function or method in OpenAI's shape. Raises NoSchema for a tool
    without docstring, type hints, or descriptions of its arguments."""
    name = getattr(tool, "__name__", "operation")
    text = (inspect.getdoc(tool) or "").strip()
    if not text:
        raise NoSchema(f"{name} has no docstring, which tells the model what it does")
    doc = _Docstring(text)
    try:
        hints = get_type_hints(tool)
    except (NameError, TypeError) as error:
        raise NoSchema(f"the type hints of {name} cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    parameters = _parameters(tool)
    for parameter in parameters.values():
        if parameter.annotation is parameter.empty:
            raise NoSchema(f"argument {parameter.name!r} of {name} has no type hint")
    for argument in (argument for argument in hints if argument != "return"):
        if argument not in doc.arguments:
            raise NoSchema(
                f"the docstring of {name} does not describe its argument {argument!r} under Args:"
            )
        properties[argument] = _typed(hints[argument], name) | _described(doc.arguments[argument])
    needed = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    function: dict[str, Any] = {
        "name": name,
        "description": doc.description,
        "parameters": {"type": "object", "properties": properties}
        | ({"required": needed} if needed else {}),
    }
    if "return" in hints:
        told = {} if doc.returns is None else {"description": doc.returns}
        function["return"] = _typed(hints["return"], name) | told
    return {"type": "function", "function": function}


def _parameters(tool: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters without a leading self or cls that has no type hint."""
    parameters = dict(inspect.signature(tool).parameters)
    first = next(iter(parameters.values()), None)
    if first is not None and first.name in ("self", "cls") and first.annotation is first.empty:
        del parameters[first.name]
    return parameters


class _Docstring:
    """The parts of a Google docstring, each with its blanks at both ends removed; `returns` None:
    it has no such section."""

    def __init__(self, text: str) -> None:
        first = _SECTION.search(text)
        self.description = (text[: first.start()] if first else text).strip()
        block = _section(text, "Args", ("Returns", "Raises"))
        self.arguments = _arguments(block or "")
        self.returns = _section(text, "Returns", ("Raises",))


def _section(text: str, name: str, enders: tuple[str, ...]) -> str | None:
    start = re.search(rf"\n\s*{name}:\n", text)
    if start is None:
        return None
    rest = text[start.end() :]
    end = re.search("|".join(f"{ender}:" for ender in enders), rest)
    return (rest[: end.start()] if end else rest).strip()


def _arguments(block: str) -> dict[str, str]:
    """Returns the description of each argument. A line that does not begin with a name and a colon
    continues with the description before it."""
    told: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in block.splitlines():
        if match := _ARGUMENT.match(line):
            lines = told[match[1]] = [match[2].strip()]
        elif line.strip():
            lines.append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in told.items()}


def _described(text: str) -> dict[str, Any]:
    match = _CHOICES.search(text)
    if match is None:
        return {"description": text}
    try:
        choices = json.loads(match[1])
    except ValueError as error:
        raise NoSchema(f"the choices in {text!r:.200} are not JSON: {error}") from error
    stripped = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    return {"enum": stripped, "description": text[: match.start()].strip()}


def _typed(hint: Any, tool: str) -> dict[str, Any]:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is None:
        if hint is Any:
            return {}
        return {"type": _NAMES.get(hint, "object") if isinstance(hint, type) else "object"}
    if kind is Union or kind is types.UnionType:
        return _union([_typed(one, tool) for one in inner if one is not type(None)]) | (
            {"nullable": True} if type(None) in inner else {}
        )
    if kind is Literal:
        return _literal(inner, tool)
    if not inner and kind in (list, tuple, dict):  # typing.List and the like
        return {"type": _NAMES.get(kind, "object")}
    if kind is list:
        return {"type": "array", "items": _typed(inner[0], tool)}
    if kind is dict:
        return {"type": "object", "additionalProperties": _typed(inner[1], tool)}
    if kind is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_typed(one, tool) for one in inner]}
    raise NoSchema(f"the type hint {hint} of {tool} has no JSON schema; expected list, dict, ...")


def _union(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if len(schemas) == 1:
        return schemas[0]
    if not all(set(schema) == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        return {"anyOf": schemas}
    names = sorted({schema["type"] for schema in schemas})
    return {"type": names[0] if len(names) == 1 else names}


def _literal(values: tuple[Any, ...], tool: str) -> dict[str, Any]:
    if not all(type(value) in (int, float, str, bool, type(None)) for value in values):
        raise NoSchema(f"Literal{list(values)} of {tool} has values that JSON does not have")
    names = list(dict.fromkeys(_NAMES[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


Tool = Callable[..., Any]

MAX_RESULT_CHARS = 32_768
MAX_TURN_CHARS = 1 << 20
"""Characters of one tool's result, and of a turn's results together. The rest is cut off."""

MAX_ATTRIBUTES_CHARS = 1 << 16
"""Characters of all attributes of an environment together, as JSON. One beyond is left out."""

MAX_SENTENCE_CHARS = 1000
NOT_TOOLS = ("reset", "get_reward")


class InvalidJobFile(Exception):
    """The file is not one of an environment or of tools, whatever the row is."""


def play(channel: int, module: types.ModuleType, file: str) -> None:
    """Answers what is asked until the other end is closed."""
    with asyncio.Runner() as runner:
        episode = Episode(module, file, runner)
        while (asked := frames.receive(channel)) is not None:
            reply = json.dumps(episode.answer(asked), ensure_ascii=False)
            frames.send_bytes(channel, frames.pack_bytes(reply.encode("utf-8", "replace")))


class Episode:
    """`runner` has the event loop of the whole episode, for everything that is async."""

    def __init__(self, module: types.ModuleType, file: str, runner: asyncio.Runner) -> None:
        self._module = module
        self._file = file
        self._runner = runner
        self._environment: Any = None
        self._tools: dict[str, Tool] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            if "open" in asked:
                return self._open(asked["open"])
            if "step" in asked:
                return self._step(asked["step"])
            kept = {"attributes": self._attributes()} if asked["close"]["attributes"] else {}
            return {**self._close(), **kept}
        except InvalidJobFile as error:
            return {"mistake": str(error)}
        except BaseException as error:  # the job's own code: whatever it raises is its answer
            return {"error": explain(error, self._file)}

    def _open(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["kind"] == "tools":
            return self._opened(
                None, self._offer([self._found(name, "function") for name in wanted["tools"]])
            )
        for name in wanted["names"]:
            self._check(self._found(name, "class"))
        made = self._found(wanted["name"], "class")()
        self._environment = made
        tools = self._offer([getattr(made, name) for name in _tool_names(type(made))])
        said = self._finished(made.reset(**_taken(made.reset, wanted["row"])))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"reset returned {elide(said)}, expected text or None")
        return self._opened(said, tools)

    def _offer(self, tools: list[Tool]) -> list[dict[str, Any]]:
        """Returns the schemas of the tools, which can be called from now on."""
        schemas = [self._schema(tool) for tool in tools]
        self._tools = {
            schema["function"]["name"]: tool for schema, tool in zip(schemas, tools, strict=True)
        }
        return schemas

    def _opened(self, said: str | None, tools: list[dict[str, Any]]) -> dict[str, Any]:
        return {"observation": said, "tools": tools, "has_reward": self._has_reward()}

    def _found(self, name: str, what: str) -> Any:
        try:
            target = find_definition(self._module, name, what)
        except LookupError as error:
            raise InvalidJobFile(str(error)) from error
        if inspect.isclass(target) != (what == "class"):
            raise InvalidJobFile(f"{name!r} in {self._file} is {elide(target)}, expected a {what}")
        return target

    def _check(self, kind: type) -> None:
        """Raises InvalidJobFile for a class that is not an environment."""
        if not callable(getattr(kind, "reset", None)):
            raise InvalidJobFile(
                f"{self._line(kind)}: class {kind.__name__!r} has no method reset(self, **row)"
            )
        for name in _tool_names(kind):
            self._schema(getattr(kind, name))

    def _schema(self, tool: Tool) -> dict[str, Any]:
        try:
            return schema_of(tool)
        except NoSchema as error:
            raise InvalidJobFile(f"{self._line(tool)}: {error}") from error

    def _line(self, target: Any) -> str:
        """Returns the file and the line where a class or function is defined."""
        try:
            _, first = inspect.getsourcelines(inspect.unwrap(target))
        except (OSError, TypeError):
            return self._file
        return f"{self._file} line {first}"

    def _step(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        limit = min(MAX_RESULT_CHARS, MAX_TURN_CHARS // max(len(calls), 1))
        results = [self._called(call["name"], call["arguments"], limit) for call in calls]
        done = getattr(self._environment, "done", False)
        return {"results": results, "done": not callable(done) and bool(done)}

    def _called(self, name: str, arguments: Any, limit: int) -> dict[str, Any]:
        try:
            fitting = self._fitting(name, arguments)
        except ValueError as error:
            return {"content": str(error)[:MAX_SENTENCE_CHARS], "failed": True}
        try:
            content = _text(self._finished(self._tools[name](**fitting)))
        except BaseException as error:  # the job's own code
            return {"content": _sentence(error), "failed": True}
        return {"content": _cut(content, limit), "failed": False}

    def _fitting(self, name: str, arguments: Any) -> dict[str, Any]:
        """Returns the arguments by name. Raises ValueError with a sentence for the model."""
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise ValueError(f"There is no tool {name!r:.100}; the tools are: {known}.")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise ValueError(f"The arguments of {name} are not JSON: {error}.") from error
        if not isinstance(arguments, dict):
            raise ValueError(
                f"The arguments of {name} are {elide(arguments)}, expected a JSON object."
            )
        try:
            inspect.signature(self._tools[name]).bind(**arguments)
        except TypeError as error:
            takes = ", ".join(inspect.signature(self._tools[name]).parameters) or "no arguments"
            raise ValueError(
                f"The arguments of {name} do not fit: {error}; it takes {takes}."
            ) from error
        return arguments

    def _close(self) -> dict[str, Any]:
        if not self._has_reward():
            return {"has_reward": False, "reward": None}
        value = self._finished(self._environment.get_reward())
        return {"has_reward": True, "reward": number(value, "get_reward")}

    def _attributes(self) -> dict[str, Any] | None:
        """Returns the public attributes and properties of the environment that JSON has. Others are
        left out; None: there is no environment."""
        if self._environment is None:
            return None
        properties = inspect.getmembers(type(self._environment), inspect.isdatadescriptor)
        names = {*getattr(self._environment, "__dict__", {}), *(name for name, _ in properties)}
        found: dict[str, Any] = {}
        left = MAX_ATTRIBUTES_CHARS
        for name in sorted(name for name in names if not name.startswith("_")):
            try:
                text = json.dumps(getattr(self._environment, name), allow_nan=False)
            except Exception:  # a property of the job's own code, or a value that JSON lacks
                continue
            if len(text) <= left:
                left -= len(text)
                found[name] = json.loads(text)
        return found

    def _has_reward(self) -> bool:
        return callable(getattr(self._environment, "get_reward", None))

    def _finished(self, result: Any) -> Any:
        async def wait(work: Awaitable[Any]) -> Any:
            return await work

        return self._runner.run(wait(result)) if inspect.isawaitable(result) else result


def _tool_names(kind: type) -> list[str]:
    """Returns the public methods, in the order of their names, as TRL gives them to the model."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in methods if name not in NOT_TOOLS and not name.startswith("_")]


def _taken(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row's columns that `reset` has a parameter for."""
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def _text(value: Any) -> str:
    """Returns text as it is, anything else as JSON, or as `str` shows it where JSON has no such
    value."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plainer)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _plainer(value: Any) -> Any:
    """Returns numbers and arrays of numpy, sets and tuples as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}... [cut off after {limit} of {len(text)} characters]"


def _sentence(error: BaseException) -> str:
    kind, message = type(error).__name__, str(error)
    return f"{kind}: {message}"[:MAX_SENTENCE_CHARS] if message else kind
