r"""Extracts the final number of a text that marks no answer. Pure.

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

from services.reward.grading.answers.numbers import MAX_COMPOUND, decimal_comma, number
from services.reward.grading.answers.text import clean, without_marks

MAX_BOXED_CHARS = 20_000
"""Characters at the end of a text that are searched for boxes."""

TAIL_CHARS = 4000
"""Characters at the end of a text that are searched."""

_WRAPPED = re.compile(r"(\*{1,3}|_{1,3}|`{1,3})(?=\S)(.{1,500}?)(?<=\S)\1")
_EMPHASIS = re.compile(rf"(?<![\w)}}\]\\*]){_WRAPPED.pattern}(?![\w({{\[*])")
_LINE_START = re.compile(
    r"[ \t]*(?:>[ \t]+)?(?:#{1,6}[ \t]+|[-*+•][ \t]+(?=\S)|\d{1,2}[.)][ \t]+(?=\S))?"
)
_TAG = re.compile(r"</?[A-Za-z]\w{1,20}>")
"""<answer>, </think>"""

_HTML = re.compile(r"</?(?:b|i|u|em|strong)>")
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
_EDGE = re.compile(r"^(?:[\s,;:…&!.)]|and\b|to\b)+|(?<![\s,;:…&!.(])(?:[\s,;:…&!.(]|\band|\bto)+$")
_REMARK = re.compile(
    r"(?<=\w) \([^()]*=[^()]*\)"
    r"|(?<=\d)((?: [A-Za-z]+){0,4}) \((?=[^()]*[+*/]|[^()]*[a-z]{2})"
    r"(?![^()]*\b(?:or|mod|base|not|maybe|perhaps|thousands?|millions?|hundreds|dozens)\b)[^()]*\d[^()]*\)(?=[.,!]|$)"
)
"""An equation in brackets, which is no factor, or what is said in brackets of the number before."""

_REASON = re.compile(
    r"(?<=\w)(?:,? (?:because|since) [^,;=]*|: \d[^:=]*\band \d[^:=]*"
    r"|, \d[\d,.]* of (?:which|them|whom)\b.*)$"
)
"""The end of a sentence that explains the number before it: a reason, or its parts."""

_PER = re.compile(r"(?<=\d) ?/ ?(?=(?!sqrt|sin|cos|tan|log|exp)[a-z]{3})")
"""The line of $2/hour, which no number stands behind."""

_DASH = re.compile(r"^-\s+")
_BEFORE = re.compile(
    r"(?:\b(?:hardly|no longer|unlike|n?either|nor|under|below|wrong:|such as|for example,?"
    r"|e\.g\.|log)"
    r"|(?:\b(?:not|never|cannot|no)|n['’]t)(?: (?:be|equal|simply))?|\bthan"
    r"|\bbut(?<=anything but)|\ball but|\bjust (?:under|over|below|above)"
    r"|\bdifferent from|\bexcept|\bat (?:least|most)|\bbetween|\btwice"
    r"|\bdouble|\bhalf|\b(?:root|square|cube|half|third|quarter|factorial|inverse|reciprocal"
    r"|logarithm) of)\s*$",
    re.IGNORECASE,
)
_WITHDRAWN = re.compile(
    r"\W*(?:(?:oh|hmm+|um|but|no)\W{1,3}){0,3}(?:wait|actually|sorry|oops|correction|scratch that"
    r"|i mean|on second thoughts?|no(?=[,.;]))\b",
    re.IGNORECASE,
)
"""The start of a sentence that takes back what was said before it."""

_RATHER = re.compile(
    r"[,;-] *(?:I mean|(?:no,? )?wait|no|sorry|or rather|make that)\b[,:]? ", re.IGNORECASE
)
_WRONG = re.compile(
    r"\b(?:wrong|incorrect|mistaken?|error|(?:not|n['’]t) (?:right|correct|true))\b", re.IGNORECASE
)
_WRONG_ANSWER = re.compile(r"\b(?:wrong|incorrect|false) answer", re.IGNORECASE)
_DENIED = re.compile(
    r"\W{0,3} ?(?:is|are|was|were)(?:n['’]t| (?:not|never|wrong|incorrect|false))\b", re.IGNORECASE
)
MAX_BEFORE = 40
"""Characters before a formula that may deny it."""

_SPOKEN = "(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|twice|half)"
_BEHIND = re.compile(
    r"(?:and (?:an? )?(?:half|third|quarter)|half|halves|thirds?|quarters?|(?:ten|hundred|thousand)"
    r"ths?|hundreds|thousands|millions|dozens|squared|cubed|factorial|raised|choose|or|pi"
    r"|doubled|tripled|to the power|multiplied|divided|at (?:most|least)"
    rf"|(?:plus|minus|times|less|(?:more|less|fewer) than) (?:\$?\d+|{_SPOKEN})"
    rf"|point (?:\d+|{_SPOKEN}))\b",
    re.IGNORECASE,
)
"""What changes the number beside it."""

_SUBJECT = re.compile(
    r"(?<![\d.,+*/^=-])(\d[\d.,]*)\s+(?:is|are|was|were|would be)\s+"
    r"(?:(?:the|an?)\s+(?!same\b)|more\b|less\b|\w+er\b|(not\b|n['’]t\b|wrong\b|incorrect\b"
    r"|false\b|too\b))"
)
"""A number of which the sentence says something, and by that states it: 84 is larger than 74."""

_SAID = re.compile(r"\s+(?:is|are|was|were|would be)\s+(?:(?:the|an?)\s+)?(\w+)")
"""The first word that is said of a number."""

_COMPARED = re.compile(r"[<>]|\\(?:le|ge|lt|gt)q?(?![A-Za-z])")
_AMONG = re.compile(
    r"(?<=\d)((?: [a-z]+)?) (?:for|in|over|after|within|during) (?:(?:the|all|his|her|their|these"
    r"|those|every|each) )?(?:other )?\d[\d,.]* [a-z]+[.!]?$"
)
"""What a number was paid or done for: $64 for 16 glasses."""

_OPERATION = re.compile(
    r"\b(?:add|subtract|deduct|multipl(?:y|ie)|divid|compar|tak)(?:e?[sd]|e|ing|ed)?\b\D{0,20}"
    r"\d[\d.,]*+\D{0,30}?\b(?:from|to|by|with|and|against)\s+(?:the\s+)?(?:number\s+)?\W?\d"
    r"[\d.,]*+\D*+$",  # possessive, else a run of commas is tried from each of them
    re.IGNORECASE,
)
"""A sentence that ends with an operation on two numbers and states no result: subtract 78 from
84."""

_HEDGE = re.compile(r"\b(?:maybe|perhaps|else|unless|if not|otherwise|alternatively)\b")
"""A word between two numbers, each of which may be the answer. One pattern for the number before
it, the word and the number behind it would take quadratic time."""

_NUMBER_BEHIND = re.compile(r"[^.\d]*\d")

_CHECK = re.compile(
    r"\W*(?:(?:double.?|sanity |to |let.?s )?check|(?:to |let.?s )?verif\w+|proof)\b",
    re.IGNORECASE,
)
"""The start of a sentence behind the answer that only tests it."""

_PROSE = re.compile(
    r"\banswer\b|^(?:so|thus|hence|therefore)\b|[A-Za-z]{3,} [a-z]{3,}.*="
    r"|\b[a-z]+ (?:is|are|was|were|has|have|takes?|costs?|equals?)\b",
    re.IGNORECASE,
)
"""A row that is a sentence."""

_SUMS = re.compile(r"[\d\s.,+*/()^-]+=[^=A-Za-z]*\d")
_DIGITS = re.compile(r"\d+(?:[.,/]\d+)*")
_WORD = re.compile(r"[^\W\d_][\w'’/^-]*")
MAX_UNIT_WORDS = 4


_BOX = re.compile(r"\\\\?(?:boxed|fbox)\s*(?:\{|([^\s{$][^\s$]*))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_HASH = re.compile(r"####[ \t]*([^\n]+)")
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL | re.IGNORECASE)
_FINAL = re.compile(
    r"final answer is:? *(?:\$([^$\n]+)\$|(-?[\d.,/]*\d)(?![\w^/*+]))(?=[ .!]*(?:\n|$|I hope))",
    re.IGNORECASE,
)
_JOINT = re.compile(r"(?:[\s$,;.&()]|\\[()\[\],;! ]|\\q?quad|\\text ?\{ ?(?:and|or) ?\}|and|or)*")
_SEPARATOR = re.compile(r"\b(?:and|or)\b|,|;")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
MAX_BOXES = 100
"""Last boxes of a text that are read."""

MAX_BETWEEN = 70
"""Characters between two boxes of one answer."""


def marked_answer(text: str, *, is_several: bool = False) -> tuple[str, str] | None:
    r"""Returns the marked answer of a text and the mark: what "the final answer is" says behind the
    last box, or the last `\boxed{}`, or else what follows the last `####`; None if there is none.

    Boxes with nothing but commas, `and` or `or` between them are one answer of several parts, and
    with `is_several` those in one sentence are. An empty box is none.
    """
    boxes = _boxes(text + "}" * is_several)
    said = [*_FINAL.finditer(text, boxes[-1][2] if boxes else 0)]
    if said and (boxes or is_several):
        return (said[-1][1] or said[-1][2]).strip(), "final answer"
    if boxes:
        (last, start, _), parts = boxes[-1], [boxes[-1][0]]
        for content, begin, end in reversed(boxes[:-1]):
            between = text[end:start]
            is_joint = _JOINT.fullmatch(between) or (
                is_several and len(between) < MAX_BETWEEN and _SEPARATOR.search(between)
            )
            if not is_joint:
                break
            parts += [content] if content not in parts else []
            start = begin
        return (", ".join(reversed(parts)) if len(parts) > 1 else last), "boxed"
    found = _HASH.findall(text)
    return (found[-1].strip(), "after ####") if found else None


def tagged(text: str) -> str:
    """Returns what the last `<answer>` holds, or all of a text without one."""
    found = [one for one in _TAGGED.findall(text) if one.strip()]
    return found[-1].strip() if found else text


def _boxes(text: str) -> list[tuple[str, int, int]]:
    """Returns what each box holds, with its first and last position."""
    start = max(0, len(text) - MAX_BOXED_CHARS)
    ends: dict[int, int] = {}
    is_open: list[int] = []
    for brace in _BRACE.finditer(text, start):
        if brace[0] == "{":
            is_open.append(brace.end())
        elif brace[0] == "}" and is_open:
            ends[is_open.pop()] = brace.start()
    boxes: list[tuple[str, int, int]] = []
    for box in [*_BOX.finditer(text, start)][-MAX_BOXES:]:
        if box[1]:
            boxes.append((box[1].rstrip(".,;\\)]"), box.start(), box.end()))
        elif (end := ends.get(box.end())) and (content := text[box.end() : end].strip()):
            boxes.append((content, box.start(), end + 1))
    return [one for one in boxes if "\\boxed" not in one[0]]


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
    sentences = _kept(_sentences(text[-TAIL_CHARS:]))
    numeric: list[str] = []
    for sentence in sentences:
        if numeric and _CHECK.match(sentence):
            break
        numeric += [sentence] if _has_number(sentence) else []
    numeric += [one for one in sentences if says_answer(one) and _has_number(one)]
    if not numeric:
        return None
    answering = next((one for one in reversed(numeric) if says_answer(one)), None)
    sentence = answering or numeric[-1]
    if sentence.rstrip("\"'”)]").endswith("?"):
        return None
    cleaned = _RATHER.split(_cleaned(sentence))[-1]
    if _is_hedged(cleaned) or _WRONG_ANSWER.search(cleaned):
        return None
    markers = [*_ANSWER.finditer(cleaned)]  # none if an unseen character ended the word "answer"
    if answering is None or not markers:
        if subject := _SUBJECT.search(cleaned):
            described, stated = subject[1].rstrip(".,"), _stated_in(cleaned, is_first=False)
            values = [found and found.value for found in map(number, (described, stated or ""))]
            if subject[2] or _says_the_same_of_two(cleaned):
                return None
            return stated if values[0] == values[1] else described
        return None if _OPERATION.search(cleaned) else _stated_in(cleaned, is_first=False)
    rest = cleaned[markers[-1].end() :]
    chain = _CHAIN.match(rest)
    is_first = chain is not None and any(map(str.isdigit, chain[0]))
    if not is_first and _OPERATION.search(rest):
        return None
    return _stated_in(rest, is_first=is_first)


def _says_the_same_of_two(sentence: str) -> bool:
    """Returns whether one thing is said of two numbers, as in 59 is larger, 31 is larger."""
    said: dict[str, str] = {}
    for subject in _SUBJECT.finditer(sentence):
        given = subject[1].rstrip(".,")
        word = _SAID.match(sentence, subject.end(1))
        if word and said.setdefault(word[1].lower(), given) != given:
            return True
    return False


def _kept(sentences: list[str]) -> list[str]:
    """Returns the sentences from the last one that takes back those before it. If no number
    follows, they stand, unless it calls them wrong."""
    for i in range(len(sentences) - 1, 0, -1):
        if _WITHDRAWN.match(sentences[i]):
            behind = sentences[i:]
            is_replaced = any(map(_has_number, behind)) or any(map(_WRONG.search, behind))
            return behind if is_replaced else sentences
    return sentences


def is_denied(text: str, formula: re.Match[str]) -> bool:
    """Returns whether the words beside a formula of `text` say that it is not the answer, or make
    another value of it: not $x + 1$, twice $x$."""
    before = text[max(0, formula.start() - MAX_BEFORE) : formula.start()]
    return bool(_BEFORE.search(before) or _DENIED.match(text, formula.end()))


def stated_answer(text: str) -> str:
    """Returns the answer that a row's sentence states ("The answer is 17"), and any other row
    unchanged."""
    is_equation = _SUMS.fullmatch(text)
    if number(text) or not (is_equation or _PROSE.search(text)):
        return text
    said = [*_ANSWER.finditer(text)]
    if not (said or "=" in text or len(_DIGITS.findall(text)) == 1):
        return text
    behind = _SENTENCE_END.split(text[said[-1].end() :])[0] if said else ""
    return stated_number(text) or behind.strip() or text


def _is_hedged(sentence: str) -> bool:
    """Returns whether a word such as "perhaps" stands between two numbers."""
    first = re.search(r"\d", sentence)
    return first is not None and any(
        _NUMBER_BEHIND.match(sentence, hedge.end())
        for hedge in _HEDGE.finditer(sentence, first.end())
    )


def _sentences(text: str) -> list[str]:
    sentences: list[str] = []
    text = re.sub(r"\\! *", "", _HTML.sub("", text))
    text = _ARROW.sub("→", _TAG.sub("\n", _CALCULATION.sub("", text)))
    for line in text.splitlines():
        line = _LINE_START.sub("", _ELLIPSIS.sub("…", line), count=1)
        sentences += _SENTENCE_END.split(without_emphasis(line))
    return sentences


def without_emphasis(text: str) -> str:
    for _ in range(2):  # **_17_**
        text = _EMPHASIS.sub(r"\2", text)
    return text


def _cleaned(sentence: str) -> str:
    text = _PER.sub(" per ", without_marks(clean(sentence.rstrip(" !"))))
    text = _REMARK.sub(r"\1", _NEGATIVE.sub("-", text))
    reason = _REASON.search(text)
    if reason and any(map(str.isdigit, text[: reason.start()])):
        text = text[: reason.start()]
    return _AMONG.sub(r"\1", text)


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
    if "\\approx" in text:
        return text  # compared as a chain
    compared = [side.strip() for side in _COMPARED.split(text)]
    if len(compared) > 1 and all(map(number, compared)):
        return compared[0]
    sides = [side.strip() for side in _EQUALS.split(text)]
    sides[-1] = decimal_comma(sides[-1])
    last, first = number(sides[-1]), number(sides[0]) if len(sides) > 1 else None
    if last and sides[0].isdecimal() and sides[-1].isdecimal() and int(sides[0]) != int(sides[-1]):
        return None  # 18 = 17
    if any(_SEPARATOR.search(_GROUPED.sub("", side)) for side in sides[1:] if not number(side)):
        return None  # 17 = 17, 18
    if first and sides[-1] and (not last or last.is_division):
        return sides[0]  # 17 = 8 + 9, 17 = 34/2
    is_changed = not any(sides[:-1]) and _BEFORE.search(sentence[: chain.start()])
    if not last or is_changed:
        return None
    end = sentence.rfind(sides[-1], 0, chain.end()) + len(sides[-1])
    return _with_unit(sides[-1], sentence[max(end, 0) :].lstrip())


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
