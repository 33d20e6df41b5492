"""An engine against the contract: smoke test, then every scenario, then a verdict on each requirement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import msgspec

from conformance.engines import EngineNotFound, EngineSource
from conformance.execute import Replay, replay
from conformance.expectations import Expectation, Expectations, for_engine
from conformance.protocol import AdapterError, Capabilities, EngineConfig, EngineFactory
from conformance.requirements import Requirement, load_contract
from conformance.results import CaseResult, CheckReport, CheckResult, SmokeResult, Status, worst
from conformance.scenarios import (
    SCENARIOS,
    Bench,
    Case,
    CaseOutcome,
    Scenario,
    case_names,
    cases_of,
    rerun_case,
    run_case,
)
from conformance.smoke import declared_features, find_base
from conformance.trace import Trace
from conformance.watchdog import Watchdog


class UnknownRequirement(ValueError):  # noqa: N818 - named for what happened
    """A requirement id that the contract does not have."""


class Examiner:
    """Runs cases on one engine and keeps their outcomes, so that requirements can share them.

    ``pinned``: fields of ``base`` the user has set, which no scenario may change. Building it runs the smoke test;
    unless that is ``ok``, no case may be run.
    """

    def __init__(
        self,
        source: EngineSource,
        base: EngineConfig | None = None,
        pinned: Collection[str] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        self.source = source
        self.pinned = frozenset(pinned) - {"engine_options"}
        unknown = sorted(self.pinned - set(EngineConfig.__struct_fields__))
        if unknown:
            raise ValueError(f"pinned {', '.join(unknown)}: no such field of EngineConfig")
        self.watchdog = Watchdog() if watchdog is None else watchdog
        self.base, self.smoke = self._smoke(EngineConfig() if base is None else base)
        self._outcomes: dict[str, CaseOutcome] = {}
        self._signatures: list[tuple[str, object]] = []
        self._bench = Bench(source.factory, self.capabilities, self.watchdog) if self.smoke.capabilities else None

    def _smoke(self, base: EngineConfig) -> tuple[EngineConfig, SmokeResult]:
        try:
            factory = self.source.resolve()
            base, result = find_base(factory, base, self.pinned, self.watchdog)
            if result.status == "ok" and result.capabilities is not None:
                features = declared_features(factory, base, result.capabilities, self.pinned)
                result.capabilities = msgspec.structs.replace(result.capabilities, features=features)
        except (EngineNotFound, AdapterError) as error:
            result = SmokeResult(status="red", reason=f"import: {error}")
        return base, result

    @property
    def capabilities(self) -> Capabilities:
        """As declared under the base configuration, with the features of every other."""
        return self.smoke.capabilities or Capabilities(
            engine=self.source.name, version=self.source.installed_version or "unknown", features=frozenset()
        )

    def outcome(self, scenario: Scenario, case: Case) -> CaseOutcome:
        """Run ``case``, once.

        Where fields are pinned, the earlier cases of its scenario that judge the same run first: which of several
        that are the same is shown must not depend on the order in which they are asked for.
        """
        assert self._bench is not None, "the smoke test was red"
        name = f"{scenario.name}/{case.name}"
        if name not in self._outcomes:
            if self.pinned:
                for earlier in scenario.cases[: scenario.cases.index(case)]:
                    if scenario.judged_by(earlier) == scenario.judged_by(case):
                        self.outcome(scenario, earlier)
            outcome = run_case(
                self._bench,
                scenario,
                case,
                engine=self.source.name,
                base=self.base,
                pinned=self.pinned,
                capabilities=self.capabilities,
            )
            self._outcomes[name] = self._unless_seen(scenario, outcome) if self.pinned else outcome
        return self._outcomes[name]

    def _unless_seen(self, scenario: Scenario, outcome: CaseOutcome) -> CaseOutcome:
        """Pinned fields can make several cases of a scenario the same; only the first of them is shown."""
        if outcome.signature is None:
            return outcome
        prefix = scenario.name + "/"
        for name, signature in self._signatures:
            same = name.startswith(prefix) and signature == outcome.signature
            if same and self._outcomes[name].judged.keys() == outcome.judged.keys():
                return CaseOutcome(outcome.case, [
                    CaseResult(
                        requirement=requirement, case=outcome.case, status="skip",
                        reason=f"with these fields pinned it is the same as {name.removeprefix(prefix)}",
                    )
                    for requirement in outcome.judged
                ])  # fmt: skip
        self._signatures.append((outcome.case, outcome.signature))
        return outcome

    def close(self) -> None:
        """Stop watching."""
        self.watchdog.stop()


OnCase = Callable[[CaseOutcome, int, int], None]
"""Called after each case with its outcome, its number from 1, and how many there are."""
OnResult = Callable[[CheckResult], None]


def check(
    source: EngineSource,
    base: EngineConfig | None = None,
    pinned: Collection[str] = (),
    requirements: Iterable[str] | None = None,
    *,
    on_result: OnResult | None = None,
    on_case: OnCase | None = None,
    expectations: Expectations | None = None,
    watchdog: Watchdog | None = None,
) -> CheckReport:
    """Hold an engine to ``requirements`` (all that an engine alone can be held to, by default).

    ``expectations``: known failures to allow for; by default those that come with kvconform (`known_failures`).
    ``on_result`` is called for each requirement in the order of the contract, once everything has run, since a run
    can break what it was not out to judge.

    Raises `UnknownRequirement`. What engine and adapter do is never raised, it is in the report.
    """
    contract = load_contract()
    wanted = _wanted(requirements)
    examiner = Examiner(source, base, pinned, watchdog)
    report = CheckReport(
        edition=contract.edition,
        engine=source.name,
        engine_version=examiner.capabilities.version,
        config=examiner.base,
        pinned=sorted(examiner.pinned),
        smoke=examiner.smoke,
    )
    try:
        if examiner.smoke.status == "ok":
            known = known_failures(examiner, expectations)
            outcomes = _run_all(examiner, wanted, on_case)
            for requirement in wanted:
                report.results.append(judge(requirement, examiner.capabilities, outcomes, known))
                if on_result is not None:
                    on_result(report.results[-1])
    finally:
        examiner.close()
    return report


def rejudge(factory: EngineFactory, trace: Trace, watchdog: Watchdog | None = None) -> Replay:
    """Replay a trace; one that a scenario left behind is also compared as the scenario compares it.

    What takes several runs to see (PRE-7, DET-1, …) cannot be seen in one: without this it would pass for fixed.
    """
    result = replay(factory, trace, watchdog)
    known = case_names().get(trace.header.note)
    if result.status != "FIXED" or known is None:
        return result
    engine = factory(trace.header.config)
    bench = Bench(factory, engine.capabilities, watchdog)
    engine.close()
    outcome = rerun_case(
        bench, *known, engine=trace.header.engine, config=trace.header.config, operations=trace.operations
    )
    broken = {finding.requirement for finding in trace.footer.violations}
    for case in (*outcome.judged.values(), *outcome.elsewhere):
        if case.requirement in broken and case.status in {"fail", "error"}:
            status: Literal["FAILED", "ERROR"] = "FAILED" if case.status == "fail" else "ERROR"
            return Replay(
                status=status,
                reason=f"{case.requirement}: {case.describe()}",
                execution=result.execution,
                same_digest=result.same_digest,
            )
    return result


def known_failures(examiner: Examiner, expectations: Expectations | None = None) -> list[Expectation]:
    """The failures to allow for: those given, or else those that come with kvconform.

    These are about the engine under the configurations the scenarios choose. Once a field is pinned the user asks
    about another configuration, and gets the bare answer.
    """
    if expectations is None:
        if examiner.pinned:
            return []
        expectations = for_engine(examiner.source.name)
    return expectations.applying(examiner.capabilities)


def _wanted(ids: Iterable[str] | None) -> list[Requirement]:
    """Raises `UnknownRequirement`, naming what can be asked for."""
    contract = load_contract().requirements
    if ids is None:
        return list(contract.values())
    asked = list(ids)
    for one in asked:
        if one not in contract:
            raise UnknownRequirement(f"no requirement {one!r}; expected one of {', '.join(contract)}")
    return [row for row in contract.values() if row.id in asked]


def _run_all(examiner: Examiner, wanted: Sequence[Requirement], on_case: OnCase | None) -> list[CaseOutcome]:
    """Run every case that judges a wanted requirement which applies to the engine."""
    features = examiner.capabilities.features
    applying = {row.id for row in wanted if not row.missing(features)}
    cases = [
        (scenario, case)
        for scenario in SCENARIOS
        for case in scenario.cases
        if applying.intersection(scenario.judged_by(case))
    ]
    outcomes = []
    for number, (scenario, case) in enumerate(cases, 1):
        outcomes.append(examiner.outcome(scenario, case))
        if on_case is not None:
            on_case(outcomes[-1], number, len(cases))
    return outcomes


def judge(
    requirement: Requirement,
    capabilities: Capabilities,
    outcomes: Sequence[CaseOutcome],
    known: Sequence[Expectation] = (),
) -> CheckResult:
    """The verdict on one requirement from the outcomes of cases, after allowing for what is ``known``."""
    own = [outcome.judged[requirement.id] for outcome in outcomes if requirement.id in outcome.judged]
    elsewhere = [case for outcome in outcomes for case in outcome.elsewhere if case.requirement == requirement.id]
    missing = requirement.missing(capabilities.features)
    if missing and not elsewhere:
        return conclude(requirement, [], (), unsupported=f"the engine does not declare {', '.join(missing)}")
    return conclude(requirement, [*([] if missing else own), *elsewhere], known)


def conclude(
    requirement: Requirement,
    cases: Sequence[CaseResult],
    known: Sequence[Expectation],
    *,
    unsupported: str = "",
) -> CheckResult:
    """The worst of ``cases``, after allowing for what is ``known``; without any, ``unsupported`` is the reason."""
    expected = [entry for entry in known if entry.requirement == requirement.id]
    result = CheckResult(
        requirement=requirement.id,
        level=requirement.level,
        title=requirement.title,
        status="unsupported",
        reason=unsupported,
        cases=[allow_for(case, expected) for case in cases],
    )
    if not result.cases:
        return result
    stale = [entry for entry in expected if is_stale(entry, result.cases)]
    statuses: list[Status] = [case.status for case in result.cases]
    result.status = worst([*statuses, "stale"] if stale else statuses)
    result.reason = _reason(result, stale)
    _keep_first_trace(result)
    return result


def allow_for(case: CaseResult, expected: Sequence[Expectation]) -> CaseResult:
    """``case``, or when it fails as is expected of this engine, the same as ``known``."""
    entry = next(
        (entry for entry in expected if entry.requirement == case.requirement and entry.covers(case.case)),
        None,
    )
    if case.status != "fail" or entry is None:
        return case
    return msgspec.structs.replace(case, status="known", reason=entry.describe())


def is_stale(entry: Expectation, cases: Sequence[CaseResult]) -> bool:
    """Whether every case that ``entry`` covers was looked at, and whatever says anything says that all is well."""
    seen = {case.case: case.status for case in cases if entry.covers(case.case)}
    covered = [
        name
        for name in (f"{scenario.name}/{case.name}" for scenario, case in cases_of(entry.requirement))
        if entry.covers(name)
    ]
    statuses = set(seen.values())
    return all(name in seen for name in covered) and "pass" in statuses and "known" not in statuses


def _reason(result: CheckResult, stale: Sequence[Expectation]) -> str:
    if result.status == "stale":
        return "; ".join(f"expected to fail ({entry.describe()}) and does not: delete the entry" for entry in stale)
    deciding = result.deciding
    if result.status == "pass" or deciding is None:
        return "" if deciding is not None else "no case judges it"
    text = f"{deciding.case}: {deciding.describe()}"
    others = sum(case.status == result.status for case in result.cases) - 1
    return text if not others else f"{text} (and {others} more {'case' if others == 1 else 'cases'})"


def _keep_first_trace(result: CheckResult) -> None:
    """One trace is enough to show a requirement broken; the deciding case's comes first."""
    keeper = result.deciding
    if keeper is None or keeper.trace is None:
        keeper = next((case for case in result.cases if case.trace is not None), None)
    result.cases = [
        case if case is keeper or case.trace is None else msgspec.structs.replace(case, trace=None)
        for case in result.cases
    ]
