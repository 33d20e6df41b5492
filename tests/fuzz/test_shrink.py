"""The shrinker ends with the shortest sequence of requests, and with a file that shows it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.execute import execute, replay
from conformance.operations import Abort, Add, Operation, Step
from conformance.protocol import Engine, EngineConfig, OptionValue
from conformance.trace import read_trace
from conformance.violations import Violation
from fuzz.bugbench.registry import load
from fuzz.driver import Driver, flatten
from fuzz.findings import fingerprint, keep, source
from fuzz.shrink import Shrinker, normalised


def touched(config: EngineConfig) -> Engine:
    """The reference engine with the append check of vLLM V0's block manager v2: the fault of issue 8007."""
    return make(msgspec.structs.replace(config, engine_options={"append_check": "touched"}))


CONFIG = EngineConfig(num_blocks=4, block_size=32, max_model_len=32, max_num_seqs=4)
OPERATIONS: list[Operation] = [
    Add(prompt_len=9, max_tokens=5),
    Step(),
    Add(prompt_len=12, max_tokens=8, family=1, shared_len=4),
    Add(prompt_len=10, max_tokens=20),
    Step(),
    Add(prompt_len=11, max_tokens=20),
    *[Step() for _ in range(20)],
]


def first_violation() -> Violation:
    return execute(touched, CONFIG, OPERATIONS, judge={"PRE-1"}).violations[0]


def test_the_seed_shrinks_to_one_request_in_one_block() -> None:
    shrunk = Shrinker(touched).shrink(CONFIG, OPERATIONS, first_violation())
    assert shrunk.operations == [Add(prompt_len=1, max_tokens=2)]
    assert (shrunk.config.num_blocks, shrunk.config.max_num_seqs) == (1, 1)
    assert shrunk.stable == 3
    assert shrunk.violation.requirement == "PRE-1"


def test_a_request_that_stops_by_itself_takes_the_place_of_an_abort() -> None:
    """Blocks must be freed with two steps in flight; an abort does it, and so does a sequence that stops."""
    early = load()["deferred_free_comes_one_step_early"].factory()
    config = EngineConfig(num_blocks=1, block_size=2, max_num_seqs=1, max_model_len=3, pipeline_depth=3)
    operations: list[Operation] = [
        Add(prompt_len=1, max_tokens=2), Step(), Step(), Abort(), Add(prompt_len=1, max_tokens=1)
    ]  # fmt: skip
    violation = execute(early, config, operations, judge={"KV-5"}).violations[0]
    shrunk = Shrinker(early).shrink(config, operations, violation)
    assert [type(one) for one in shrunk.operations] == [Add, Add]
    assert shrunk.stable == 3


def test_one_request_takes_the_place_of_several_small_ones() -> None:
    """A cached block is handed out again while it is hit: five requests use up the pool, and so does one."""
    unpinned = load()["hit_is_not_pinned"].factory()
    options: dict[str, OptionValue] = {"null_block": True}
    config = EngineConfig(
        num_blocks=9, block_size=1, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=4,
        enable_prefix_caching=True, engine_options=options,
    )  # fmt: skip
    cached = Add(prompt_len=1, max_tokens=1, family=1, shared_len=1)
    fillers = [Add(prompt_len=1, max_tokens=outputs) for outputs in (2, 1, 1, 1, 1)]
    operations: list[Operation] = [cached, *fillers, msgspec.structs.replace(cached, prompt_len=3)]
    violation = execute(unpinned, config, operations).violations[0]
    shrunk = Shrinker(unpinned).shrink(config, operations, violation)
    assert len(shrunk.operations) == 3
    assert shrunk.stable == 3


def test_pinned_fields_are_not_shrunk() -> None:
    pinned = frozenset({"num_blocks", "block_size", "max_model_len"})
    shrunk = Shrinker(touched, pinned=pinned).shrink(CONFIG, OPERATIONS, first_violation())
    assert (shrunk.config.num_blocks, shrunk.config.block_size, shrunk.config.max_model_len) == (4, 32, 32)
    assert len(shrunk.operations) == 4, "four requests fill four blocks"


