r"""The number that a text without a marked answer states. Pure.

"The sum of 8 and 9 is 17."      ->  "17"
"So the answer is **$1,200**."   ->  "$1,200"
"8 + 9 = 17", "17 = 8 + 9"       ->  "17"
"The sum is 8 + 9."              ->  none: an expression
"17 or 18", "1 2 3 ... 17"       ->  none: several numbers
"What is 8 + 9?"                 ->  none: a question
"74 is the larger of 74 and 84"  ->  none: says something of 74, and ends with another number

The last sentence that says "the answer is" decides, else the last sentence with a number. Of it the
last number decides, or the first one behind "the answer is". It counts only as a plain number,
alone or at an end of a chain of equations, and a sentence that has none there states none: no
number before it is taken in its place, so that a text has one answer however much it lists.
"""

from __future__ import annotations

import re

from services.reward.grading.answers.comparing import numbers_of
from services.reward.grading.answers.forms import read
from services.reward.grading.answers.latex import clean, without_marks
from services.reward.grading.answers.numbers import MAX_COMPOUND, Number, number

TAIL_CHARS = 4000
"""Characters at the end of a text that are searched."""

_WRAPPED = re.compile(r"(\*{1,3}|_{1,3}|`{1,3})(?=\S)(.{1,500}?)(?<=\S)\1")
_EMPHASIS = re.compile(rf"(?<![\w)}}\]\\*]){_WRAPPED.pattern}(?![\w({{\[*])")
_LINE_START = re.compile(r"[ \t]*(?:#{1,6}[ \t]+|[-*+•][ \t]+(?=\S)|\d{1,2}[.)][ \t]+(?=\S))?")
_TAG = re.compile(r"</?[A-Za-z]\w{1,20}>")
"""<answer>, </think>"""

_CALCULATION = re.compile(r"<<[^<>\n]{0,200}>>")
"""GSM8K's <<8+9=17>>, after which the result stands again."""

_ARROW = re.compile(r"[-=]{1,2}>")
_ELLIPSIS = re.compile(r"\.{2,}|\\[lc]?dots(?![A-Za-z])")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”)\]]{0,3}\s+")
_NEGATIVE = re.compile(r"\b(?:negative|minus) (?=[\d$.])", re.IGNORECASE)
_ANSWER = re.compile(r"\banswers?\b[^.\n]{0,40}?(?:\bis\b|\bare\b|:(?=\s|$)|=) *", re.IGNORECASE)
_VERB = re.compile(r"\b(?:is|are|was|were|equals?)\b|=|\\approx|:(?=\s)")
_CHAIN = re.compile(
    r"(?:(?:\\(?:[A-Za-z]+\d*|[^A-Za-z])|(?<!\w)\.?\d[\w.'’°]*|(?<=[.,/])\d[\w.]*"
    r"|[-+*/^=<>|(){}\[\]$€£¥₹%°…,;:!&~]"
    r"|(?<![\w'’-])[b-hj-zB-HJ-ZΩμ](?![\w'’.-])"
    r"|\b(?:and|or|to|equals?(?: to)?|per ?cent|pct)\b"
    r"|\b(?:plus|minus|times|over|(?:divided|multiplied) by|modulo|mod)\b(?=[\s$(\\]*\d))\s*)++"
)
"""What a number may be a part of: numbers, signs, names of one letter, and words between numbers.
Any other word ends it."""

_EQUALS = re.compile(r"=|\\approx(?![A-Za-z])|\bequals?(?: to)?\b")
_EDGE = re.compile(r"^(?:[\s,;:…&!.)]|and\b|to\b)+|(?:[\s,;:…&!.(]|\band|\bto)+$")
_REMARK = re.compile(r"(?<=\w) \([^()]*=[^()]*\)")
"""An equation in brackets, which is no factor."""

_PER = re.compile(r"(?<=\d) ?/ ?(?=(?!sqrt|sin|cos|tan|log|exp)[a-z]{3})")
"""The line of $2/hour, which no number stands behind."""

_DASH = re.compile(r"^-\s+")
_BEFORE = re.compile(
    r"(?:\bnot|n['’]t|\bthan|\bat (?:least|most)|\bbetween|\btwice|\bdouble|\bhalf"
    r"|\b(?:root|square|cube|half|third|quarter|factorial|inverse|reciprocal|logarithm) of)\s*$",
    re.IGNORECASE,
)
_SPOKEN = "(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|twice|half)"
_BEHIND = re.compile(
    r"(?:and (?:an? )?(?:half|third|quarter)|half|halves|thirds?|quarters?|(?:ten|hundred|thousand)"
    r"ths?|hundreds|thousands|millions|dozens|squared|cubed|factorial|raised|choose|or|pi"
    rf"|(?:more|less|fewer) than (?:\$?\d+|{_SPOKEN})|point (?:\d+|{_SPOKEN}))\b",
    re.IGNORECASE,
)
"""What makes another number of the one that it stands beside."""

_SUBJECT = re.compile(
    r"(?<![\d.,+*/^=-])(\d[\d.,]*)\s+(?:is|are|was|were)\s+"
    r"(?:(?:the|a|an)\s+(?!same\b)|not\b|n['’]t\b|more\b|less\b|\w+er\b)"
)
"""A number that the sentence describes: with another number at its end it states neither."""

