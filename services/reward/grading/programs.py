"""Shared by the graders that run programs: finds the program in a completion, and makes a verdict
of how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from services.reward.grading.failures import GradingFailed
from shared.wire import Execution, Verdict

KEEP_CHARS = 1000
"""Characters that are kept of a program's output."""

MAX_SEARCHED_CHARS = 1 << 18
"""Characters at a completion's end that are searched for fences."""

MAX_FENCES = 500
"""Last lines with a fence that count: each takes some microseconds."""

MAX_LINE_CHARS = 500
"""Characters of a line that are looked at to tell code from text."""

_BLANK = " \t\r\u00a0\u200b\ufeff"
"""Characters that may stand before a fence, and between the fence and its mark."""

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*(.*)")
_PYTHON = re.compile(
    r"\{?[ \t]*\.?(?:lang(?:uage)?-)?(?:i?python|py)[\d.]*(?![\w+#])", re.IGNORECASE
)
_CODE = re.compile(
    r"""(?:async[ ]def|def|class|import|raise|assert|yield|del|global|nonlocal)[ ]+[\w(*]
    |(?:return|pass|break|continue|try[ ]*:)(?!\w)|from[ ]+[\w.]+[ ]+import(?!\w)
    |(?:if|for|while|with)[ (].*:[ \t]*(?:\#.*)?$
    |@\w|[rbu]?(?:\x22{3}|\x27{3})
    |[\w.]+(?:\[[^\]]*\])*(?:[ ]*,[ ]*[\w.]+)*[ ]*(?::[^=]*)?(?:[-+*/%&|^]|//|\*\*|<<|>>)?=(?!=)
    |\w[\w.]*\(.*\)[ \t]*(?:\#.*)?$
    |[\d(\[{+-][\d.,()\[\]{}:+*/% -]*$""",
    re.VERBOSE,
)
"""A line that begins a program, and no text."""

_MARK_LINE = re.compile(r"\s*(?:i?python|py)[\d.]*[ \t]*\r?\n", re.IGNORECASE)
"""The mark of a fence of which the prompt has the backticks."""

_FENCE_IN_CODE = re.compile(
    r"\x22{3}.*?(?:\x22{3}|\Z)|\x27{3}.*?(?:\x27{3}|\Z)"
    r"|\x22(?:[^\x22\\\n]|\\.)*\x22|\x27(?:[^\x27\\\n]|\\.)*\x27"
    r"|\\.|#[^\n`]*|(?P<fence>`{3,}|^[ \t]*~{3,})",
    re.MULTILINE | re.DOTALL,
)
"""A fence; also strings, in which a fence is text, and comments, which may have quotes."""

_BEGIN = re.compile(r"^[ \t]*\[BEGIN\][ \t]*\r?\n", re.MULTILINE)
_DONE = re.compile(r"^[ \t]*\[DONE\]", re.MULTILINE)
"""The lines around a program in the prompts of MBPP."""

_HARD_INDENT = re.compile(r"^[ \t]*\u00a0[ \t\u00a0]*", re.MULTILINE)


@dataclass(frozen=True)
class _Block:
    """A fenced block: the text after its opening fence, and its content."""

    info: str
    text: str

    @property
    def is_python(self) -> bool:
        return _PYTHON.match(self.info) is not None


def program_of(completion: str, fit: Callable[[str], int] | None = None) -> str:
    """Returns the text of `programs_in` for which `fit` is highest; of several such texts the
    last."""
    texts = programs_in(completion)
    fits = [fit(text) if fit else 0 for text in texts]
    return next(text for text, one in zip(texts[::-1], fits[::-1], strict=True) if one == max(fits))


def programs_in(completion: str) -> list[str]:
    """Returns the texts that may be a completion's program: its fenced blocks without a mark, then
    its blocks that are marked as Python; the whole completion if there is neither. Empty lines
    around a text are removed.

    A block without a closing fence extends to the end. A completion that begins with code may be in
    a block that its prompt opened: then its first fence, outside of strings, closes that. The first
    line keeps its indentation: it may be the rest of a function whose beginning was in the prompt.
    Only the completion's last `MAX_SEARCHED_CHARS` are searched, and of one with MBPP's lines
    [BEGIN] and [DONE] only what is between them.
    """
    completion = _BEGIN.split(_DONE.split(completion, maxsplit=1)[0])[-1]
    text = completion[-MAX_SEARCHED_CHARS:]
    blocks, is_balanced = _blocks(text)
    texts = _programs(blocks)
    begun = _begun(text) if len(text) == len(completion) else None
    if begun:
        head, rest = begun
        if not rest:
            texts = [head]
        elif is_balanced and texts:
            texts = [head, *texts]
        else:
            after, _ = _blocks(rest)
            texts += _programs([_Block("python", head), *after])
    return [_cleaned(text) for text in texts or [completion]]


def _programs(blocks: list[_Block]) -> list[str]:
    filled = [block for block in blocks if block.text.strip()]
    marked = [block.text for block in filled if block.is_python]
    return [*(block.text for block in filled if not block.info), *marked]


