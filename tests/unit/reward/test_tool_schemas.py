"""JSON schemas of tools: equal to the schemas of transformers, which TRL gives to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, Literal, Optional, Tuple, Union  # noqa: UP035 (users write these too)

import pytest

from services.reward.job_code.inside_schemas import NoSchema, schema_of


def bare():
    """Has no arguments"""


def plain(a: int, b: float = 1.0, *, c: str | None = None) -> str:
    """
    Adds things. Also: colons.

    A second paragraph.

    Args:
        a: The first
            on two lines,
            and a third
        b (unused): never matches a name
        b: The second. Default is: 1.0.

        c: The third (choices: ["tea", " coffee "])
    Returns:
        What it is: text.
    Raises:
        ValueError: sometimes.
    """
    return ""


def unions(
    a: int | str,
    b: Union[int, None],  # noqa: UP007
    c: Optional[list[int]] = None,  # noqa: UP045
    d: list[int] | dict[str, float] | None = None,
    e: list | tuple | None = None,
    f: Any = None,
):
    """Takes unions.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
    """


def containers(
    a: list[list[str]],
    b: dict[str, list[int]],
    c: tuple[int, str, list[bool]],
    d: dict,
    e: list,
    f: tuple,
    g: List,  # noqa: UP006
    h: Tuple[int, int],  # noqa: UP006
    i: bytes,
) -> tuple[int, dict[str, Any]]:
    """Takes containers.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H
        i: I

    Returns:
        Both
    """
    return 1, {}


def literals(
    a: Literal["x", "y"], b: Literal[1, "x", None, True], c: Literal["z"] | None = None
) -> None:
    """Takes literals.

    Args:
        a: A (choices: ["x"])
        b: B
        c: C
    """


async def waits(url: str) -> dict[str, str]:
    """Waits. Returns: what it found

    Args:
        url: An address such as https://example.org
    """
    return {}


class Tools:
    def method(self, word: str) -> str:
        """One line, without a section of results.

        Args:
            word: A word
        """
        return word

    @staticmethod
    def static(self_: int) -> int:
        """Static.

        Args:
            self_: A number
        """
        return self_


CASES: list[Callable[..., Any]] = [
    *(bare, plain, unions, containers, literals, waits),
    *(Tools().method, Tools.method, Tools.static),
]


@pytest.mark.parametrize("tool", CASES, ids=lambda tool: tool.__qualname__)
def test_a_schema_equals_that_of_transformers(tool: Callable[..., Any]) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    assert schema_of(tool) == get_json_schema(tool)
    assert str(schema_of(tool)) == str(get_json_schema(tool)), "in another order"


def undocumented(a: int) -> int:
    return a


def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """Text.

    Args:
        a: A
    """
    return a


def undescribed(a: int, b: int) -> int:
    """Text.

    Args:
        a: A
    """
    return a + b


def one_in_a_tuple(a: tuple[int]) -> None:
    """Text.

    Args:
        a: A
    """


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (undocumented, "undocumented has no docstring"),
        (unhinted, "argument 'a' of unhinted has no type hint"),
        (undescribed, "the docstring of undescribed does not describe its argument 'b'"),
        (one_in_a_tuple, r"the type hint tuple\[int\] of one_in_a_tuple has no JSON schema"),
    ],
)
def test_a_tool_that_transformers_refuses_is_refused(tool: Callable[..., Any], says: str) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    with pytest.raises(NoSchema, match=says):
        schema_of(tool)
    with pytest.raises(Exception, match=r"Cannot generate|missing a type hint|single element"):
        get_json_schema(tool)
