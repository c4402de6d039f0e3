"""A Python script that calls TRL, read without running it: the keyword arguments that are plain
data, top-level names that are, the reward functions and the data set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.importing import trl
from hone.importing.table import UNREAD
from shared.errors import BadRequest

CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig")
PEFT = {"r": 8, "lora_alpha": 8}
"""Defaults of peft's LoraConfig."""

OVERLONG = {"max_completion_len", "soft_punish_cache"}
"""Arguments of TRL's get_soft_overlong_punishment."""

LEFT_OUT = ("args", "peft_config", "processing_class", "train_dataset", "eval_dataset")


def arguments(path: Path, text: str) -> dict[str, Any]:
    """Returns the arguments of the script's GRPOConfig, GRPOTrainer and LoraConfig. A value that
    only running the script would tell contains `UNREAD`."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise BadRequest(f"{path}: line {error.lineno}: not Python: {error.msg}") from error
    script = _Script(tree, path)
    calls = [node for node in ast.walk(tree) if _name(node) in CALLS]
    if not any(_name(call) in ("GRPOConfig", "GRPOTrainer") for call in calls):
        raise BadRequest(f"{str(path)!r} has no GRPOConfig(...) or GRPOTrainer(...)")
    found: dict[str, Any] = {}
    for call in calls:
        found |= PEFT if _name(call) == "LoraConfig" else {}
        found |= dict(script.keywords(call))
    return found


def _name(node: ast.AST | None) -> str:
    """Returns the last part of the name of what is called; "" if nothing is."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
        case _:
            return ""


class _Script:
    def __init__(self, tree: ast.Module, path: Path) -> None:
        self._path = path
        self._assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name) and isinstance(node, ast.Assign):
                    self._assigned.setdefault(target.id, []).append(node.value)
        self._functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    def keywords(self, call: Any) -> Iterator[tuple[str, Any]]:
        """Yields a call's keyword arguments by their names in TRL."""
        for keyword in call.keywords:
            name = keyword.arg or "**"
            if name == "reward_funcs":
                node = keyword.value
                parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
                yield name, [self._reward(part) for part in parts]
            elif name in ("train_dataset", "eval_dataset"):
                yield from self._data(name, keyword.value)
            elif name not in LEFT_OUT:
                yield name, self._value(keyword.value)

    def _value(self, node: ast.expr | None) -> Any:
        if node is None:
            return UNREAD
        try:
            return ast.literal_eval(node)
        except ValueError:
            pass
        match node:
            case ast.Name(id=name) if name in self._assigned:
                return self._value(self._assigned[name][-1])
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return name
            case _:
                return f"{UNREAD} {ast.unparse(node)}"

    def _reward(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in self._functions:
                return {"file": self._path.name, "function": name}
            case ast.Name(id=name) if name in trl.REWARDS:
                return name
            case ast.Name(id=name) if name in self._assigned:
                return self._reward(self._assigned[name][-1])
            case ast.Call(keywords=given) if (
                _name(node) == "get_soft_overlong_punishment"
                and {each.arg for each in given} == OVERLONG
            ):
                return trl.overlong(**{str(each.arg): self._value(each.value) for each in given})
            case _:
                return self._value(node)

    def _data(self, name: str, node: ast.expr | None) -> Iterator[tuple[str, Any]]:
        """Yields the data set that is loaded, whatever maps and filters follow."""
        split, left = None, {key: list(values) for key, values in self._assigned.items()}
        while node is not None and _name(node) != "load_dataset":
            match node:
                case ast.Name(id=variable) if left.get(variable):
                    node = left[variable].pop()
                case ast.Call(func=ast.Attribute(value=inner)):
                    if name == "train_dataset" and _name(node) in ("map", "filter"):
                        yield "rows_changed_by", ast.unparse(node)
                    node = inner
                case ast.Subscript(value=inner, slice=ast.Constant(value=part)):
                    node, split = inner, part
                case _:
                    yield name, f"{UNREAD} {ast.unparse(node)}"
                    return
        yield from self._loaded(name, node, split)

    def _loaded(self, name: str, call: Any, split: Any) -> Iterator[tuple[str, Any]]:
        if call is None:
            return
        given = {each.arg: self._value(each.value) for each in call.keywords}
        positional = [self._value(each) for each in call.args]
        path, config = [*positional, None, None][:2]
        path, config = given.get("path", path), given.get("name", config)
        files = given.get("data_files")
        yield name, files if isinstance(files, str) else path
        if config is not None:
            yield "dataset_config", config
        split = given.get("split", split)
        if split is not None:
            key = "dataset_train_split" if name == "train_dataset" else "eval_split"
            yield key, split
