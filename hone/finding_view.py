"""Shows findings. Titles and evidence may have words of a model in them, so control characters
never reach the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from shared.wire import Evidence, ExperimentReport, Finding, FindingList

STYLES = {"problem": "bold red", "warning": "yellow", "notice": "cyan"}

SHOWN_VALUES = 5
"""Values of a metric that are shown, the newest ones; `-o json` has all."""


def findings_text(listed: FindingList) -> Text:
    """Returns the findings, the worst first, each with its cause, remedy and evidence."""
    at = f"{listed.job_id}: {listed.status}, step {listed.step}"
    if not listed.findings:
        return Text(f"{at}: nothing is wrong")
    head = "well, and worth knowing:" if listed.well else "not well:"
    blocks = [Text(f"{at}: {head}"), *map(_finding, listed.findings)]
    return Text("\n\n").join(blocks)


def _finding(finding: Finding) -> Text:
    since = "" if finding.since_step is None else f" since step {finding.since_step}"
    lines = [
        Text.assemble((finding.level.upper(), STYLES[finding.level]), f" {finding.code}{since}"),
        Text(f"  {printable(finding.title)}", style="bold"),
        Text(f"  cause: {printable(finding.cause)}"),
        Text(f"  do:    {printable(finding.remedy)}"),
        *(Text(f"  seen:  {_evidence(each)}", style="dim") for each in finding.evidence),
    ]
    return Text("\n").join(lines)


def _evidence(evidence: Evidence) -> str:
    values = ", ".join(f"{value:.4g}" for value in evidence.values[-SHOWN_VALUES:])
    steps = evidence.steps[-SHOWN_VALUES:]
    where = "" if not steps else f" of step {steps[-1]}"
    if len(steps) > 1:
        where = f" of steps {steps[0]} to {steps[-1]}"
    told = [part for part in (values, printable(evidence.text)) if part]
    return f"{evidence.metric}{where}: {'; '.join(told)}"


def experiments_text(report: ExperimentReport) -> Text:
    """Returns each experiment with its result, and the causes that are left."""
    told = {True: ("agrees", "green"), False: ("DIFFERS", "bold red"), None: ("not known", "dim")}
    lines = [Text(f"{report.job_id}, version {report.version}:")]
    for one in report:
        word, style = told[one.agrees]
        nats = ""
        if one.difference is not None and one.allowed is not None:
            nats = f" by {one.difference:.3g} nats of {one.allowed:.3g} that rounding may make"
        detail = f" ({printable(one.detail)})" if one.detail else ""
        at = f" at {printable(one.sampler)}" if one.sampler else ""
        lines.append(
            Text.assemble((f"{word:10}", style), (one.name, "bold"), f"{at}{nats}{detail}")
        )
    causes = report.causes or ("the experiments do not tell",)
    lines += [Text(f"cause: {printable(cause)}") for cause in causes]
    return Text("\n").join(lines)


def printable(text: str) -> str:
    """Returns the text in one line, with control characters as escapes such as `\\x1b`."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
