"""The commands in a shell script, read without running any. Variables, arrays and arithmetic that
the script sets outside of conditions are put in; what only a shell could know becomes `UNREAD`."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from hone.importing.table import UNREAD

_QUOTED_OR_COMMENT = re.compile(r"""(\\.|"(?:\\.|[^"\\])*"|'[^']*')|(?<!\S)#[^\n]*""")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_VARIABLE = re.compile(r"\$\{([^{}$]*)\}|\$(\w+|@)")
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_SEPARATORS = "();<>|&\n"
_ENCODED = str.maketrans({"(": "\x01", ")": "\x02", **dict.fromkeys(" \t\n${}", None)})
"""Within `${=...}` there must be no separator and no brace."""

_OPENING, _CLOSING = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda one, other: one + other,
    ast.Sub: lambda one, other: one - other,
    ast.Mult: lambda one, other: one * other,
    ast.Div: lambda one, other: one // other,
    ast.Mod: lambda one, other: one % other,
}


def commands(script: str, conditional: set[str]) -> Iterator[list[str]]:
    """Yields the words of each command. A variable that a condition sets is added to `conditional`,
    and keeps the value that it had before."""
    variables: dict[str, list[str]] = {"HOME": [str(Path.home())]}
    depth = 0
    for statement in _statements(script):
        words = statement[1:] if statement[0] in ("export", "local", "declare") else statement
        depth += statement[0] in _OPENING
        depth -= statement[0] in _CLOSING
        own = [] if _is_array(words) else list(itertools.dropwhile(_ASSIGNMENT.fullmatch, words))
        if own:
            yield [part for word in own for part in _expanded(word, variables)]
        elif words and not depth:
            _assign(words, variables)
        elif words and (found := _ASSIGNMENT.fullmatch(words[0])):
            conditional.add(found[1])
            variables.setdefault(found[1], [UNREAD])


def _is_array(words: list[str]) -> bool:
    return len(words) > 1 and re.fullmatch(r"\w+\+?=", words[0]) is not None


def _assign(words: list[str], variables: dict[str, list[str]]) -> None:
    """Sets the variables of a statement `A=1 B=2`, or the array of `A=( 1 2 )`, whose elements are
    the other words."""
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if found is None:
            return
        name, adds, text = found.groups()
        is_array = _is_array(words)
        values = words[1:] if is_array else [text]
        expanded = [part for value in values for part in _expanded(value, variables)]
        variables[name] = [*(variables.get(name, []) if adds else []), *expanded]
        if is_array:
            return


def _statements(script: str) -> Iterator[list[str]]:
    """Yields the words of each statement; the elements of an array belong to its name."""
    words: list[str] = []
    in_array = False
    for token in _tokens(script):
        if token.strip(_SEPARATORS):
            words.append(token)
            continue
        for sign in token:
            if sign == "(" and words and re.fullmatch(r"\w+\+?=", words[-1]):
                in_array = True
            elif not in_array or sign == ")":
                if words:
                    yield words
                words, in_array = [], False
    if words:
        yield words


def _tokens(script: str) -> Iterator[str]:
    text = script.replace("\\\n", " ")
    text = _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text)
    text = _ARITHMETIC.sub(lambda found: f"${{={found[1].translate(_ENCODED)}}}", text)
    while _COMMAND.search(text):
        text = _COMMAND.sub(UNREAD, text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return iter(lexer)


def _expanded(word: str, variables: dict[str, list[str]]) -> list[str]:
    """Returns the words that a word becomes: several for an array, or for a variable whose value
    is options."""
    whole = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$\{?(\w+)\}?|\$@", word)
    if whole is not None:
        values = variables.get(
            whole[1] or whole[2] or "@", [] if whole[1] or word == "$@" else None
        )
        if values is None:
            return [UNREAD]
        is_options = re.compile("--.* .*", re.DOTALL).fullmatch
        split = (shlex.split(value) if is_options(value) else [value] for value in values)
        return [each for words in split for each in words]
    text = word
    while text.count("$") > text.count(UNREAD):
        shorter = _VARIABLE.sub(lambda found: _value(found[1] or found[2], variables), text)
        if shorter == text:
            break
        text = shorter
    return [text]


def _value(expression: str, variables: dict[str, list[str]]) -> str:
    """Returns the value of what stands in `${...}`."""
    if expression.startswith("="):
        return _computed(expression[1:], variables)
    name, dash, default = expression.partition(":-")
    if name in variables and (variables[name] != [""] or not dash):
        return " ".join(variables[name])
    return default if dash else UNREAD


def _computed(expression: str, variables: dict[str, list[str]]) -> str:
    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return int(" ".join(variables[name]))
            case ast.BinOp(left=left, op=sign, right=right):
                return _OPERATIONS[type(sign)](value(left), value(right))
            case _:
                raise ValueError(expression)

    try:
        text = expression.replace("\x01", "(").replace("\x02", ")")
        return str(value(ast.parse(text, mode="eval").body))
    except (ValueError, KeyError, SyntaxError, ZeroDivisionError):
        return UNREAD
