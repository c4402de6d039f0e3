"""The rewards of `bench.curves`. Hone gets the text of this file and runs it in its sandbox; TRL's
process executes the same text. A completion is a list with the assistant's message."""

import json
import re
from difflib import SequenceMatcher

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
OPERATORS = tuple("+-*/^%×÷")


def sums(completions, answer, **_):
    """1 for a completion whose last number is the answer, else 0."""
    pairs = zip(texts(completions), answer, strict=True)
    return [float(last_number(text) == right) for text, right in pairs]


def last_number(text):
    """Returns the last number of a text as written. None if there is none, or if it is part
    of a word or a term of an expression: the answer of "0 + 17" is not 17."""
    found = list(NUMBER.finditer(text))
    if not found:
        return None
    before, after = text[: found[-1].start()], text[found[-1].end() :]
    is_term = before.rstrip().endswith(OPERATORS) or after.lstrip().startswith(OPERATORS)
    is_in_word = before[-1:].isalpha() or before[-1:] in (".", ",", "_") or after[:1].isalpha()
    return None if is_term or is_in_word else found[-1].group()


def reverse(completions, answer, **_):
    """The similarity of a completion to the reversed text, from 0 to 1: difflib's ratio, twice the
    characters in matching blocks to the characters of both texts."""
    pairs = zip(texts(completions), answer, strict=True)
    return [SequenceMatcher(None, text.strip(), right).ratio() for text, right in pairs]


def json_object(completions, answer, **_):
    """1 for a completion that is the answer's JSON object and nothing else. 0.1 for another JSON
    object, 0.2 more for exactly the answer's keys, and a share of 0.7 for each right value."""
    pairs = zip(texts(completions), answer, strict=True)
    return [graded_object(text, json.loads(right)) for text, right in pairs]


def graded_object(text, answer):
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    num_right = sum(
        key in found and type(found[key]) is type(value) and found[key] == value
        for key, value in answer.items()
    )
    has_keys = found.keys() == answer.keys()
    if has_keys and num_right == len(answer):
        return 1.0
    return 0.1 + 0.2 * has_keys + 0.7 * num_right / len(answer)


def texts(completions):
    return [completion[-1]["content"] for completion in completions]
