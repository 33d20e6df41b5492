"""A peer that dies, hangs, floods or answers nonsense is reported, and replaced for the next engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.adapters.reference import make
from conformance.engines import ProcessSource, load
from conformance.execute import Execution, execute, replay, trace_of
from conformance.operations import Add, Operation
from conformance.protocol import AdapterError, EngineConfig
from conformance.watchdog import Watchdog
from conformance.wire import fleet as fleets
from conformance.wire.process import Process

pytest_plugins = ("hostile_peer",)

OPERATIONS: list[Operation] = [Add(prompt_len=4, max_tokens=4)]
AT_SCHEDULE = 'if b\'"call":"schedule"\' in line:\n    {}\nreturn super().answer(line)'
NOT_ALLOWED = "PRG-8: schedule is answered by what the wire protocol does not allow"
MALFORMED = "PRG-8: schedule answers what its interface does not allow"
TOO_LARGE = "PRG-8: schedule raised MemoryExhausted"
HANGS = "PRG-8: schedule raised EngineHung"
ENDS = "PRG-8: schedule ends the engine's process"


def changed(old: str, new: str) -> str:
    """The proper answer, but for one part of it."""
    return f"return super().answer(line).replace({old.encode()!r}, {new.encode()!r})"


FAULTS = {
    "exits": ("os._exit(3)", ENDS, "it ended with exit code 3"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", ENDS, "it ended by signal 11 (SIGSEGV)"),
    "says why": (
        'sys.stderr.write("\\x1b[31mblock 7\\x1b[0m\\nis not mine\\n"); sys.stderr.flush(); os._exit(1)',
        ENDS,
        "it ended with exit code 1; last on its standard error: block 7 / is not mine",
    ),
    "leaves a child": ("os.fork() or time.sleep(600); os._exit(4)", ENDS, "it ended with exit code 4"),
    "closes its output": ("os.close(WIRE.answers); time.sleep(600)", ENDS, "it closed its output"),
    "stops in a line": ("say(b'{\"answer\":\"sched', b''); os._exit(0)", NOT_ALLOWED, "in the middle of the line"),
    "an empty line": ("return b''", NOT_ALLOWED, "call 3 is answered by '': Input data was truncated"),
    "no JSON": ("return b'KeyError: 7'", NOT_ALLOWED, "'KeyError: 7': JSON is malformed"),
    "no UTF-8": (r"return b'{\"answer\":\"\xff\"}'", NOT_ALLOWED, r"\\xff"),
    "deep": ("return b'[' * 100000", NOT_ALLOWED, "[[[[[["),
    "another id": (changed('"id":', '"id":9'), NOT_ALLOWED, "one line answers one call"),
    "no id": (changed('"id":', '"no":'), NOT_ALLOWED, "Object contains unknown field `no`"),
    "a line more": ('say(b\'{"answer":"close","id":0}\')', NOT_ALLOWED, 'is answered by \'{"answer":"close"'),
    "a refusal": ('return b\'{"answer":"refused","id":3,"message":"no"}\'', NOT_ALLOWED, "refuses a call"),
    "another answer": (changed("schedule", "commit"), MALFORMED, "Invalid value 'commit'"),
    "a part missing": (changed('"step"', '"stop"'), MALFORMED, "`$.plan`"),
    "a part too many": (changed('{"step"', '{"pace":1,"step"'), MALFORMED, "`pace`"),
    "a string for a number": (changed('"step":0', '"step":"0"'), MALFORMED, "`$.plan.step`"),
    "a long line": ("while True: say(b'x' * 65536, b'')", TOO_LARGE, "it prints a line of more than"),
    "memory": ("HOARD\n    while True: HOARD.append(b'x' * (1 << 24)); time.sleep(0.02)", TOO_LARGE, "its memory grew"),
    "hangs": ("time.sleep(600)", HANGS, "no answer within the bound on a call; its process was killed"),
    "hangs and prints errors": (
        'while True: sys.stderr.write("still here\\n")',
        HANGS,
        "last on its standard error: still here / still here",
    ),
}


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """Bounds that are reached in a moment."""
    monkeypatch.setattr("conformance.wire.process.GROWTH_BYTES_MAX", 1 << 28)
    monkeypatch.setattr("conformance.wire.process.END_SECONDS_MAX", 0.5)
    made = Watchdog(call_seconds_max=1.0)
    yield made
    made.stop()


def processes_of(source: ProcessSource) -> list[Process]:
    fleet = fleets.fleet_of(source.words, strict=source.strict)
    return [peer.process for peer in fleet._idle]


def has_ended(group: int) -> bool:
    """Whether no process of a group runs any more, soon; what waits to be reaped by the system does not run."""
    for _ in range(200):
        stats = [path.read_text(encoding="ascii") for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
        fields = [stat.rpartition(")")[2].split() for stat in stats]  # state, parent, group
        if not any(int(one[2]) == group and one[0] not in "ZX" for one in fields):
            return True
        time.sleep(0.05)
    return False


def run(source: ProcessSource, watchdog: Watchdog) -> Execution:
    return execute(source.factory, EngineConfig(), OPERATIONS, watchdog=watchdog)


@pytest.mark.parametrize(("body", "said", "got"), FAULTS.values(), ids=FAULTS)
def test_it_is_a_finding_and_the_next_engine_gets_a_process(
    body: str, said: str, got: str, hostile: Callable[[str], str], watchdog: Watchdog
) -> None:
    if said == TOO_LARGE:
        watchdog.call_seconds_max = 120.0
    source = load(hostile(AT_SCHEDULE.format(body)))
    assert isinstance(source, ProcessSource)
    source.resolve()
    before = processes_of(source)
    for _ in range(2):
        execution = run(source, watchdog)
        assert len(execution.violations) == 1
        violation = execution.violations[0]
        assert f"{violation.requirement}: {violation.message}".startswith(said)
        assert got in violation.message + violation.got
    if said != MALFORMED:
        assert not before[0].alive
        assert has_ended(before[0]._process.pid)


def test_a_hang_that_no_watchdog_bounds_ends_while_an_engine_is_made(
    hostile: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.wire.peer.MAKE_SECONDS_MAX", 0.5)
    source = load(hostile('if b\'"call":"make"\' in line: time.sleep(600)\nreturn super().answer(line)'))
    execution = execute(source.factory, EngineConfig(), OPERATIONS)
    assert [violation.requirement for violation in execution.violations] == ["PRG-8"]
    assert execution.violations[0].message.startswith("the constructor raised EngineHung: no answer in 0.5 seconds")


def test_a_process_that_ends_with_its_engine_is_replaced_in_silence(
    hostile: Callable[[str], str], watchdog: Watchdog
) -> None:
    source = load(
        hostile(
            'if b\'"call":"close"\' not in line: return super().answer(line)\nsay(super().answer(line))\nos._exit(0)'
        )
    )
    for _ in range(3):
        assert not execute(source.factory, EngineConfig(), OPERATIONS, watchdog=watchdog).violations


def test_a_process_that_cannot_be_had_again_is_no_finding(hostile: Callable[[str], str], watchdog: Watchdog) -> None:
    source = load(hostile(AT_SCHEDULE.format("os._exit(3)")))
    assert isinstance(source, ProcessSource)
    source.resolve()
    Path("hostile.py").write_text("import nothing_of_this_name", encoding="utf-8")
    assert run(source, watchdog).violations
    with pytest.raises(AdapterError, match="No module named 'nothing_of_this_name'"):
        run(source, watchdog)


def test_a_replay_on_an_engine_that_dies_is_no_fix(hostile: Callable[[str], str], watchdog: Watchdog) -> None:
    config = EngineConfig(num_blocks=2, engine_options={"append_check": "touched"})
    execution = execute(make, config, OPERATIONS, judge=["PRE-1"], record=True)
    trace = trace_of("reference", config, execution)
    assert [finding.requirement for finding in trace.footer.violations] == ["PRE-1"]
    assert replay(make, trace, watchdog).status == "FAILED"
    judged = replay(load(hostile(AT_SCHEDULE.format("os._exit(3)"))).factory, trace, watchdog)
    assert judged.status == "ERROR"
    assert "broke down before PRE-1 could be judged: PRG-8: schedule ends the engine's process" in judged.reason


def test_messages_name_no_process_and_no_path_of_this_machine(
    hostile: Callable[[str], str], watchdog: Watchdog
) -> None:
    source = load(hostile(AT_SCHEDULE.format("os._exit(3)")))
    violation = execute(source.factory, EngineConfig(), OPERATIONS, watchdog=watchdog).violations[0]
    assert not re.search(r"/|\d{4}", violation.message + violation.got)
