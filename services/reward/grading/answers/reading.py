r"""A formula's text, as its parser reads all of it. Pure.

The parser drops what it does not know (`\phantom{5}` is 5 to it, `x1` is x, `5'` is 5): here each
token has to be a known one.
"""

from __future__ import annotations

import re

from services.reward.grading.answers.latex import without_marks

MAX_WORD = 4
"""Letters that stand together in a formula: more are a word, of which no product is made."""

_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth arsinh "
    "arcosh artanh ln log exp max min gcd lcm"
)
_NAMES = "|".join(_FUNCTIONS.split())
_COMMANDS = frozenset(
    f"""{_FUNCTIONS}
frac sqrt binom cdot times div pi infty circ lfloor rfloor lceil rceil vert lvert rvert sum prod
int lim to limits mod overline bar hat vec mathbb mathcal angle triangle nabla partial ell alpha
beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda nu xi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi""".split()
)
_FUNCTION = re.compile(rf"\\text ?\{{ ?({_NAMES}) ?\}}|(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])")
_TOKEN = re.compile(
    r"\\(?P<command>[A-Za-z]+)|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<letter>[A-Za-zΩμ])"
    r"|[-+*/^_(){}\[\]|,=°]|!(?!!)|%(?=$)|\s+"
)
_WORD = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{{MAX_WORD + 1},}}|\\text ?\{{[^{{}}]*[A-Za-z]{{2}}")
_INDEX = re.compile(r"[_^] ?\w")
_INDEX_OF_NUMBER = re.compile(r"[\d)\]}] ?_")
_TWO_NUMBERS = re.compile(r"\d\s+\d")
_ADJACENT = re.compile(r"(?<=[\d)}])\s*(?=\()|(?<=\))\s*(?=[\dA-Za-z\\])")
_MIXED = re.compile(r"(?<![\d.}])(\d+) ?\\frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}")
_INVERSE = re.compile(r"\\(sin|cos|tan|cot|sec|csc) ?\^ ?(?:\{ ?- ?1 ?\}|-1)")
_ROOT = re.compile(r"(\\sqrt) ?(\[[^\[\]]*\]) ?(\d|[A-Za-z](?![A-Za-z]))")
_CURRENT = "\\mathcal{I}"
"""I alone is the imaginary unit to the parser."""


class Unreadable(ValueError):
    """A formula that cannot be read."""

    def __init__(self, formula: str) -> None:
        super().__init__(f"{formula!r:.80} cannot be read as a formula")


def latex_of(formula: str) -> str:
    """Returns the LaTeX that all of `formula` is, its functions and factors written out. Raises
    Unreadable."""
    text = _FUNCTION.sub(lambda found: f"\\{found[1] or found[2]} ", formula)
    is_word = _WORD.search(text)
    text = without_marks(text)
    if is_word or _TWO_NUMBERS.search(_INDEX.sub("", text)) or _INDEX_OF_NUMBER.search(text):
        raise Unreadable(formula)
    text = _INVERSE.sub(r"\\arc\1 ", _ROOT.sub(r"\1\2{\3}", text))
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    return _ADJACENT.sub(r"\\cdot ", _indexed(text, formula)).replace("°", "^\\circ ")


def _indexed(text: str, formula: str) -> str:
    """Returns `text` with a number right behind a letter as the letter's index."""
    parts: list[str] = []
    position, is_letter = 0, False
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or (token["command"] and token["command"] not in _COMMANDS):
            raise Unreadable(formula)
        written = _CURRENT if token[0] == "I" and text[token.end() :][:1] != "_" else token[0]
        parts.append(f"_{{{written}}}" if is_letter and token["number"] else written)
        position, is_letter = token.end(), bool(token["letter"])
    return "".join(parts)