def test_executions_are_bounded() -> None:
    shrinker = Shrinker(touched, executions_max=10)
    shrunk = shrinker.shrink(CONFIG, OPERATIONS, first_violation())
    assert shrinker.executions <= 10 + 3, "the final replays come on top"
    assert shrunk.violation.requirement == "PRE-1"


def test_shrinking_is_deterministic() -> None:
    one, other = (Shrinker(touched).shrink(CONFIG, OPERATIONS, first_violation()) for _ in range(2))
    assert msgspec.json.encode(one) == msgspec.json.encode(other)


def test_what_else_the_same_trace_breaks_is_said(tmp_path: Path) -> None:
    pinned = frozenset({"num_blocks", "block_size", "max_model_len"})
    shrunk = Shrinker(touched, pinned=pinned).shrink(CONFIG, OPERATIONS, first_violation())
    kept = keep(touched, "reference", shrunk, tmp_path)
    assert "PRE-2" in {symptom.requirement for symptom in kept.symptoms}


def test_a_violation_that_does_not_come_back_is_returned_unshrunk() -> None:
    shrunk = Shrinker(make).shrink(CONFIG, OPERATIONS, first_violation())
    assert (shrunk.stable, shrunk.operations) == (0, OPERATIONS)


def test_every_fault_of_a_campaign_shrinks_to_what_fails_again() -> None:
    capabilities = make(EngineConfig()).capabilities
    driver = Driver(touched, capabilities, seed=2)
    seen = 0
    for index in range(40):
        run = driver.run(index)
        for violation in run.violations:
            seen += 1
            shrunk = Shrinker(touched).shrink(run.swarm.config, flatten(run.operations), violation)
            assert shrunk.stable == 3
            assert len(shrunk.operations) <= 4, shrunk
    assert seen >= 5


def test_a_finding_is_a_trace_that_fails_and_a_test_that_fails(tmp_path: Path) -> None:
    shrunk = Shrinker(touched).shrink(CONFIG, OPERATIONS, first_violation())
    kept = keep(touched, "reference", shrunk, tmp_path, seed=1)
    trace = read_trace(kept.trace)
    assert replay(touched, trace).status == "FAILED"
    assert replay(touched, trace).same_digest
    assert replay(make, trace).status == "FIXED"
    # On the sound reference engine, which is what the file names, the ready test passes.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(kept.test)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("r1 is preempted in step 3 while 0 are free", "r22 is preempted in step 40 while 7 are free", True),
        ("table [1, 2]", "table [3]", True),
        ("r1 reads block 3, which holds nothing", "r1 reads block 3, which holds r2's token", False),
    ],
)
def test_findings_are_told_apart_by_words_not_numbers(*, one: str, other: str, same: bool) -> None:
    texts = [normalised(Violation(requirement="KV-1", message=message)) for message in (one, other)]
    assert (texts[0] == texts[1]) is same


@pytest.mark.parametrize("kind", ["EngineHung", "MemoryExhausted"])
def test_an_engine_that_is_stopped_in_another_way_has_done_the_same(kind: str) -> None:
    here, there = (
        normalised(Violation(requirement="PRG-8", message=f"schedule raised {kind}: {words}"))
        for words in ("no answer within the bound on a call", "no answer in 9 seconds; its process was killed")
    )
    assert here == there
    assert here != normalised(Violation(requirement="PRG-8", message="schedule raised KeyError: at a.py:45 in decide"))


def test_the_fingerprint_follows_the_shape_of_the_trace() -> None:
    shrunk = Shrinker(touched).shrink(CONFIG, OPERATIONS, first_violation())
    longer = msgspec.structs.replace(shrunk, operations=[*shrunk.operations, Step()])
    other_sizes = msgspec.structs.replace(shrunk, operations=[Add(prompt_len=3, max_tokens=4)])
    assert fingerprint(longer) != fingerprint(shrunk)
    assert fingerprint(other_sizes) == fingerprint(shrunk)


def test_operations_as_source_leave_defaults_out() -> None:
    assert source(Add(prompt_len=3, max_tokens=4)) == "Add(prompt_len=3, max_tokens=4)"
    assert source(Add(prompt_len=3, max_tokens=4, n=2)) == "Add(prompt_len=3, max_tokens=4, n=2)"
    assert source(Step()) == "Step()"