def _begun(text: str) -> tuple[str, str] | None:
    """Returns the code that a text begins with, up to the fence that closes it, and what follows
    this fence; None if it begins with something else."""
    mark = _MARK_LINE.match(text)
    begin = mark.end() if mark else 0
    fences = (found for found in _FENCE_IN_CODE.finditer(text, begin) if found["fence"])
    fence = next(fences, None)
    end = fence.start() if fence else len(text)
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    head = text[begin:end]
    if fence and text[fence.end() : line_end].strip():  # it opens a block of its own
        return None
    if not _is_code(head) and (text[line_end:].strip() or not head.strip() or not fence):
        return None
    return head, text[line_end + 1 :]


def _is_code(text: str) -> bool:
    """Returns whether the first line that is no comment begins a program."""
    lines = (line.strip().strip(_BLANK)[:MAX_LINE_CHARS] for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _CODE.match(first) is not None


def _cleaned(text: str) -> str:
    """Returns a program without a byte order mark at its beginning and no-break spaces in its
    indentation, which editors put there."""
    text = text.rstrip().lstrip("\r\n\ufeff")
    if "\u00a0" in text:
        text = _HARD_INDENT.sub(lambda indent: indent[0].replace("\u00a0", " "), text)
    return text


def _blocks(text: str) -> tuple[list[_Block], bool]:
    """Returns the fenced blocks as CommonMark has them, and whether each has its closing fence. A
    block ends at a fence of its own kind, at least as long and not indented by 4 more than its
    opening, whose indentation its lines lose. Beyond that, a block of Python may begin at the end
    of a line of text or in a block that was not closed, and any may end at the end of a line of
    code."""
    blocks: list[_Block] = []
    fence, info, indent, begin = "", "", 0, 0
    is_balanced = True
    for start, end in _fenced_lines(text):
        line = text[start:end]
        opened = _opened(line)
        is_new = opened is not None and (
            not fence or (_PYTHON.match(opened[1]) and opened[2] - indent < 4)
        )
        if opened is not None and is_new:
            if fence:
                is_balanced = False
                blocks.append(_Block(info, _unindented(text[begin:start], indent)))
            fence, info, indent = opened
            begin = end + 1
        elif fence:
            code, closes = _closed(line.rstrip("\r"), fence, indent)
            if closes:
                blocks.append(_Block(info, _unindented(text[begin:start] + code, indent)))
                fence = ""
    if fence:
        blocks.append(_Block(info, _unindented(text[begin:], indent)))
    return blocks, is_balanced and not fence


def _fenced_lines(text: str) -> list[tuple[int, int]]:
    """Returns the begin and the end of each line with a fence; of more than `MAX_FENCES` the last
    ones."""
    lines: list[tuple[int, int]] = []
    last = {mark: text.rfind(mark) for mark in ("```", "~~~")}
    while (at := max(last.values())) >= 0 and len(lines) < MAX_FENCES:
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        lines.append((start, len(text) if end < 0 else end))
        for mark in last:
            if last[mark] >= start:
                last[mark] = text.rfind(mark, 0, start)
    return lines[::-1]


def _opened(line: str) -> tuple[str, str, int] | None:
    """Returns the fence by which this line opens a block, the text after it, and its indentation;
    None if the line opens no block."""
    match = _FENCE.search(line)
    if match is None or "`" in match[2]:
        return None
    before, info = line[: match.start()], match[2].strip().strip(_BLANK)
    if not before.strip().strip(_BLANK):
        return match[1], info, len(before.lstrip("\ufeff"))
    return (match[1], info, 0) if _PYTHON.match(info) else None


def _closed(line: str, fence: str, indent: int) -> tuple[str, bool]:
    """Returns the code of a block's line before the fence that ends the block, and whether the line
    has such a fence."""
    ended = line.rstrip()
    code = ended.rstrip(fence[0])
    if len(ended) - len(code) < len(fence) or fence in code:
        return "", False
    if code.strip():
        return code, True
    return "", len(code) - indent <= 3


def _unindented(text: str, indent: int) -> str:
    text = text.replace("\r\n", "\n").removesuffix("\r")
    return re.sub(rf"^[ \t\u00a0]{{1,{indent}}}", "", text, flags=re.MULTILINE) if indent else text


def fault(execution: Execution) -> tuple[Verdict, str]:
    """Returns verdict and reason of a program that gave nothing to compare ("ok" and "" if it did).
    Raises GradingFailed if the sandbox failed, not the program."""
    if execution.verdict == "sandbox_error":
        reason = execution.stderr.strip()[-200:] or "the sandbox failed"
        raise GradingFailed(reason, "python_grader_server_error", by_sandbox=True)
    if execution.verdict == "ok":
        return "ok", ""
    lines = execution.stderr.strip().splitlines() or [execution.verdict]
    return execution.verdict, explained(lines[-1][:200])


def explained(error: str) -> str:
    """Returns the error of a program, with the setting that names packages if one is missing."""
    if not error.startswith("ModuleNotFoundError"):
        return error
    return f"{error}. HONE_SANDBOX_PACKAGES names the packages that programs may import"
