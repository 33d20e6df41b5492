"""A finding is a file: the shrunk trace, and beside it a ready pytest test and a page that shows it."""

from __future__ import annotations

import hashlib
import json
import re
import string
from pathlib import Path
from typing import Any

import msgspec

from conformance.execute import execute, trace_of
from conformance.operations import Operation
from conformance.protocol import EngineConfig, EngineFactory
from conformance.reports.trace_page import trace_page
from conformance.trace import write_trace
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from fuzz.shrink import Shrunk, normalised

_TEST = string.Template('''\
"""Found by kvconform on $engine $version: $requirement.

$message
Fails for as long as the fault is there.
"""

from kvconform import $names, execute, load

CONFIG = EngineConfig($config)
OPERATIONS = [
$operations]


def test_$slug():
    execution = execute(load($name).factory, CONFIG, OPERATIONS, judge={"$requirement"}, watchdog=Watchdog())
    assert execution.refused is None, execution.refused
    assert not execution.violations, execution.violations[0]
''')


class Kept(msgspec.Struct, kw_only=True):
    """Where a finding was put, and what else the same trace breaks."""

    identity: str
    engine: str
    requirement: str
    trace: Path
    test: Path
    page: Path
    shrunk: Shrunk
    symptoms: list[Violation] = []
    """Other requirements that fail on the same shrunk trace: one fault seen from several sides."""


NAME_LENGTH_MAX = 60


def file_name(engine: str) -> str:
    """The engine's name as part of a file name: the end of it, where it is long, as a command can be."""
    return re.sub(r"[^a-z0-9]+", "-", engine.lower())[-NAME_LENGTH_MAX:].strip("-")


def shape(config: EngineConfig, operations: list[Operation]) -> str:
    """The shape of a trace: kinds of operations in order, and the features its configuration turns on."""
    kinds = "-".join(type(operation).__name__.lower() for operation in operations)
    features = ",".join(sorted(config.features_needed()))
    return f"{kinds}|{features}"


def fingerprint(shrunk: Shrunk) -> str:
    """Ten hex digits that two findings share when they are one: requirement, message and shape of the trace."""
    text = f"{normalised(shrunk.violation)}|{shape(shrunk.config, shrunk.operations)}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def keep(
    factory: EngineFactory,
    engine: str,
    shrunk: Shrunk,
    directory: Path,
    *,
    seed: int | None = None,
    watchdog: Watchdog | None = None,
) -> Kept:
    """Write the trace and the test of a shrunk finding to ``directory``. Raises `OSError` when it cannot."""
    recorded = execute(
        factory,
        shrunk.config,
        shrunk.operations,
        judge={shrunk.violation.requirement},
        watchdog=watchdog,
        record=True,
    )
    if not recorded.violations:  # a flaky engine: what was seen is kept all the same
        recorded.violations = [shrunk.violation]
    everything = execute(factory, shrunk.config, shrunk.operations, stop_at_first=False, watchdog=watchdog)
    identity = fingerprint(shrunk)
    stem = f"{file_name(engine)}-{shrunk.violation.requirement.lower()}-{identity}"
    trace_path = directory / f"{stem}.jsonl"
    test_path = directory / f"test_{stem.replace('-', '_')}.py"
    note = f"shrunk from {shrunk.before} operations in {shrunk.executions} executions, replayed {shrunk.stable} of 3"
    trace = trace_of(engine, shrunk.config, recorded, seed=seed, note=note)
    write_trace(trace_path, trace)
    page_path = trace_path.with_suffix(".html")
    page_path.write_text(trace_page(trace, f"kvconform replay {trace_path.name}"), encoding="utf-8")
    test_path.write_text(ready_test(engine, recorded.engine_version, shrunk), encoding="utf-8")
    return Kept(
        identity=identity,
        engine=engine,
        requirement=shrunk.violation.requirement,
        trace=trace_path,
        test=test_path,
        page=page_path,
        shrunk=shrunk,
        symptoms=[v for v in everything.violations if v.requirement != shrunk.violation.requirement],
    )


def ready_test(engine: str, version: str, shrunk: Shrunk) -> str:
    """A pytest file that fails for as long as the fault is there; it needs nothing but kvconform."""
    operations = {type(operation).__name__ for operation in shrunk.operations}
    names = ", ".join(sorted({"EngineConfig", "Watchdog"} | operations))
    slug = file_name(f"{engine} {shrunk.violation.requirement}").replace("-", "_")
    return _TEST.substitute(
        engine=_in_docstring(engine),
        version=_in_docstring(version),
        name=json.dumps(engine),
        requirement=shrunk.violation.requirement,
        message=_in_docstring(shrunk.violation.message),
        names=names,
        config=_arguments(shrunk.config, EngineConfig()),
        operations="".join(f"    {source(operation)},\n" for operation in shrunk.operations),
        slug=slug,
    )


def _in_docstring(text: str) -> str:
    """What an engine says of itself, where it must not end the docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def source(operation: Operation) -> str:
    """The operation as Python source, defaults left out."""
    kind = type(operation)
    required = len(kind.__struct_fields__) - len(kind.__struct_defaults__)
    defaults = dict(zip(kind.__struct_fields__[required:], kind.__struct_defaults__, strict=True))
    parts = [
        f"{name}={getattr(operation, name)!r}"
        for name in kind.__struct_fields__
        if name not in defaults or getattr(operation, name) != defaults[name]
    ]
    return f"{kind.__name__}({', '.join(parts)})"


def _arguments(config: EngineConfig, default: EngineConfig) -> str:
    sizes = {"num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"}
    values: dict[str, Any] = {
        name: getattr(config, name)
        for name in EngineConfig.__struct_fields__
        if name in sizes or getattr(config, name) != getattr(default, name)
    }
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
