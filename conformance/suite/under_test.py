"""What a test of the suite holds in its hands: the engine of the session, and one case for one requirement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.check import Examiner, known_failures
from conformance.engines import load
from conformance.expectations import Expectation, read
from conformance.plugin import VERDICT, engine_name
from conformance.reports.events import ColumnOpened, column_of
from conformance.requirements import load_contract
from conformance.results import CaseResult, CheckReport
from conformance.scenarios import Case, Scenario
from conformance.settings import parse_settings
from conformance.trace import write_trace
from conformance.verdicts import Verdict


class Engine:
    """The engine of the session: its examiner and its known failures."""

    def __init__(self, config: pytest.Config) -> None:
        settings, pinned = parse_settings(config.getoption("kv_preset"), config.getoption("kv_set"))
        self.examiner = Examiner(
            load(engine_name(config), validate_wire=config.getoption("kv_validate_wire")), settings, pinned
        )
        file = config.getoption("kv_expectations")
        given = None if file is None else read(Path(file))
        self.known: list[Expectation] = known_failures(self.examiner, given)
        events = config.getoption("kv_events")
        self._events = None if events is None else Path(events)
        self.red_was_reported = False

    def column(self) -> ColumnOpened:
        """The engine, as event files have it."""
        examiner = self.examiner
        return column_of(
            CheckReport(
                engine=examiner.source.name,
                engine_version=examiner.capabilities.version,
                config=examiner.base,
                pinned=sorted(examiner.pinned),
                smoke=examiner.smoke,
            ),
            f"{examiner.source.name} {examiner.capabilities.version}",
        )

    def keep(self, requirement: str, case: CaseResult) -> str:
        """Write the trace of a failed case beside the event file; "" where there is neither.

        ``requirement``: of the test. Several tests may see the same case fail, and each has a file of its own, so that
        workers do not write to one at the same time.
        """
        if self._events is None or case.trace is None or case.status != "fail":
            return ""
        seen_by = "" if requirement == case.requirement else f"-seen-by-{requirement}"
        name = re.sub(r"[^a-z0-9]+", "-", f"{case.requirement}-{case.case}{seen_by}".lower())
        path = self._events.with_name(f"{self._events.stem}-traces") / f"{name}.jsonl"
        write_trace(path, case.trace)
        return str(path)

    def must_be_green(self, node: pytest.Item) -> None:
        """When the smoke test is red, one test says so, and the others are skipped: nothing can be judged."""
        smoke = self.examiner.smoke
        if smoke.status == "ok":
            return
        if self.red_was_reported:
            pytest.skip("not judged: the smoke test is red")
        self.red_was_reported = True
        node.stash[VERDICT] = Verdict(engine=self.column())
        who = "the engine refuses the configuration" if smoke.status == "refused" else "the adapter is at fault"
        pytest.fail(f"ERROR: {who}: {smoke.reason}", pytrace=False)


class CaseUnderTest:
    """One case of a scenario, for one requirement."""

    def __init__(self, node: pytest.Item, engine: Engine, requirement: str, scenario: Scenario, case: Case) -> None:
        self._node = node
        self._engine = engine
        self._requirement = load_contract().requirements[requirement]
        self._scenario = scenario
        self._case = case

    def holds(self) -> None:
        """Run the case; the test passes, fails, or is skipped as the verdict on the requirement says."""
        missing = self._requirement.missing(self._engine.examiner.capabilities.features)
        if missing:
            reason = f"the engine does not declare {', '.join(missing)}"
            self._leave([], unsupported=reason)
            pytest.skip(f"UNSUPPORTED: {reason}")
        outcome = self._engine.examiner.outcome(self._scenario, self._case)
        result = outcome.judged[self._requirement.id]
        self._leave([result, *outcome.elsewhere])
        self._act_on(result, outcome.elsewhere)

    def _leave(self, cases: list[CaseResult], unsupported: str = "") -> None:
        """Leave the verdict for the plugin's table and the JUnit file."""
        concerned = {self._requirement.id, *(case.requirement for case in cases)}
        traces = {case.requirement: self._engine.keep(self._requirement.id, case) for case in cases}
        self._node.stash[VERDICT] = Verdict(
            engine=self._engine.column(),
            requirement=self._requirement.id,
            cases=cases,
            unsupported=unsupported,
            known=[entry for entry in self._engine.known if entry.requirement in concerned],
            traces={name: trace for name, trace in traces.items() if trace},
        )
        self._node.user_properties.append(("level", self._requirement.level))
        self._node.user_properties.append(("status", cases[0].status if cases else "unsupported"))

    def _act_on(self, result: CaseResult, elsewhere: list[CaseResult]) -> None:
        if result.status == "fail":
            self._fail(result)
        if result.status == "error":
            pytest.fail(f"ERROR: the suite or the adapter is at fault: {result.reason}", pytrace=False)
        for case in elsewhere:
            # A run that breaks something else is red here too, or it might be seen nowhere.
            if self._known(case) is None:
                self._fail(case)
        if result.status == "unsupported":
            pytest.skip(f"UNSUPPORTED: {result.reason}")
        if result.status == "skip":
            pytest.skip(result.reason)

    def _known(self, case: CaseResult) -> Expectation | None:
        return next(
            (
                entry
                for entry in self._engine.known
                if entry.requirement == case.requirement and entry.covers(case.case)
            ),
            None,
        )

    def _fail(self, case: CaseResult) -> None:
        known = self._known(case)
        if known is not None:
            pytest.xfail(known.describe())
        row = load_contract().requirements[case.requirement]
        pytest.fail(f"{row.id} ({row.level}) {row.text}\n{case.describe()}", pytrace=False)
