"""Hunts on releases: what counts as a find, what is kept of it, and that a run goes on where it was stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from conformance.execute import execute
from conformance.operations import Add
from conformance.protocol import EngineConfig, Feature
from fuzz.bugbench.registry import load as load_faults
from fuzz.bugbench.releases.__main__ import main
from fuzz.bugbench.releases.environments import ROOT, Place
from fuzz.bugbench.releases.hunt import Order, Outcome, Sighting, hunt
from fuzz.bugbench.releases.measured import measured_of
from fuzz.bugbench.releases.page import table
from fuzz.bugbench.releases.records import ReleasePair
from fuzz.bugbench.releases.runner import HuntFailed, Plan, Results, ResultsError, Runner, in_process

FAULT = "fuzz.bugbench:wants_one_spare_block"
SEEN = Sighting(requirement="PRE-1", message="r0 is preempted", config=EngineConfig(), operations=[])
PLAN = Plan(seeds=2, bad_steps=100, good_steps=60, part_steps=25)


def order(engine: str, *, message: str = "", until_found: bool = True, steps_max: int = 4000) -> Order:
    return Order(
        engine=engine, breaks=("PRE-1",), message=message, seed=1, steps_max=steps_max, until_found=until_found
    )


def pair(name: str, bad: str = "1.0", good: str = "2.0") -> ReleasePair:
    return ReleasePair(
        id=name,
        engine="smol-vllm",
        bad=bad,
        good=good,
        report="https://example.org/1",
        cause="It does.",
        breaks=("PRE-1",),
        trace="spare-block-stall",
    )


class FakeProcess:
    """Sees the fault in release 1.0 and nothing elsewhere; ``stop_after`` outcomes it is interrupted."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.calls: list[tuple[str, list[int]]] = []
        self.given = 0

    def __call__(self, place: Place, orders: Sequence[Order]) -> Iterator[Outcome]:
        release = place.path[0].name
        self.calls.append((release, [one.seed for one in orders]))
        for one in orders:
            if self.given == self.stop_after:
                raise KeyboardInterrupt
            self.given += 1
            seen = release == "1.0"
            yield Outcome(
                version=release,
                steps=7 if seen else one.steps_max,
                sights=int(seen),
                first=SEEN if seen else None,
                others={} if seen else {"PRG-8 schedule raised": 2},
            )


def place(distribution: str, release: str) -> Place:
    assert distribution == "smol-vllm"
    return Place(Path(sys.executable), (Path(release),))


def run(path: Path, process: FakeProcess, *pairs: ReleasePair, plan: Plan = PLAN) -> Results:
    results = Results(path)
    Runner(pairs, plan, results, place=place, process=process).run()
    return results


# ------------------------------------------------------------------------------------------------------ one hunt


def test_a_fault_is_seen_and_its_trace_shows_it_again() -> None:
    outcome = hunt(order(FAULT))
    assert outcome.sights == 1
    assert outcome.steps < 4000
    assert outcome.first is not None
    again = execute(load_faults()[FAULT.partition(":")[2]].factory(), outcome.first.config, outcome.first.operations)
    assert again.violations[0].message == outcome.first.message


def test_a_trace_is_shrunk_on_demand() -> None:
    found = hunt(order(FAULT)).first
    shrunk = hunt(msgspec.structs.replace(order(FAULT), shrink_executions_max=300)).first
    assert found is not None
    assert shrunk is not None
    assert found.stable is None
    assert shrunk.stable == 3
    assert len(shrunk.operations) < len(found.operations)


def test_another_find_does_not_count() -> None:
    outcome = hunt(order(FAULT, message="no such words", steps_max=1500))
    assert outcome.sights == 0
    assert outcome.first is None
    assert outcome.steps >= 1500
    assert {kind.split()[0] for kind in outcome.others} == {"PRE-1"}


def test_a_sound_engine_is_hunted_to_the_end_and_is_silent() -> None:
    outcome = hunt(order("reference", until_found=False, steps_max=1500))
    assert outcome.steps >= 1500
    assert (outcome.sights, outcome.first, outcome.others) == (0, None, {})


def test_a_hunt_to_the_end_counts_every_sight() -> None:
    outcome = hunt(order(FAULT, until_found=False, steps_max=3000))
    assert outcome.sights > 1


def test_a_feature_that_is_left_out_is_used_neither_by_configurations_nor_by_requests() -> None:
    everything = order(FAULT)
    without: tuple[Feature, ...] = ("fork", "prefix_caching", "swap")
    assert set(without) <= set(used(everything))
    assert not set(without) & set(used(msgspec.structs.replace(everything, without=without)))


def used(order: Order) -> Iterator[str]:
    """The features that the first sights with some seeds have in their configurations and requests."""
    for seed in range(12):
        first = hunt(msgspec.structs.replace(order, seed=seed)).first
        if first is not None:
            yield from first.config.features_needed()
            yield from ("fork" for operation in first.operations if isinstance(operation, Add) and operation.n > 1)


# ------------------------------------------------------------------------------------------------------- all of them


def test_the_bad_side_is_hunted_with_each_seed_and_the_good_one_in_parts(tmp_path: Path) -> None:
    process = FakeProcess()
    results = run(tmp_path / "r.jsonl", process, pair("one"))
    assert process.calls == [("1.0", [1, 2]), ("2.0", [1, 2, 3])]
    figures = measured_of(pair("one"), results)
    assert [(hunt.seed, hunt.steps, hunt.seen_as) for hunt in figures.bad] == [(1, 7, "PRE-1"), (2, 7, "PRE-1")]
    assert (figures.good_steps, figures.good_sights, figures.others) == (75, 0, {"PRG-8": 6})
    assert figures.holds


