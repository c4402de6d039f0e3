"""A function or class of a script or notebook as source text that stands alone: its own text, and
the text of all that it closes over.

The text travels with the job, and runs in the reward service's sandbox, where the script is not.
Imported from installed packages: an import. Functions and classes of the user's own files: their
text, once. Plain data, patterns and loggers: an assignment. Everything else is refused, with the
name and the reason, because an object that was left out would be missed at the first step.

A reward that a package defines, such as `trl.rewards.accuracy_reward`, is text too, with what it
uses of its package: the reward service need not have the package of a training script.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import importlib.util
import inspect
import linecache
import logging
import math
import operator
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from shared.errors import BadRequest
from shared.job import MAX_SOURCE_BYTES
from shared.rewards import FunctionConfig, SandboxConfig

HEADER = "from __future__ import annotations\n"
SANDBOX_NAMES = ("hone", "shared.rewards")
"""Modules whose names the sandbox has as `hone`."""

MAX_LISTED = 3
READS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_GLOBAL")


def source_of(target: Any, name: str) -> str:
    """Returns the text of a module that defines `target` as `name`. Raises BadRequest with the
    reason if the text would not do in another process what `target` does here."""
    if package := _package_of(target):
        with contextlib.suppress(BadRequest):  # then it is imported, where its package is installed
            return _text_of(target, name, package)
    return _text_of(target, name, "")


def _text_of(target: Any, name: str, package: str) -> str:
    module = _Module(name, package)
    try:
        module.add(name, target, user=f"the reward {name!r}")
    except RecursionError as error:
        raise BadRequest(
            f"the reward {name!r} closes over data that contains itself, which cannot be sent"
        ) from error
    text = module.text()
    if (size := len(text.encode())) > MAX_SOURCE_BYTES:
        raise BadRequest(
            f"the source of the reward {name!r}, with what it closes over, has {size} bytes; "
            f"expected at most {MAX_SOURCE_BYTES}. Largest: {', '.join(module.largest())}"
        )
    return text


@dataclass
class _Module:
    """The text while it is made: its parts by name, in the order in which they must run. Nothing of
    `package` is imported."""

    _name: str
    _package: str
    _parts: dict[str, str] = field(default_factory=dict[str, str])
    _values: dict[str, Any] = field(default_factory=dict[str, Any])

    def text(self) -> str:
        return HEADER + "\n".join(self._parts.values())

    def largest(self) -> list[str]:
        parts = sorted(self._parts.items(), key=lambda part: -len(part[1]))
        return [f"{name} ({len(text)} characters)" for name, text in parts[:MAX_LISTED]]

    def add(self, name: str, value: Any, user: str) -> None:
        """Adds what defines `value` as `name`, which `user` needs, after all that it needs
        itself."""
        if name in self._values:
            if not same(self._values[name], value):
                raise BadRequest(
                    f"{user} and another part of the reward {self._name!r} call different objects "
                    f"{name!r}; expected one name for each"
                )
            return
        self._values[name] = value
        if text := as_data(name, value) or _as_import(name, value, user, self._package):
            self._parts[name] = text
        elif isinstance(value, functools.partial):
            self._add_partial(name, cast("functools.partial[Any]", value), user)
        elif isinstance(value, types.FunctionType | type) or hasattr(value, "__wrapped__"):
            self._add_definition(name, value, user)
        else:
            raise BadRequest(
                f"{user} uses {name!r}, {described(value)}, which cannot be sent as source; "
                "expected functions, classes, modules and plain data: make the object inside the "
                "function that uses it"
            )

    def _add_partial(self, name: str, value: functools.partial[Any], user: str) -> None:
        given = {"args": value.args, "keywords": value.keywords}
        fixed = {kind: literal_of(each) for kind, each in given.items()}
        if bad := next((kind for kind, text in fixed.items() if text is None), None):
            raise BadRequest(
                f"{user} is a functools.partial with {bad} {given[bad]!r}; expected plain data"
            )
        inner = f"{name}_whole"
        self.add(inner, value.func, user)
        self._parts[name] = (
            "import functools\n"
            f"{name} = functools.partial({inner}, *{fixed['args']}, **{fixed['keywords']})\n"
        )

    def _add_definition(self, name: str, value: Any, user: str) -> None:
        found = _Definition(value, name, user)
        own = found.name
        if own != name:
            self._values.setdefault(own, value)
            if not same(self._values[own], value):
                raise BadRequest(
                    f"{user} uses two objects that are defined as {own!r}; expected one name for "
                    "each"
                )
        part = f"part of the reward {self._name!r}"
        for module, line in found.imports():
            if _file_of(module) and not _is_installed(module):
                raise BadRequest(
                    f"{own!r}, {part}, imports {module!r} in line {line}, a file of your own, "
                    "which the reward service does not have; expected functions imported by name "
                    f"at the top of the file (from {module} import ...)"
                )
        for needed in found.names():
            if needed not in (own, name):
                line = found.line_of(needed)
                self.add(needed, found.look_up(needed), f"{own!r}, {part}, line {line},")
        for module in found.submodules():
            self._parts.setdefault(module, f"__import__({module!r})\n")
        if own not in self._parts:
            self._parts[own] = found.text
        if own != name:
            self._parts[name] = f"{name} = {own}\n"


class _Definition:
    """A function, lambda or class of the user's, with its text and the scope that it was defined
    in."""

    def __init__(self, value: Any, name: str, user: str) -> None:
        self._user = user
        inner = inspect.unwrap(value)
        node, lines = _class_node(inner) if isinstance(inner, type) else _function_node(inner)
        if node is None:
            raise BadRequest(
                f"{user}: the source of {described(value)} cannot be found; expected a function "
                "or class of a file or a notebook's cell"
            )
        if inner is not value and not getattr(node, "decorator_list", ()):
            raise BadRequest(
                f"{user}: {name!r} wraps {inner.__name__!r} without a decorator; expected "
                "@decorator above its definition"
            )
        self._node = node
        self.name: str = getattr(node, "name", name)
        self.text = (
            f"{name} = {ast.unparse(node)}\n"
            if isinstance(node, ast.Lambda)
            else _text(node, lines)
        )
        functions = _functions_in(inner)
        self._scope = _scope(functions) | (
            {} if functions else vars(sys.modules.get(inner.__module__, builtins))
        )

    def names(self) -> list[str]:
        """Returns the names that the text needs from outside, builtins apart, in order."""
        code = compile(self.text, self.name, "exec", annotations.compiler_flag, dont_inherit=True)
        found = dict.fromkeys(_free_names(code, is_module=True))
        return [name for name in found if not hasattr(builtins, name) or name in self._scope]

    def imports(self) -> list[tuple[str, int]]:
        """Returns the modules that the text imports, each with its line in the file."""
        found: list[tuple[str, int]] = []
        for node in ast.walk(self._node):
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.append((node.module, node.lineno))
        return found

    def line_of(self, name: str) -> int:
        """Returns the line of the file in which the definition first uses a name."""
        uses = [node for node in ast.walk(self._node) if isinstance(node, ast.Name)]
        lines = [node.lineno for node in uses if node.id == name]
        return min(lines, default=_first_line(self._node))

    def submodules(self) -> list[str]:
        """Returns the modules that the text reaches through a package: `import concurrent` alone
        has no `concurrent.futures`."""
        chains = [
            ast.unparse(node).partition(".")
            for node in ast.walk(ast.parse(self.text))
            if isinstance(node, ast.Attribute)
        ]
        packages = [(self._scope.get(name), rest) for name, _, rest in chains]
        reached = [
            f"{package.__name__}.{rest}"
            for package, rest in packages
            if isinstance(package, types.ModuleType)
        ]
        return [module for module in dict.fromkeys(reached) if module in sys.modules]

    def look_up(self, name: str) -> Any:
        """Returns the value of a name in the scope. Raises BadRequest if it has none."""
        if name not in self._scope:
            raise BadRequest(f"{self._user}: {self.name!r} uses {name!r}, which is not defined")
        return self._scope[name]


def _scope(functions: list[types.FunctionType]) -> dict[str, Any]:
    """Returns the global names and the closed-over ones of functions that were defined together."""
    scope: dict[str, Any] = {}
    for function in functions:
        scope |= function.__globals__
    for function in functions:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if name != "__class__":
                try:
                    scope[name] = cell.cell_contents
                except ValueError:  # not yet assigned
                    scope.pop(name, None)
    return scope


def _functions_in(value: Any) -> list[types.FunctionType]:
    """Returns a function itself, or the functions that a class's own text defines."""
    if isinstance(value, types.FunctionType):
        return [value]
    own = list(cast(dict[str, Any], vars(value)).values())
    members = [getattr(member, "__func__", member) for member in own]
    members += [member.fget for member in members if isinstance(member, property)]
    plain = [inspect.unwrap(member) for member in members if callable(member)]
    written = [
        member
        for member in plain
        if isinstance(member, types.FunctionType) and member.__module__ == value.__module__
    ]
    return [each for each in written if each.__code__.co_filename != "<string>"]  # of a dataclass


