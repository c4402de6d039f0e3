"""Graders that compare texts: `exact_match`, OpenAI's `string_check` and `text_similarity`; and
`regex`, which searches completions for a pattern of the `regex` package: Python's and more.

A pattern may take any time and memory to compile, and exponential time to search some texts, so a
limited process does both. `/graders/validate` refuses an unsuitable pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field

from services.reward.grading import templates
from services.reward.grading.failures import wrong_row
from services.reward.grading.limited.pool import Call, NoValue
from services.reward.grading.limited.texts import has_words
from services.reward.grading.registry import (
    Column,
    GraderTools,
    ItemGrader,
    Params,
    grader,
    right_or_wrong,
)
from shared.errors import BadRequest
from shared.job import RewardSpec
from shared.wire import Part, ScoreItem


class ExactMatchParams(Params):
    """The expected text, and how a completion is compared with it."""

    column: Column = "answer"
    """The column of the expected text or whole number."""

    strip: bool = True
    """Blanks around either side do not count."""

    ignore_case: bool = False
    """Capital and small letters are the same."""


@grader("exact_match")
class ExactMatch(ItemGrader[ExactMatchParams]):
    """1 for a completion equal to the row's `column`, else 0.

    All of the completion counts: a list of all options is no option. A row whose `column` is empty
    is refused, for an empty completion would earn 1.
    """

    has_full_mark = True

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def reference(self, row: Mapping[str, Any]) -> str:
        return str(self._wanted(row))

    def _wanted(self, row: Mapping[str, Any]) -> str | int:
        value = row[self.params.column]
        got = f"column {self.params.column!r} is {value!r:.80}"
        if type(value) not in (str, int):
            raise wrong_row(f"{got}; expected text or a whole number")
        if self._normal(str(value)) == "":
            raise wrong_row(f"{got}, which an empty completion equals; expected text")
        return value

    async def grade_item(self, item: ScoreItem) -> Part:
        value = self._wanted(item.row)
        right = self._normal(item.completion) == self._normal(str(value))
        return right_or_wrong(right, "" if right else f"wanted {value!r:.80}")

    def _normal(self, text: str) -> str:
        text = text.strip() if self.params.strip else text
        return text.casefold() if self.params.ignore_case else text


COMPLETION = "sample.output_text"


class TwoTextsParams(Params):
    """Two texts, made from templates."""

    name: str = ""
    """What OpenAI's grader objects call it. What metrics call it is the reward's own `name`."""

    input: str
    """A template, usually `{{ sample.output_text }}`, which is the completion."""

    reference: str
    """A template of what it is compared with, for example `{{ item.answer }}`, which is the row's
    column `answer`."""


T = TypeVar("T", bound=TwoTextsParams)


class TwoTextsGrader(ItemGrader[T]):
    """A grader that compares `input` with `reference`."""

    async def check(self, columns: Sequence[str]) -> None:
        for template in (self.params.input, self.params.reference):
            templates.check(template, columns, self.spec.label)

    def texts(self, item: ScoreItem) -> list[str]:
        """Returns both texts for the item."""
        return [
            templates.render(template, item)
            for template in (self.params.input, self.params.reference)
        ]

    def reference_of(self, row: Mapping[str, Any]) -> str | None:
        """Returns the reference's text for a row; None if it has the completion in it."""
        if COMPLETION in self.params.reference:
            return None
        return templates.render(self.params.reference, _without_completion(row))


def _without_completion(row: Mapping[str, Any]) -> ScoreItem:
    return ScoreItem(prompt="", completion="", row=dict(row))


class StringCheckParams(TwoTextsParams):
    """Two texts, made from templates, and how they compare."""

    type: Literal["string_check"] = "string_check"
    """The grader's name, as OpenAI's grader objects have it."""

    operation: Literal["eq", "ne", "like", "ilike"]
    """"eq": the same. "ne": not the same. "like": `input` contains `reference`. "ilike": the same,
    whatever the case."""