def test_pairs_of_one_release_share_a_process(tmp_path: Path) -> None:
    process = FakeProcess()
    run(tmp_path / "r.jsonl", process, pair("one"), pair("elsewhere", "1.5", "3.0"), pair("two", good="3.0"))
    assert [release for release, _ in process.calls] == ["1.0", "1.5", "2.0", "3.0"]


@pytest.mark.parametrize("stop_after", [0, 1, 2, 4])
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path, stop_after: int) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, FakeProcess(stop_after), pair("one"))
    with path.open("ab") as file:
        file.write(b'{"schema":1,"kvcon')
    rest = FakeProcess()
    results = run(path, rest, pair("one"))
    assert rest.given == 5 - stop_after
    whole = run(tmp_path / "whole.jsonl", FakeProcess(), pair("one"))
    assert measured_of(pair("one"), results) == measured_of(pair("one"), whole)
    run(path, FakeProcess(0), pair("one"))  # nothing is left to do, else it would be interrupted


def test_a_process_that_fails_keeps_nobody_else_from_being_hunted(tmp_path: Path) -> None:
    class Failing(FakeProcess):
        def __call__(self, place: Place, orders: Sequence[Order]) -> Iterator[Outcome]:
            if place.path[0].name == "1.0":
                raise HuntFailed("1.0: ended with exit code 1: no such module")
            return super().__call__(place, orders)

    process, path = Failing(), tmp_path / "r.jsonl"
    with pytest.raises(HuntFailed, match=r"^1\.0: ended with exit code 1: no such module$"):
        run(path, process, pair("one"), pair("elsewhere", "1.5"))
    assert [release for release, _ in process.calls] == ["1.5", "2.0"]
    assert len(Results(path).of(pair("elsewhere", "1.5"), "good")) == 3


def test_a_hunt_that_the_pair_orders_otherwise_is_done_anew(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, FakeProcess(), pair("one"))
    changed = msgspec.structs.replace(pair("one"), message="preempted")
    again = FakeProcess()
    results = run(path, again, changed)
    assert again.given == 5
    assert len(results.of(changed, "bad")) == 2


def test_a_longer_plan_keeps_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, FakeProcess(), pair("one"))
    more = FakeProcess()
    run(path, more, pair("one"), plan=msgspec.structs.replace(PLAN, seeds=3, good_steps=100))
    assert more.calls == [("1.0", [3]), ("2.0", [4])]


def test_a_fault_that_is_not_seen_and_one_that_is_seen_in_the_good_release_do_not_hold(tmp_path: Path) -> None:
    results = run(tmp_path / "r.jsonl", FakeProcess(), pair("missed", "1.5"), pair("still-there", "0.9", "1.0"))
    missed, still_there = (
        measured_of(one, results) for one in (pair("missed", "1.5"), pair("still-there", "0.9", "1.0"))
    )
    assert not missed.found
    assert still_there.good_sights == 3
    assert not (missed.holds or still_there.holds)
    assert "| 0 of 2 | not seen | 75 | 0 | PRG-8 6 |" in table([pair("missed", "1.5")], [missed])


def test_steps_that_a_longer_hunt_has_done_again_count_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, FakeProcess(), pair("one"))
    results = run(path, FakeProcess(), pair("one"), plan=msgspec.structs.replace(PLAN, good_steps=80, part_steps=40))
    assert measured_of(pair("one"), results).good_steps == 40 + 40 + 25


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("notes without an end of line", r"r\.jsonl: no file of results, which begins with .*; name another"),
        ('{"schema":1}\n', r"r\.jsonl:1: not a line of results: .*; name another file"),
        ('{"kind": "header"}\n', r"r\.jsonl: no file of results"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path, held: str, said: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(held, encoding="utf-8")
    with pytest.raises(ResultsError, match=said):
        Results(path)
    assert path.read_text(encoding="utf-8") == held


# --------------------------------------------------------------------------------------------------- another process


def test_hunts_are_done_in_another_process() -> None:
    here = Place(Path(sys.executable), (ROOT,))
    seen, silent = in_process(here, [order(FAULT), order("reference", until_found=False, steps_max=200)])
    assert seen.first is not None
    assert seen.first == hunt(order(FAULT)).first
    assert silent.sights == 0


def test_a_process_that_ends_early_says_why() -> None:
    here = Place(Path(sys.executable), (ROOT,))
    with pytest.raises(HuntFailed, match=r"ended with exit code 1: (.|\n)*no engine 'nothing-of-the-kind'"):
        list(in_process(here, [order("nothing-of-the-kind")]))


# ---------------------------------------------------------------------------------------------------------- command


def test_the_pairs_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "preempted-and-run"]) == 0
    assert capsys.readouterr().out == (
        "preempted-and-run  vllm-v1 0.10.2 -> 0.12.0  https://github.com/vllm-project/vllm/pull/26661\n"
    )


def test_a_pair_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-pair"]) == 2
    assert capsys.readouterr().err.startswith("no pair no-such-pair; there is full-batch-recomputed, ")


def test_a_count_is_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seeds", "0"])
    assert "argument --seeds: invalid" in capsys.readouterr().err