def _free_names(code: types.CodeType, *, is_module: bool) -> Iterator[str]:
    """Yields the names that code, and all code in it, reads from the module without having set
    them."""
    stored: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME":
            stored.add(instruction.argval)
        elif instruction.opname in READS and instruction.argval not in stored | {"__name__"}:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _free_names(constant, is_module=False)
            yield from (name for name in inner if not (is_module and name in stored))


def _function_node(function: Any) -> tuple[ast.AST | None, list[str]]:
    code = getattr(function, "__code__", None)
    if code is None:
        return None, []
    tree, lines = _tree(code.co_filename)
    kinds = (ast.Lambda,) if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds) and _first_line(node) == code.co_firstlineno
    ]
    if len(found) > 1:  # lambdas in one line
        found = [node for node in found if _is_of(node, code)][:1]
    return (found[0] if found else None), lines


def _class_node(kind: type) -> tuple[ast.AST | None, list[str]]:
    functions = _functions_in(kind)
    file = functions[0].__code__.co_filename if functions else _file_of(kind.__module__)
    tree, lines = _tree(file)
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    inside = {function.__code__.co_firstlineno for function in functions}
    holding = [
        node
        for node in found
        if all(node.lineno <= line <= (node.end_lineno or line) for line in inside)
    ]
    return (holding[-1] if holding else None), lines


