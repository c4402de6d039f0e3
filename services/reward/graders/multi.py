"""OpenAI's `multi`: several of OpenAI's graders, and a formula over their values, such as `0.8 *
right + 0.2 * min(style, 1)`.

    [rewards.params]
    calculate_output = "0.8 * right + 0.2 * kind"
    graders.right = { type = "string_check", name = "right", ... }
    graders.kind = { type = "score_model", ... }
"""

from __future__ import annotations

import ast
import asyncio
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from services.reward.grading import registry
from services.reward.grading.expressions import Language, parse_expression
from services.reward.grading.failures import GradingFailed
from services.reward.grading.registry import Grader, GraderTools, ItemGrader, Params, grader
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem

MAX_CHARS = 1000
"""Most characters of a formula."""


class FormulaError(ValueError):
    """A formula cannot be read, or has no value for these values."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_FORMULAS = Language(
    binary={
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.Pow: operator.pow,
    },
    literals=(int, float),
    number=float,  # also of what floor gives, whose powers have no bound
    refusal="is not allowed in a formula; it has numbers, names of graders, + - * / ** and "
    + ", ".join(_FUNCTIONS),
    functions=_FUNCTIONS,
)


@dataclass(frozen=True)
class Formula:
    """A formula as it was parsed, and the names of the values that it needs. It is evaluated from
    Python's syntax tree and never run as Python, so it can do nothing but arithmetic."""

    tree: ast.expr
    names: frozenset[str]

    def value(self, values: dict[str, float]) -> float:
        """Returns the value for these `values` by name. Raises FormulaError where it is no finite
        number."""
        try:
            given = {name: float(value) for name, value in values.items()}
            result = _FORMULAS.value(self.tree, given)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise FormulaError(f"the formula has no value for {values}: {error}") from error
        if isinstance(result, complex) or not math.isfinite(result):
            raise FormulaError(f"the formula is {result} for {values}")
        return float(result)


def parse(source: str) -> Formula:
    """Returns the formula. Raises FormulaError for anything that is not arithmetic."""
    if len(source) > MAX_CHARS:
        raise FormulaError(f"a formula of {len(source)} characters; at most {MAX_CHARS} are taken")
    try:
        tree = parse_expression(source.strip())
        return Formula(tree, frozenset(_FORMULAS.names(tree)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormulaError(f"formula {source!r:.80} cannot be read: {error}") from error


class MultiParams(Params):
    """Several of OpenAI's graders, and what is made of their values."""

    type: Literal["multi"] = "multi"
    """The grader's name, as OpenAI's grader objects have it."""

    name: str = "multi"
    """What OpenAI's grader objects call it. What metrics call it is the reward's own `name`."""

    graders: dict[str, dict[str, Any]] = Field(min_length=1, max_length=32)
    """At most 32 of OpenAI's grader objects, by the names that the formula has for them."""

    calculate_output: str
    """A formula of these names, for example "0.8 * right + 0.2 * kind"."""

    @field_validator("calculate_output")
    @classmethod
    def _parses(cls, source: str) -> str:
        parse(source)
        return source


@grader("multi")
class Multi(ItemGrader[MultiParams]):
    """The value of `calculate_output`, computed from the values of `graders`. As OpenAI's grader of
    that name.

    A sum pays for each part alone, such as a form without an answer; a product pays for none
    without the other.
    """

    whole_text = True
    deadline_s = 900.0

    def __init__(self, spec: RewardSpec, params: MultiParams, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self._formula = parse(params.calculate_output)
        self._graders = {
            name: _bound(spec, name, given, tools) for name, given in params.graders.items()
        }
        self.asks_models = any(part.asks_models for part in self._graders.values())
        unknown = sorted(self._formula.names - self._graders.keys())
        if unknown:
            known = ", ".join(self._graders)
            raise BadRequest(
                f"reward {spec.label!r}: calculate_output names {unknown[0]!r}; its graders are "
                f"{known}"
            )

    async def check(self, columns: Sequence[str]) -> None:
        for part in self._graders.values():
            await part.check(columns)

    async def check_row(self, row: Mapping[str, Any]) -> None:
        for part in self._graders.values():
            await part.check_row(row)

    async def close(self) -> None:
        for part in self._graders.values():
            await part.close()

    async def grade_item(self, item: ScoreItem) -> Part:
        grading = (part.grade([item]) for part in self._graders.values())
        # All are waited for, so that none runs on after the error of another.
        answers = await asyncio.gather(*grading, return_exceptions=True)
        values: dict[str, float | None] = {}
        tokens: Counter[str] = Counter()
        for name, answer in zip(self._graders, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            values[name] = answer[0].value
            tokens.update(answer[0].tokens)
        given = {name: value for name, value in values.items() if value is not None}
        if len(given) < len(values):
            missing = next(name for name, value in values.items() if value is None)
            raise GradingFailed(f"its grader {missing!r} gave no value", "other_error")
        try:
            value = self._formula.value(given)
        except FormulaError as error:
            raise GradingFailed(str(error), "formula_parse_error") from error
        detail = ", ".join(f"{name} {value:g}" for name, value in given.items())
        return Part(value=value, detail=detail, sub=given, tokens=dict(tokens))


def _bound(spec: RewardSpec, name: str, given: dict[str, Any], tools: GraderTools) -> Grader[Any]:
    kind = given.get("type")
    if kind not in (known := _openai_graders()):
        raise BadRequest(
            f"reward {spec.label!r}: grader {name!r} has type {kind!r}; expected one of "
            f"{', '.join(known)}"
        )
    label = f"{spec.label}.{name}"
    part = RewardSpec(grader=kind, name=label, params=given, reasoning=spec.reasoning)
    return registry.bind(part, tools)


def _openai_graders() -> list[str]:
    """Returns the names of OpenAI's graders: those whose params have a `type`. Not `multi`: a
    formula over formulas is one formula."""
    openai = (info.name for info in registry.infos() if "type" in info.params["properties"])
    return [name for name in openai if name != "multi"]
