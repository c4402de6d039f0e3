"""What the reasoning part of a completion is, and the answer after it: the only text that most
graders read.

    <think>...</think>answer        also several thoughts, and other tags
    ...</think>answer               the chat template or the prompt opened the thought
    <think>...                      a thought that never ends: the answer is ""
    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>answer
    analysis...assistantfinalanswer harmony as samplers give it, without special tokens

A tag in quotes or backticks, such as one in a string of a program, does not count.
"""

from __future__ import annotations

import re

from shared.wire import ScoreItem

THINK = ("<think>", "</think>")

WINDOW = 200
"""Characters of a tag's line, on either side of it, that are searched for quotes."""

_HARMONY_HEAD = "<|start|>assistant"
_CHANNEL = r"<\|channel\|>\s*(\w+)[^<\n]*(?:<\|constrain\|>[^<\n]*)?<\|message\|>"
_SHOWN = re.compile(_CHANNEL)
_HIDDEN = re.compile(rf"{_CHANNEL}|(?:\A|assistant)(analysis|commentary|final)")
_END = re.compile(r"<\|(?:return|end|call)\|>")
_OPENING_QUOTE = "(?<!\\w)[rbfu]{0,2}[`'\"\u201c\u2018]"
"""Of a text, or of a string of a program. An apostrophe within or behind a word is none."""

_UNQUOTED = f"[^\\n`'\"\u201d\u2019]{{0,{WINDOW}}}"
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
    in_thought, begin = opens_thought(end, tags), 0
    if not any(tag in text for tag in tags):  # most texts; the pattern takes 0.1 s for a long one
        return "" if in_thought else text
    for mark in _marks(tags).finditer(text):
        if mark["closes"]:
            in_thought, begin = False, mark.end()
        elif mark["opens"] and not in_thought:
            line = text[max(begin, mark.start() - WINDOW) : mark.start()].rpartition("\n")[2]
            in_thought = not line.strip()  # within a line the text may only name the tag
    if in_thought:
        return ""
    return _BLANK_LINES.sub("", text[begin:]) if begin else text


def _marks(tags: tuple[str, str]) -> re.Pattern[str]:
    """Returns the pattern of a tag, and of quotes with a tag in them, which count as none."""
    opens, closes = map(re.escape, tags)
    quoted = rf"{_OPENING_QUOTE}{_UNQUOTED}?(?:{opens}|{closes}){_UNQUOTED}[`'\"\u201d\u2019]"
    return re.compile(rf"{quoted}|(?P<opens>{opens})|(?P<closes>{closes})")


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