@grader("string_check")
class StringCheck(TwoTextsGrader[StringCheckParams]):
    """1 if `input` and `reference`, two templates, compare as `operation` says, else 0. As OpenAI's
    grader of that name.

    "like" and "ilike" are about what a text contains: a completion that lists all options, or
    copies a prompt with the answer in it, earns 1. With "ne" any other text does, an empty one too.
    To grade an answer use "eq", or `regex` with the row's column.
    """

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Returns the text that the completion has to be; None if `input` is not the completion
        itself, or other completions are right too."""
        is_wanted = self.params.operation == "eq" and templates.is_output(self.params.input)
        return self.reference_of(row) if is_wanted else None

    async def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises GradingFailed for an empty reference, which every text contains, and which an
        empty completion equals."""
        if self.reference_of(row) == "" and self.params.operation in ("like", "ilike"):
            raise wrong_row("the reference is empty, and every text contains that")
        if self.reference(row) == "":
            raise wrong_row("the reference is empty, and an empty completion equals that")

    async def grade_item(self, item: ScoreItem) -> Part:
        await self.check_row(item.row)
        given, wanted = self.texts(item)
        holds = {
            "eq": given == wanted,
            "ne": given != wanted,
            "like": bool(wanted) and wanted in given,
            "ilike": bool(wanted) and wanted.casefold() in given.casefold(),
        }[self.params.operation]
        fault = f"not {given!r:.80} {self.params.operation} {wanted!r:.80}"
        return right_or_wrong(holds, "" if holds else fault)


MAX_CHARS = 20_000
CPU_S = 10.0
"""METEOR of two texts of 20,000 characters takes about 2 s."""


class TextSimilarityParams(TwoTextsParams):
    """Two texts, made from templates, and how their similarity is measured."""

    type: Literal["text_similarity"] = "text_similarity"
    """The grader's name, as OpenAI's grader objects have it."""

    evaluation_metric: Literal[
        "cosine",
        "fuzzy_match",
        "bleu",
        "gleu",
        "meteor",
        "rouge_1",
        "rouge_2",
        "rouge_3",
        "rouge_4",
        "rouge_5",
        "rouge_l",
    ]
    """How similarity is measured. "cosine" is refused: it needs an embedding model."""

    pass_threshold: float | None = None
    """A similarity of at least this earns 1, and a lower one 0. None: the similarity itself is the
    reward."""


@grader("text_similarity")
class TextSimilarity(TwoTextsGrader[TextSimilarityParams]):
    """How similar `input` and `reference`, two templates, are by `evaluation_metric`, 0 to 1. As
    OpenAI's grader of that name.

    It measures shared words or letters, not what is true: frequent words alone, a prompt with some
    of the words, and the reference with a `not` added earn a part. To "rouge_1" the order
    of words is nothing. A `pass_threshold` pays for no less than that similarity.
    """

    pure = True

    async def check(self, columns: Sequence[str]) -> None:
        if self.params.evaluation_metric == "cosine":
            raise BadRequest(
                f"reward {self.spec.label!r}: 'cosine' needs an embedding model, which this "
                "service does not have"
            )
        await super().check(columns)

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._check_reference(self.texts(_without_completion(row))[1])

    def _check_reference(self, wanted: str) -> None:
        """Raises GradingFailed for a row's reference to which no text can be similar."""
        by_words = self.params.evaluation_metric != "fuzzy_match"
        is_comparable = has_words(wanted) if by_words else wanted.strip()
        if COMPLETION not in self.params.reference and not is_comparable:
            fault = f"the reference is {wanted!r:.80}, which has no word to be similar to"
            raise wrong_row(fault)

    def content(self, item: ScoreItem) -> Any:
        return self.texts(item)

    async def grade_item(self, item: ScoreItem) -> Part:
        given, wanted = self.texts(item)
        self._check_reference(wanted)
        if max(len(given), len(wanted)) > MAX_CHARS:
            lengths = f"texts of {len(given)} and {len(wanted)} characters"
            return right_or_wrong(False, f"{lengths}, at most {MAX_CHARS}")
        arguments = self.params.evaluation_metric, given, wanted
        call = Call("limited.texts", "similarity", arguments, CPU_S)
        similarity = await self.tools.limited.run(call)
        threshold = self.params.pass_threshold
        value = similarity if threshold is None else float(similarity >= threshold)
        return Part(
            value=value,
            verdict="ok" if value else "wrong",
            detail=f"{self.params.evaluation_metric} {similarity:.4f}",
        )


COMPILE_S = 2.0
"""CPU time that compiling a pattern may take. Ordinary ones take a hundredth of that."""

MEMORY_MIB = 1024
"""Memory that compiling and searching may take, the process and its libraries included."""


