"""What graders that run programs share: where the program is in a completion, and how its end
becomes a verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.grading.registry import GradingFailed
from shared.wire import Execution, Verdict

KEEP_CHARS = 1000
"""Kept of what a program printed."""

MAX_SEARCHED_CHARS = 1 << 18
"""Of a completion's end are searched for fences, which takes about a microsecond per character."""

_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*(.*)")
_PYTHON = re.compile(r"\{?[ \t]*\.?(?:i?python|py)[\d.]*(?![\w+#])", re.IGNORECASE)


@dataclass(frozen=True)
class _Block:
    """A fenced block: what stands after its opening fence, and the lines in it."""

    info: str
    lines: list[str]

    @property
    def is_python(self) -> bool:
        return _PYTHON.match(self.info) is not None

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def program_of(completion: str) -> str:
    """Returns the last fenced code block of the completion that is marked as Python, else the last
    one with no mark, else all of it; without empty lines around.

    A block without a closing fence goes on to the end. The first line keeps its indentation: it may
    be the rest of a function whose beginning was in the prompt. Only the completion's last
    `MAX_SEARCHED_CHARS` are searched."""
    blocks = [block for block in _blocks(completion[-MAX_SEARCHED_CHARS:]) if block.text.strip()]
    marked = [block.text for block in blocks if block.is_python]
    unmarked = [block.text for block in blocks if not block.info]
    (program,) = (marked or unmarked or [completion])[-1:]
    return program.rstrip().lstrip("\r\n")


def _blocks(text: str) -> list[_Block]:
    """Returns the fenced blocks as CommonMark has them: a block ends at a fence of its own kind, at
    least as long and not indented by 4 more than its opening, whose indentation its lines lose.
    Beyond that, a block of Python may begin at the end of a line of text or in a block that was not
    closed, and any may end at the end of a line of code."""
    blocks: list[_Block] = []
    fence, indent = "", 0
    for line in text.split("\n"):
        opened = _opened(line)
        is_new = opened is not None and (
            not fence or (_PYTHON.match(opened[1]) and opened[2] - indent < 4)
        )
        if opened is not None and is_new:
            fence, info, indent = opened
            blocks.append(_Block(info, []))
        elif fence:
            code, closes = _closed(line.rstrip("\r"), fence, indent)
            blocks[-1].lines.extend([] if code is None else [_unindented(code, indent)])
            fence = "" if closes else fence
    return blocks


def _opened(line: str) -> tuple[str, str, int] | None:
    """Returns the fence by which this line opens a block, what stands after it, and its
    indentation; None if it opens none."""
    match = _FENCE.search(line)
    if match is None or "`" in match[2]:
        return None
    before, info = line[: match.start()], match[2].strip()
    if not before.strip():
        return match[1], info, len(before)
    return (match[1], info, 0) if _PYTHON.match(info) else None


def _closed(line: str, fence: str, indent: int) -> tuple[str | None, bool]:
    """Returns what of a block's line is code, None if nothing, and whether the block ends there."""
    ended = line.rstrip()
    code = ended.rstrip(fence[0])
    if len(ended) - len(code) < len(fence) or fence in code:
        return line, False
    if code.strip():
        return code, True
    return (line, False) if len(code) - indent > 3 else (None, True)


def _unindented(line: str, indent: int) -> str:
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]


def fault(execution: Execution) -> tuple[Verdict, str]:
    """Returns verdict and reason of a program that gave nothing to compare ("ok", "" if it did).
    Raises GradingFailed where the sandbox failed, not the program."""
    if execution.verdict == "sandbox_error":
        reason = execution.stderr.strip()[-200:] or "the sandbox failed"
        raise GradingFailed(reason, "python_grader_server_error", by_sandbox=True)
    if execution.verdict == "ok":
        return "ok", ""
    lines = execution.stderr.strip().splitlines() or [execution.verdict]
    return execution.verdict, explained(lines[-1][:200])


def explained(error: str) -> str:
    """Returns what a program raised, and where to turn if a package is not there."""
    if not error.startswith("ModuleNotFoundError"):
        return error
    return f"{error}. HONE_SANDBOX_PACKAGES names the packages that programs may import"