_WORD = re.compile(r"[^\W\d_][\w'’/^-]*")
MAX_UNIT_WORDS = 4


def without_markdown(answer: str) -> str:
    """Returns an answer without emphasis, backticks or a heading's marks around all of it."""
    answer = re.sub(r"^#{1,6} +", "", answer.strip())
    while (found := _WRAPPED.fullmatch(answer.rstrip(".").strip())) and found[2] != answer:
        answer = found[2].strip()
    return answer


def says_answer(line: str) -> bool:
    """Returns whether `line` says "the answer is"."""
    return _ANSWER.search(line) is not None


def stated_number(text: str) -> str | None:
    """Returns the text of the number that `text` states, with its unit; None if it states none."""
    sentences = _sentences(text[-TAIL_CHARS:])
    numeric = [one for one in sentences if _has_number(one)]
    if not numeric:
        return None
    answering = next((one for one in reversed(numeric) if says_answer(one)), None)
    sentence = answering or numeric[-1]
    if sentence.rstrip("\"'”)]").endswith("?"):
        return None
    cleaned = _cleaned(sentence)
    markers = [*_ANSWER.finditer(cleaned)]  # none if an unseen character ended the word "answer"
    if answering is None or not markers:
        stated = _stated_in(cleaned, is_first=False)
        return None if stated and _describes_another(cleaned, stated) else stated
    rest = cleaned[markers[-1].end() :]
    chain = _CHAIN.match(rest)
    return _stated_in(rest, is_first=chain is not None and any(map(str.isdigit, chain[0])))


def _sentences(text: str) -> list[str]:
    sentences: list[str] = []
    text = _ARROW.sub("→", _TAG.sub("\n", _CALCULATION.sub("", text)))
    for line in text.splitlines():
        line = _LINE_START.sub("", _ELLIPSIS.sub("…", line), count=1)
        for _ in range(2):  # **_17_**
            line = _EMPHASIS.sub(r"\2", line)
        sentences += _SENTENCE_END.split(line)
    return sentences


def _cleaned(sentence: str) -> str:
    text = _PER.sub(" per ", without_marks(clean(sentence.rstrip(" !"))))
    return _REMARK.sub("", _NEGATIVE.sub("-", text))


def _has_number(sentence: str) -> bool:
    return any(map(str.isdigit, sentence)) or _predicate(_cleaned(sentence)) is not None


def _predicate(sentence: str) -> str | None:
    """Returns what stands behind the last verb, if that is a number and at most a unit."""
    behind = _VERB.split(sentence)[-1].strip()
    found = number(behind)
    is_alone = found and not found.counted.words and not found.is_division
    return behind if is_alone else None


def _stated_in(sentence: str, *, is_first: bool) -> str | None:
    if not is_first and (behind := _predicate(sentence)):
        return behind
    chains = [one for one in _CHAIN.finditer(sentence) if any(map(str.isdigit, one[0]))]
    if not chains:
        return None
    if not is_first and (together := _compound(sentence, chains)):
        return together
    chain = chains[0 if is_first else -1]
    text = _EDGE.sub("", _DASH.sub("", chain[0]) if chain.start() else chain[0])
    text = re.sub(r"(?<=\d) ?\$$", " dollars", _closed(text))
    sides = [side.strip() for side in _EQUALS.split(text)]
    last, first = _numbers(sides[-1]), _numbers(sides[0]) if len(sides) > 1 else []
    if first and sides[-1] and (not last or last[0].is_division):
        return sides[0]  # 17 = 8 + 9, 17 = 34/2
    is_changed = len(sides) == 1 and _BEFORE.search(sentence[: chain.start()])
    if not last or is_changed:
        return None
    end = sentence.rfind(sides[-1], 0, chain.end()) + len(sides[-1])
    return _with_unit(sides[-1], sentence[max(end, 0) :].lstrip())


def _describes_another(sentence: str, stated: str) -> bool:
    subject, found = _SUBJECT.search(sentence), number(stated)
    described = number(subject[1].rstrip(".,")) if subject else None
    return bool(described and found and described.value != found.value)


def _closed(text: str) -> str:
    """Returns `text` without the end of a bracket that began before it."""
    return text.removesuffix(")").rstrip() if text.count(")") > text.count("(") else text


def _compound(sentence: str, chains: list[re.Match[str]]) -> str | None:
    """Returns the 2 hours 30 minutes that end a sentence."""
    for chain in chains[-MAX_COMPOUND:-1]:
        text = sentence[chain.start() :].strip()
        if (found := number(text)) and found.counted.unit:
            return text
    return None


def _numbers(text: str) -> list[Number]:
    return numbers_of(read(text))


def _with_unit(amount: str, behind: str) -> str | None:
    """Returns `amount` with the unit in the words behind it; None if these make another number of
    it."""
    words: list[str] = []
    position = 0
    while len(words) < MAX_UNIT_WORDS and (word := _WORD.match(behind, position)):
        words.append(word[0])
        position = word.end() + (behind[word.end() : word.end() + 1] == " ")
    for count in range(len(words), 0, -1):
        if words[:count] == ["in"] and len(words) > 1:
            continue  # 17 in total
        found = number(text := " ".join((amount, *words[:count])))
        if found and (found.counted.unit or found.counted.scale != 1):
            return text
    return None if _BEHIND.match(behind) else amount
