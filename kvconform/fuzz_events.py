"""What a hunt found, as lines of an event file."""

from __future__ import annotations

from collections.abc import Collection

from conformance.calls import ENGINE_RAISES
from conformance.engines import EngineSource
from conformance.execute import probe
from conformance.expectations import for_engine
from conformance.protocol import Capabilities, EngineConfig
from conformance.reports.events import ColumnClosed, ColumnOpened, EventWriter, FindingKept
from conformance.requirements import load as load_requirements
from conformance.results import Status, worst
from fuzz.driver import Campaign
from fuzz.hunt import Hunter


def record_hunt(
    events: EventWriter,
    label: str,
    source: EngineSource,
    capabilities: Capabilities,
    config: EngineConfig,
    pinned: Collection[str],
    hunter: Hunter,
    state: Campaign | None,
) -> None:
    """Write a column with everything the hunt kept. Raises `ExpectationsError` and OSError."""
    column = label or f"{source.name} {capabilities.version}"
    expectations = for_engine(source.name)
    contract = load_requirements()
    events.add(
        ColumnOpened(
            column=column,
            engine=source.name,
            version=capabilities.version,
            variant="" if capabilities.engine == source.name else capabilities.engine,
            features=tuple(sorted(capabilities.features)),
            reimplements=capabilities.reimplements,
            config=config,
            pinned=tuple(sorted(pinned)),
        )
    )
    statuses: list[Status] = ["pass"]
    for kept in hunter.kept:
        violation = kept.shrunk.violation
        said = f"{violation.message}; got {violation.got}"
        known = expectations.applying(_declared(source, kept.shrunk.config, capabilities))
        entry = next((one for one in known if one.is_about(kept.requirement, said)), None)
        statuses.append("fail" if entry is None else "known")
        events.add(
            FindingKept(
                column=column,
                requirement=kept.requirement,
                level=contract[kept.requirement].level,
                message=violation.message,
                expected=violation.expected,
                got=violation.got,
                identity=kept.identity,
                operations=len(kept.shrunk.operations),
                trace=events.link(kept.trace),
                also=tuple(dict.fromkeys(symptom.requirement for symptom in kept.symptoms)),
                known="" if entry is None else entry.describe(),
            )
        )
    events.add(
        ColumnClosed(
            column=column,
            status=worst(statuses),
            runs=0 if state is None else state.runs,
            steps=0 if state is None else state.steps,
            behaviours={} if state is None else dict(sorted(state.behaviours.items())),
        )
    )


def _declared(source: EngineSource, config: EngineConfig, otherwise: Capabilities) -> Capabilities:
    """What the engine declares where a finding was made: an expectation may be of a variant of it."""
    try:
        return probe(source.factory, config)
    except ENGINE_RAISES:
        return otherwise  # it is the constructor that fails
