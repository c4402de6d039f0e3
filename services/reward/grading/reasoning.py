"""What the reasoning part of a completion is, and the answer after it: the only text that most
graders read.

    <think>...</think>answer        also several thoughts, and other tags
    ...</think>answer               the chat template or the prompt opened the thought
    <think>...                      a thought that never ends: the answer is ""
    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>answer
    analysis...assistantfinalanswer harmony as samplers give it, without special tokens

A tag in quotes, backticks or a string of a program's line does not count, nor does one in a fenced
block outside a thought.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shared.wire import ScoreItem

THINK = ("<think>", "</think>")

MAX_TAGS = 1000
"""Last tags of a text that are looked at: each takes some microseconds."""

WINDOW = 200
"""Characters of a tag's line, on either side of it, that are searched for backticks."""

_HARMONY_HEAD = "<|start|>assistant"
_CHANNEL = r"<\|channel\|>\s*(\w+)[^<\n]*(?:<\|constrain\|>[^<\n]*)?<\|message\|>"
_SHOWN = re.compile(_CHANNEL)
_HIDDEN = re.compile(rf"{_CHANNEL}|(?:\A|assistant)(analysis|commentary|final)")
_END = re.compile(r"<\|(?:return|end|call)\|>")
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019"}
_STRING = re.compile(r"(?<!\w)[rbfu]{0,2}(['\"])(?:(?!\1)[^\\\n]|\\.)*\1")
"""A string of a program's line. An apostrophe within or behind a word begins none."""

_BLANK_LINES = re.compile(r"\A\s*\n")


def strip_reasoning(item: ScoreItem, reasoning: bool | tuple[str, str]) -> ScoreItem:
    """Returns the item with its answer as the completion. `reasoning`: the tags, True for `<think>`
    and harmony's channels, False for none."""
    if reasoning is False:
        return item
    tags = None if reasoning is True else reasoning
    answer = answer_of(item.completion, prompt_end(item), tags)
    return item if answer == item.completion else item.model_copy(update={"completion": answer})


def prompt_end(item: ScoreItem) -> str:
    """Returns the end of the text that the completion follows. Where the sampler did not say it,
    it is the prompt's: what a chat template adds to messages is not known."""
    if item.prompt_end is not None:
        return item.prompt_end
    if isinstance(item.prompt, str):
        return item.prompt[-WINDOW:]
    last = item.prompt[-1] if item.prompt else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    return content[-WINDOW:] if isinstance(content, str) else ""


def opens_thought(end: str, tags: tuple[str, str] = THINK) -> bool:
    """Returns whether a prompt with this end has begun the thought."""
    return end.rstrip().endswith(tags[0])


def answer_of(text: str, end: str = "", tags: tuple[str, str] | None = None) -> str:
    """Returns what follows the reasoning part of a completion, without blank lines before it; all
    of a completion that has none. `end` is the end of the prompt; without `tags` they are `THINK`,
    and harmony's channels are known too."""
    if tags is None and (found := _final_channel(text, end)) is not None:
        return found
    tags = tags or THINK
    in_thought = opens_thought(end, tags)
    if not in_thought and not any(tag in text for tag in tags):
        return text
    skipped, *last = text.rsplit(tags[1], MAX_TAGS)
    if len(last) == MAX_TAGS:
        return answer_of(text[len(skipped) + len(tags[1]) :], "", tags)
    begin = _Tags(text, tags).answer_begin(in_thought)
    return _BLANK_LINES.sub("", text[begin:]) if begin else text