def _tree(file: str) -> tuple[ast.Module, list[str]]:
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines)), lines
    except SyntaxError:  # a cell with a magic command, or a file that was edited since
        return ast.Module([], []), lines


def _first_line(node: Any) -> int:
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _is_of(node: Any, code: types.CodeType) -> bool:
    """Whether the code's instructions lie within the lambda's body."""
    body = node.body
    begin, end = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    at = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    return all(begin <= place <= end for place in at)


def _text(node: Any, lines: list[str]) -> str:
    """Returns the text as it was written. An indented definition is generated from the syntax tree,
    because its strings of several lines must not change."""
    if node.col_offset == 0:
        return "".join(lines[_first_line(node) - 1 : node.end_lineno]).rstrip() + "\n"
    return ast.unparse(node) + "\n"


def _package_of(target: Any) -> str:
    """Returns the name of the installed package that defines a reward; empty if it is the user's
    own, or Python's."""
    module = str(getattr(target, "__module__", None) or "")
    package = _top(module)
    known = package in sys.stdlib_module_names or module in SANDBOX_NAMES
    return package if module and not known and _is_installed(module) else ""


def _top(module: str) -> str:
    return module.partition(".")[0]


def _as_import(name: str, value: Any, user: str, package: str) -> str | None:
    """Returns the import of a module, or of what an installed package defines, unless it is
    `package`."""
    if isinstance(value, types.ModuleType):
        if _top(value.__name__) == package or not _is_installed(value.__name__):
            raise BadRequest(
                f"{user} uses the module {name!r}, a file of your own "
                f"({_file_of(value.__name__)}), which the reward service does not have; expected "
                f"functions imported by name (from {value.__name__} import ...)"
            )
        return f"import {value.__name__} as {name}\n"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or qualified is None or not _is_installed(module) or _top(module) == package:
        return None
    if module in SANDBOX_NAMES:
        return f"from hone import {qualified} as {name}\n"
    first, _, rest = qualified.partition(".")
    try:
        is_found = operator.attrgetter(qualified)(sys.modules[module]) is value
    except AttributeError:
        return None
    if not is_found:
        return None
    return (
        f"from {module} import {first}\n{name} = {first}.{rest}\n"
        if rest
        else f"from {module} import {first} as {name}\n"
    )


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module comes with Python or is installed, so that the sandbox may have it."""
    top = _top(module)
    if top in sys.stdlib_module_names or module in SANDBOX_NAMES:
        return top != "__main__"
    return any(folder in Path(_file_of(module)).parents for folder in _package_folders())


def _package_folders() -> list[Path]:
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    return [Path(folder) for folder in folders]


def _file_of(module: str) -> str:
    """Returns the file of a module, imported or not; empty if there is none."""
    loaded = sys.modules.get(module) or sys.modules.get(_top(module))
    if loaded is not None:
        return str(getattr(loaded, "__file__", None) or "")
    spec = importlib.util.find_spec(_top(module))
    return str((spec and spec.origin) or "")


def callable_source(instance: Any, name: str) -> str:
    """Returns the text of a module that defines `name` as what calling `instance` does. Raises
    BadRequest if an attribute is no plain data."""
    return f"{instance_source(instance, name, '__call__')}\n{name} = {name}().__call__\n"


def instance_source(instance: Any, name: str, method: str = "score or score_batch") -> str:
    """Returns the text of a module that defines `name` as a class without arguments, whose
    instances have what `instance` has. Raises BadRequest if an attribute is no plain data; it could
    be made in `method` instead."""
    kind = instance.__class__
    held = cast(dict[str, Any], getattr(instance, "__dict__", {}))
    if bad := next((key for key, value in held.items() if literal_of(value) is None), None):
        raise BadRequest(
            f"the reward {name!r}: its attribute {bad!r} is {described(held[bad])}, "
            f"which cannot be sent; expected plain data, and other objects made in {method}"
        )
    base = f"_{kind.__name__}"
    return (
        f"{source_of(kind, kind.__name__)}\n{base} = {kind.__name__}\n\n\n"
        f"class {name}({base}):\n    def __init__(self):\n"
        f"        self.__dict__.update({literal_of(held)})\n"
    )


# --- plain data as text --------------------------------------------------------------------------

MANY = 20
"""Least entries of a dict that may be the list of installed packages, which takes long to make."""

LISTED = 0.9
"""Share of its names that are then installed now: `sys.path` changes after an import."""


def as_data(name: str, value: Any) -> str | None:
    """Returns the statements that make `value` as `name`; None for what is no plain data."""
    if isinstance(value, logging.Logger):
        return f"import logging\n{name} = logging.getLogger({value.name!r})\n"
    if isinstance(value, re.Pattern):
        pattern = cast("re.Pattern[Any]", value)
        return f"import re\n{name} = re.compile({pattern.pattern!r}, {pattern.flags})\n"
    names = cast(dict[Any, Any], value).keys() if type(value) is dict else set[Any]()
    if len(names) >= MANY and len(names & _importable()) > LISTED * len(names):
        return f"from importlib import metadata\n{name} = metadata.packages_distributions()\n"
    literal = literal_of(value)
    return None if literal is None else f"{name} = {literal}\n"


@functools.cache
def _importable() -> set[str]:
    """Returns which packages can be imported here. Where a reward asks for that, it means the place
    where it runs."""
    return set(metadata.packages_distributions())


def literal_of(value: Any) -> str | None:
    """Returns the expression of plain data; None for anything else."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if isinstance(value, SandboxConfig | FunctionConfig):
        return f"__import__('hone').{value!r}"
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if type(value) is dict or isinstance(value, types.MappingProxyType):
        pairs = [
            (literal_of(key), literal_of(each))
            for key, each in cast(Mapping[Any, Any], value).items()
        ]
        return (
            None
            if any(None in pair for pair in pairs)
            else f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}"
        )
    build: dict[type, str] = {
        list: "[{}]",
        tuple: "({})",
        set: "set([{}])",
        frozenset: "frozenset([{}])",
    }
    kind = value.__class__
    if kind not in build:
        return None
    items = [literal_of(each) for each in value]
    if None in items:
        return None
    return build[kind].format("".join(f"{item}, " for item in items))


def same(one: Any, other: Any) -> bool:
    """Whether two objects are one, or equal plain data."""
    literal = literal_of(one)
    return one is other or (literal is not None and literal == literal_of(other))


def described(value: Any) -> str:
    """Returns what an error calls an object."""
    if isinstance(value, types.FunctionType | type):
        return f"{value.__qualname__!r} of {value.__module__}"
    kind = value.__class__
    return f"an object of type {kind.__module__}.{kind.__qualname__}"
