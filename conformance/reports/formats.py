"""An event file as other tools want it: a markdown table, JUnit, a badge."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from conformance.reports.events import Column, Run, Verdict
from conformance.requirements import Requirement, load_contract
from conformance.results import Status, worst

MARKS: dict[Status, str] = {
    "pass": "✓",
    "known": "▲",
    "stale": "◆",
    "fail": "✗",
    "error": "!",
    "skip": "-",
    "unsupported": "·",
}
"""One sign for each status, told apart without colour."""

LEGEND = (
    "✓ holds, ✗ fails, ▲ fails as it is known to, ◆ known to fail and does not, ! suite or adapter broke, "
    "- not judged here, · not declared"
)


def rows_of(run: Run) -> list[Requirement]:
    """The requirements that any column has a word on, in the order of the contract."""
    named = {one for column in run.columns.values() for one in column.verdicts}
    named |= {finding.requirement for column in run.columns.values() for finding in column.findings}
    return [row for row in load_contract().requirements.values() if row.id in named]


def status_in(column: Column, requirement: str) -> Status | None:
    """The cell of the table: the worst of the check's verdict and of what the fuzzer found; None: neither."""
    verdict = column.verdicts.get(requirement)
    found: list[Status] = [] if verdict is None else [verdict.status]
    found += ["known" if one.known else "fail" for one in column.findings if one.requirement == requirement]
    return worst(found) if found else None


def summary(column: Column) -> str:
    """One line: MUST failures as a count, then the rest."""
    smoke = column.opened.smoke
    if smoke is not None and smoke.status != "ok":
        return f"error: smoke test: {smoke.reason}"
    parts = []
    for level in ("MUST", "SHOULD"):
        new, known = len(column.failing(level)), len(column.failing(level, known=True))
        if new:
            parts.append(f"{new} {level} {'fails' if new == 1 else 'fail'}")
        if known:
            parts.append(f"{known} {level} known to fail")
    if not column.failing("MUST") and not column.failing("MUST", known=True):
        parts.insert(0, "no MUST fails")
    counts = column.counts()
    parts += [f"{counts[status]} {status}" for status in counts if status not in {"fail", "known"}]
    if column.closed is not None and column.closed.steps:
        parts.append(f"{len(column.findings)} findings in {column.closed.steps:,} steps of fuzzing")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------- markdown


def markdown(run: Run) -> str:
    """The matrix, what fails and why: for the summary of a CI job, or a page."""
    columns = list(run.columns.values())
    lines = ["| requirement | level | " + " | ".join(_cell(one.name) for one in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for row in rows_of(run):
        cells = [_mark(status_in(one, row.id)) for one in columns]
        lines.append(f"| {row.id} {_cell(row.title)} | {row.level} | " + " | ".join(cells) + " |")
    lines += ["", LEGEND, ""]
    for column in columns:
        lines.append(f"**{_cell(column.name)}**: {_cell(summary(column))}")
        lines.append("")
        lines += [f"- {line}" for line in _reasons(column)]
        if lines[-1]:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _reasons(column: Column) -> list[str]:
    found = [
        f"{MARKS[one.status]} **{one.requirement}** ({one.level}) {_cell(one.reason)}" + _linked(one.trace)
        for one in column.verdicts.values()
        if one.status in {"fail", "known", "stale", "error"}
    ]
    found += [
        f"{MARKS['known' if one.known else 'fail']} **{one.requirement}** ({one.level}, fuzzer) {_cell(one.message)}; "
        f"{one.operations} operations{f'; known: {_cell(one.known)}' if one.known else ''}{_linked(one.trace)}"
        for one in column.findings
    ]
    return found


def _linked(trace: str) -> str:
    return f" (`kvconform explain {trace}`)" if trace else ""


def _mark(status: Status | None) -> str:
    return "" if status is None else MARKS[status]


def _cell(text: str) -> str:
    """Text that stays inside a cell and shows what it says."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# ---------------------------------------------------------------------------------------------------- JUnit


def junit(run: Run) -> str:
    """A JUnit file: a suite for each column, a case for each requirement, its id as a property."""
    root = ET.Element("testsuites", name="kvconform")
    for column in run.columns.values():
        verdicts = list(column.verdicts.values())
        suite = ET.SubElement(root, "testsuite", name=column.name)
        _properties(suite, engine=column.opened.engine, version=column.opened.version, edition=run.header.edition)
        for verdict in verdicts:
            _case(suite, column.name, verdict)
        for finding in column.findings:
            case = _element(suite, column.name, finding.requirement, f"fuzz {finding.identity}")
            if finding.known:
                ET.SubElement(case, "skipped", message=_xml(f"known: {finding.known}"))
                continue
            failure = ET.SubElement(case, "failure", message=_xml(finding.message))
            failure.text = _xml(f"expected {finding.expected}\ngot {finding.got}\ntrace {finding.trace}")
        smoke = column.opened.smoke
        if smoke is not None and smoke.status != "ok":
            case = ET.SubElement(suite, "testcase", classname=column.name, name="smoke test")
            ET.SubElement(case, "error", message=_xml(smoke.reason))
        for kind, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            suite.set(attribute, str(len(suite.findall(f"testcase/{kind}"))))
        suite.set("tests", str(len(suite.findall("testcase"))))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, column: str, verdict: Verdict) -> None:
    case = _element(suite, column, verdict.requirement, verdict.title)
    match verdict.status:
        case "fail" | "stale":
            failure = ET.SubElement(case, "failure", message=_xml(verdict.reason))
            failure.text = _xml(verdict.reason + (f"\ntrace {verdict.trace}" if verdict.trace else ""))
        case "error":
            ET.SubElement(case, "error", message=_xml(verdict.reason))
        case "skip" | "unsupported" | "known":
            ET.SubElement(case, "skipped", message=_xml(f"{verdict.status}: {verdict.reason}"))
        case "pass":
            pass


def _element(suite: ET.Element, column: str, requirement: str, title: str) -> ET.Element:
    case = ET.SubElement(suite, "testcase", classname=column, name=f"{requirement} {title}")
    _properties(case, requirement=requirement)
    return case


def _properties(parent: ET.Element, **values: str) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", name=name, value=_xml(value))


def _xml(text: str) -> str:
    """XML 1.0 has no place for most control characters, which an engine's message may hold."""
    return "".join(char if char >= " " or char in "\t\n" else f"\\x{ord(char):02x}" for char in text)


# ---------------------------------------------------------------------------------------------------- badge


def badge(run: Run) -> str:
    """The JSON that shields.io's endpoint badges read: MUST failures count, a percentage would hide them."""
    columns: Sequence[Column] = list(run.columns.values())
    must = sum(len(column.failing("MUST")) for column in columns)
    broken = sum(column.status == "error" for column in columns)
    other = sum(len(column.failing("SHOULD")) for column in columns)
    stale = sum(column.status == "stale" for column in columns)
    held = sum(column.counts().get("pass", 0) for column in columns)
    if broken:
        message, colour = "the suite broke", "lightgrey"
    elif must:
        message, colour = f"{must} MUST fail", "red"
    elif other or stale:
        message, colour = (f"{other} SHOULD fail" if other else "expectations are stale"), "orange"
    else:
        message, colour = f"{held} hold", "brightgreen"
    return json.dumps({"schemaVersion": 1, "label": "kvconform", "message": message, "color": colour}) + "\n"