class _Tags:
    """The tags and fences of a text."""

    def __init__(self, text: str, tags: tuple[str, str]) -> None:
        self._text = text
        self._open, self._close = tags
        marks = "|".join(map(re.escape, tags))
        begin = rf"(?:^|(?<={re.escape(self._close)}))"
        self._mark = re.compile(rf"{begin}[ \t]*(`{{3,}}|~{{3,}})|{marks}", re.MULTILINE)

    def answer_begin(self, in_thought: bool) -> int:
        """Returns where the answer begins: after the last thought."""
        if in_thought:
            close = self._thought_end(0)
            if close < 0:
                return len(self._text)
            return self._after(close + len(self._close))
        return self._after(0)

    def _after(self, begin: int) -> int:
        """Returns where the answer begins in the text from `begin` on, which is no thought."""
        position, fence = begin, ""
        while mark := self._mark.search(self._text, position):
            position = mark.end()
            if mark[1]:
                fence = self._fence_after(fence, mark)
            elif fence or self._is_quoted(mark.start(), mark.end()):
                continue
            elif mark[0] == self._close:
                begin = position
            elif (close := self._thought_end(position)) >= 0:
                position = close + len(self._close)
                if not self._are_quoted(mark.start(), position):
                    begin = position
            elif not self._text[self._line_begin(mark.start(), begin) : mark.start()].strip():
                return len(self._text)
            else:
                return begin  # a tag that the text names: no thought ends after it
        return begin

    def _thought_end(self, position: int) -> int:
        """Returns where the tag stands that ends the thought at `position`, -1 if none does."""
        for at in self._closes(position):
            if not self._is_quoted(at, at + len(self._close)):
                return at
        return -1

    def _closes(self, position: int) -> Iterator[int]:
        while (at := self._text.find(self._close, position)) >= 0:
            yield at
            position = at + len(self._close)

    def _line_begin(self, position: int, lowest: int) -> int:
        return max(self._text.rfind("\n", lowest, position) + 1, lowest)

    def _fence_after(self, fence: str, mark: re.Match[str]) -> str:
        """Returns the fence of the block that is open after this one; "" if none is."""
        end = self._text.find("\n", mark.end())
        rest = self._text[mark.end() : end if end >= 0 else len(self._text)]
        if not fence:
            return "" if "`" in rest else mark[1]
        closes = mark[1].startswith(fence) and not rest.strip()
        return "" if closes else fence

    def _is_quoted(self, start: int, end: int) -> bool:
        if self._are_quoted(start, end):
            return True
        line = self._line_begin(start, max(start - WINDOW, 0))
        line_end = self._text.find("\n", end, end + WINDOW)
        after = self._text[end : line_end if line_end >= 0 else end + WINDOW]
        if self._text.count("`", line, start) % 2 == 1 and "`" in after:
            return True
        strings = _STRING.finditer(self._text, line, end + len(after))
        return any(one.start() < start and end <= one.end() for one in strings)

    def _are_quoted(self, start: int, end: int) -> bool:
        """Returns whether a quotation mark stands on either side."""
        before, after = self._text[max(start - 1, 0) : start], self._text[end : end + 1]
        return bool(after) and _QUOTES.get(before) == after


def _final_channel(text: str, end: str) -> str | None:
    """Returns the text of harmony's final channel, "" if another channel is the last; None of a
    completion without channels."""
    _, is_known, opened = end.rpartition(_HARMONY_HEAD)
    if not is_known and not _has_channels(text):
        return None
    whole = (opened if is_known else "") + text
    heads = list((_SHOWN if "<|channel|>" in text else _HIDDEN).finditer(whole))
    if not heads:
        return None
    finals = [head for head in heads if "final" in head.groups()]
    last = heads[-1] if "<|channel|>" in text else next(iter(finals), heads[-1])
    if "final" not in last.groups():
        return ""
    return _END.split(whole[last.end() :], maxsplit=1)[0]


def _has_channels(text: str) -> bool:
    """Returns whether a text begins with harmony's channel, special tokens shown or not."""
    if text.lstrip().startswith(("<|channel|>", f"{_HARMONY_HEAD}<|channel|>")):
        return True
    if not re.match(r"(?:analysis|commentary)[^\s:,.]", text):
        return False
    return "assistantfinal" in text or re.match(r"analysis[A-Z]", text) is not None
