"""Runs one case of a scenario and says what it shows of each requirement it judges."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from conformance.operations import Operation
from conformance.protocol import AdapterError, Capabilities, ConfigRefused, EngineConfig
from conformance.results import CaseResult, Status
from conformance.scenarios.base import Case, Inapplicable, Scenario, Setting
from conformance.scenarios.bench import Bench, Run, Script, Unjudged, Unsupported


class CaseOutcome:
    """What a case showed. ``judged``: by requirement. ``elsewhere``: broken requirements it was not out to judge."""

    __slots__ = ("case", "elsewhere", "judged", "signature")

    def __init__(self, case: str, judged: Collection[CaseResult], elsewhere: Sequence[CaseResult] = ()) -> None:
        self.case = case
        self.judged = {result.requirement: result for result in judged}
        self.elsewhere = list(elsewhere)
        self.signature: object = None
        """Equal for cases that came down to the same runs, which pinned fields can bring about."""


class _Nothing(NamedTuple):
    """Why a comparison, or a whole case, says nothing of what holds; "" when it does."""

    status: Status = "pass"
    reason: str = ""


def run_case(
    bench: Bench,
    scenario: Scenario,
    case: Case,
    *,
    engine: str,
    base: EngineConfig,
    pinned: Collection[str],
    capabilities: Capabilities,
) -> CaseOutcome:
    """Run ``case``; whatever breaks on the way becomes a status, nothing is raised. O(its runs)."""

    def build() -> tuple[EngineConfig, Sequence[Operation] | Script]:
        setting = Setting(base, pinned, capabilities)
        workload = case.build(setting)
        return setting.config, workload

    return _judge(bench, scenario, case, engine, build)


def rerun_case(
    bench: Bench, scenario: Scenario, case: Case, *, engine: str, config: EngineConfig, operations: Sequence[Operation]
) -> CaseOutcome:
    """Judge ``case`` on operations that were recorded when it was run before."""
    return _judge(bench, scenario, case, engine, lambda: (config, operations))


def _judge(
    bench: Bench,
    scenario: Scenario,
    case: Case,
    engine: str,
    build: Callable[[], tuple[EngineConfig, Sequence[Operation] | Script]],
) -> CaseOutcome:
    name = f"{scenario.name}/{case.name}"
    requirements = scenario.judged_by(case)
    bench.begin(requirements)
    try:
        nothing = _unless_it_says_something(lambda: bench.run(*build()))
        compare = scenario.compare_of(case)
        if not nothing.reason and compare is not None and not bench.runs[0].cut_short:
            nothing = _unless_it_says_something(lambda: compare(bench, bench.runs[0]))
    except AdapterError as error:
        return _all_are("error", f"the adapter is at fault: {error}", name, requirements)
    except Exception as error:  # noqa: BLE001 - a fault of ours must not pass for one of the engine
        return _all_are("error", _own_fault(error), name, requirements)
    if not bench.runs:
        return _all_are(*nothing, name, requirements)
    outcome = _outcome(bench, case, name, requirements, nothing, engine)
    outcome.signature = [(one.config, one.operations) for one in bench.runs]
    return outcome


def _unless_it_says_something(run: Callable[[], object]) -> _Nothing:
    try:
        run()
    except (Inapplicable, Unjudged) as answer:
        return _Nothing("skip", str(answer))
    except ConfigRefused as answer:
        return _Nothing("skip", f"refused: {answer}")
    except Unsupported as answer:
        return _Nothing("unsupported", str(answer))
    return _Nothing()


def _all_are(status: Status, reason: str, name: str, requirements: Sequence[str]) -> CaseOutcome:
    return CaseOutcome(
        name,
        [CaseResult(requirement=requirement, case=name, status=status, reason=reason) for requirement in requirements],
    )


def _outcome(
    bench: Bench, case: Case, name: str, requirements: Sequence[str], nothing: _Nothing, engine: str
) -> CaseOutcome:
    """Give each violation, of every run that was made, to its requirement."""
    run = bench.runs[0]
    tally = "; ".join([run.tally(), *(_compared(other, run) for other in bench.runs[1:])])
    broken: dict[str, CaseResult] = {}
    for one in bench.runs:
        for violation in one.violations:
            if violation.requirement not in broken:
                broken[violation.requirement] = CaseResult(
                    requirement=violation.requirement,
                    case=name,
                    status="fail",
                    violation=violation,
                    tally=tally,
                    trace=one.trace(engine, name, [violation]),
                )
    judged = []
    spoilers = tuple(sorted(requirement for requirement in broken if requirement not in requirements))
    unseen = [behaviour for behaviour in case.sees if not run.ledger.behaviours.get(behaviour)]
    for requirement in requirements:
        result = broken.pop(requirement, None)
        if result is None:
            result = CaseResult(requirement=requirement, case=name, status="pass", tally=tally)
            if run.cut_short:
                result.status, result.spoilt_by = "skip", spoilers
                result.reason = f"cut short in step {run.steps}: the run breaks {run.requirements_broken()}"
            elif nothing.reason:
                result.status, result.reason = nothing
                result.spoilt_by = spoilers
            elif unseen:
                result.status, result.reason = "skip", f"never seen in this run: {', '.join(unseen)}"
        judged.append(result)
    return CaseOutcome(name, judged, list(broken.values()))


def _compared(other: Run, run: Run) -> str:
    """Another run's figures, with what its configuration has that the case's own has not."""
    fields = [
        f"{name} = {getattr(other.config, name)}"
        for name in other.config.__struct_fields__
        if getattr(other.config, name) != getattr(run.config, name)
    ]
    return other.sentence() if not fields else f"with {', '.join(fields)}: {other.sentence()}"


def _own_fault(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