class RegexParams(Params):
    """A pattern, and the group of its match that is compared with the row."""

    pattern: str = Field(min_length=1, max_length=2000)
    """A pattern of the `regex` package."""

    mode: Literal["search", "full"] = "search"
    """The pattern matches a part of the completion ("search"), or all of it without the blanks
    around it ("full")."""

    which: Literal["first", "last"] = "last"
    """Which match of "search" counts."""

    column: Column | None = None
    """The column that must be equal to the text of `group`, without the blanks around both. None:
    it is enough that the pattern matches."""

    group: int | str = 0
    """A number or a name; 0 is the whole match."""

    ignore_case: bool = False
    """Capital and small letters are the same."""

    multiline: bool = False
    """`^` and `$` also match at the beginning and the end of each line."""

    dotall: bool = False
    """`.` also matches the end of a line."""

    timeout_s: float = Field(default=1.0, gt=0, le=10)
    """Seconds of CPU time for one search. A completion on which the pattern takes longer earns
    0."""

    def flags(self) -> list[str]:
        """Returns the names of the flags in the `regex` package."""
        flags = {
            "IGNORECASE": self.ignore_case,
            "MULTILINE": self.multiline,
            "DOTALL": self.dotall,
        }
        return [flag for flag, wanted in flags.items() if wanted]


@grader("regex")
class Regex(ItemGrader[RegexParams]):
    """1 for a completion in which the pattern is found (and whose group is the row's `column`, if
    one is named), else 0.

    Without `column` any text with a match earns 1, a list of all options too: that is a reward for
    a form. With it one match decides, the last or the first, however many there are.
    """

    def __init__(self, spec: RewardSpec, params: RegexParams, tools: GraderTools) -> None:
        super().__init__(spec, params, tools)
        self._is_checked = False

    async def check(self, columns: Sequence[str]) -> None:
        await super().check(columns)
        if not self._is_checked:
            await self._check_pattern()
            self._is_checked = True

    async def _check_pattern(self) -> None:
        pattern, group = self.params.pattern, self.params.group
        call = Call(
            "limited.texts", "groups", (pattern, self.params.flags()), COMPILE_S, MEMORY_MIB
        )
        try:
            known = await self.tools.limited.run(call)
        except NoValue as error:
            raise BadRequest(
                f"reward {self.spec.label!r}: pattern {pattern!r:.80} cannot be compiled within "
                f"{COMPILE_S:g} s and {MEMORY_MIB} MiB: {error.detail}"
            ) from error
        if "fault" in known:
            raise BadRequest(
                f"reward {self.spec.label!r}: pattern {pattern!r:.80} is no regular expression: "
                f"{known['fault']}"
            )
        is_there = (
            group in known["names"] if isinstance(group, str) else 0 <= group <= known["count"]
        )
        if not is_there:
            raise BadRequest(
                f"reward {self.spec.label!r}: group {group!r} is not in pattern {pattern!r:.80}, "
                f"which has {known['count']} groups"
            )

    async def check_row(self, row: Mapping[str, Any]) -> None:
        self._wanted(row)

    def _wanted(self, row: Mapping[str, Any]) -> str:
        wanted = row[self.params.column] if self.params.column is not None else ""
        if type(wanted) not in (str, int):
            raise wrong_row(f"column {self.params.column!r} is {wanted!r:.80}; expected text")
        if self.params.column is not None and not str(wanted).strip():
            fault = "which a group that matches nothing equals; expected text"
            raise wrong_row(f"column {self.params.column!r} is {wanted!r:.80}, {fault}")
        return str(wanted)

    async def grade_item(self, item: ScoreItem) -> Part:
        wanted = self._wanted(item.row)
        found = await self._found(item.completion)
        if found is None:
            return right_or_wrong(False, "the pattern was not found")
        if self.params.column is None:
            return right_or_wrong(True, f"found {found!r:.80}")
        right = found.strip() == wanted.strip()
        return right_or_wrong(right, f"found {found!r:.80}, wanted {wanted!r:.80}")

    async def _found(self, text: str) -> str | None:
        """Returns the text of the group ("" if it took no part in the match); None if the pattern
        did not match. Raises NoValue."""
        params = self.params
        searched = (
            params.pattern,
            params.flags(),
            params.mode,
            params.which,
            params.group,
            text,
            params.timeout_s,
        )
        # The search normally stops itself at its limit. If it does not, the kernel's limit ends it.
        call = Call("limited.texts", "find", searched, COMPILE_S + 2 * params.timeout_s, MEMORY_MIB)
        reply = await self.tools.limited.run(call)
        if reply["late"]:
            raise NoValue("time_limit", f"the pattern took longer than {params.timeout_s:g} s")
        return reply["found"]
