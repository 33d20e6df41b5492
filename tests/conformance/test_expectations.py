"""Expectations: what a file may say, what an entry covers, and when it is stale."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from conformance.check import conclude, is_stale
from conformance.expectations import Expectation, ExpectationsError, for_engine, parse, read
from conformance.protocol import Capabilities
from conformance.requirements import load
from conformance.results import CaseResult, Status
from conformance.scenarios import cases_of

ONE = """
[[known]]
requirement = "PRE-7"
cases = ["full-batch/paged-*"]
versions = ">=0.6,<0.7"
reason = "asks for one block each"
link = "https://example.org/8007"
"""

NAMES = sorted(path.name.removesuffix(".toml") for path in files("conformance").joinpath("expectations").iterdir())


def entry(**fields: object) -> Expectation:
    return Expectation(**{"requirement": "PRE-7", "reason": "asks for more", "link": "issue 1", **fields})  # type: ignore[arg-type]


def results(**statuses: Status) -> list[CaseResult]:
    """A result for each case of PRE-7: ``all`` for those not named by their ending."""
    names = [f"{scenario.name}/{case.name}" for scenario, case in cases_of("PRE-7")]
    return [
        CaseResult(
            requirement="PRE-7",
            case=name,
            status=next((status for key, status in statuses.items() if name.endswith(key.replace("_", "-"))), "pass"),
        )
        for name in names
    ]


def test_a_well_formed_file_is_read() -> None:
    (known,) = parse(ONE, source="engine.toml").entries
    assert known.covers("full-batch/paged-4-seqs")
    assert not known.covers("full-batch/sequence-blocks-4-seqs")
    assert known.describe() == "asks for one block each (https://example.org/8007)"


@pytest.mark.parametrize(
    ("version", "applies"), [("0.6.0", True), ("0.6.3.post1", True), ("0.7.0", False), ("unknown", False)]
)
def test_an_entry_is_about_versions(version: str, *, applies: bool) -> None:
    capabilities = Capabilities(engine="engine", version=version, features=frozenset())
    assert bool(parse(ONE, source="engine.toml").applying(capabilities)) is applies


def test_an_entry_may_be_about_a_variant() -> None:
    known = entry(variant="*manager v1)")
    assert known.applies("1", "engine (block manager v1)")
    assert not known.applies("1", "engine (block manager v2)")
    assert known.applies("1")


FUZZED = ONE.replace('cases = ["full-batch/paged-*"]', 'cases = ["fuzz"]').replace(">=0.6,<0.7", "")


def engine_called(name: str) -> Capabilities:
    return Capabilities(engine=name, version="1", features=frozenset())


def test_an_entry_may_be_about_what_is_said() -> None:
    known = parse(FUZZED + 'message = "*frees no block; got blocks *"', source="engine.toml")
    tells = known.known(engine_called("engine"))
    assert tells("PRE-7", "the preemption of r1 frees no block; got blocks [2]")
    assert not tells("PRE-7", "the preemption of r1 frees no block; got no block held")
    assert not tells("PRE-1", "the preemption of r1 frees no block; got blocks [2]")
    assert not known.fuzzed("1")


def test_an_entry_for_the_fuzzer_is_about_its_variant_alone() -> None:
    known = parse(FUZZED + 'variant = "*async*"', source="engine.toml")
    assert known.known(engine_called("engine (async)"))("PRE-7", "anything")
    assert not known.known(engine_called("engine (sync)"))("PRE-7", "anything")
    assert not known.fuzzed("1")


def test_without_either_the_fuzzer_does_not_judge_the_requirement() -> None:
    assert parse(FUZZED, source="engine.toml").fuzzed("1") == {"PRE-7"}


MISTAKES = [
    ('link = "', 'message = "*"\nlink = "', 'message: expected with cases of "fuzz" or "corpus" alone'),
    ("[[known]]", "[[known", "not valid TOML"),
    ("[[known]]", "[known]", "known: expected an array of tables, [[known]], got dict"),
    ("[[known]]", "[[wellknown]]", "unknown key; expected [[known]] tables, got 'wellknown'"),
    ('requirement = "PRE-7"', "", "entry 1: Object missing required field `requirement`"),
    ("PRE-7", "PRE-77", "entry 1 (PRE-77): expected a requirement of the contract, which has no such one"),
    ("paged-*", "pagd-*", "cases: expected patterns of scenario/case, got 'full-batch/pagd-*', which names no case"),
    (">=0.6,<0.7", "0.6 or so", "versions: expected a version specifier such as '>=0.6,<0.7', got '0.6 or so'"),
    ("asks for one block each", " ", "expected a reason and a link, got an empty one"),
    ("versions", "version", "unknown field `version`"),
]


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES)
def test_a_mistake_is_named_with_its_entry(old: str, new: str, said: str) -> None:
    assert old in ONE
    with pytest.raises(ExpectationsError) as caught:
        parse(ONE.replace(old, new, 1), source="engine.toml")
    assert str(caught.value).startswith("engine.toml: ")
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExpectationsError, match=r"none\.toml: cannot be read"):
        read(tmp_path / "none.toml")


def test_a_failure_that_is_known_is_not_a_failure() -> None:
    verdict = conclude(load()["PRE-7"], results(paged_4_seqs="fail"), [entry(cases=("full-batch/paged-4-seqs",))])
    assert verdict.status == "known"
    assert "asks for more (issue 1)" in verdict.reason


def test_a_failure_of_another_case_is_one() -> None:
    verdict = conclude(load()["PRE-7"], results(paged_4_seqs="fail"), [entry(cases=("full-batch/paged-16-seqs",))])
    assert verdict.status == "fail"


def test_an_expected_failure_that_passes_is_stale() -> None:
    verdict = conclude(load()["PRE-7"], results(), [entry()])
    assert verdict.status == "stale"
    assert verdict.reason == "expected to fail (asks for more (issue 1)) and does not: delete the entry"


def test_an_entry_is_not_stale_while_one_of_its_cases_fails() -> None:
    assert conclude(load()["PRE-7"], results(paged_4_seqs="fail"), [entry()]).status == "known"


def test_an_entry_is_not_stale_when_its_cases_say_nothing() -> None:
    cases = [CaseResult(requirement="PRE-7", case=case.case, status="skip") for case in results()]
    assert not is_stale(entry(), cases)


def test_an_entry_is_not_stale_when_not_all_of_its_cases_were_run() -> None:
    assert is_stale(entry(), results())
    assert not is_stale(entry(), results()[:-1])


def test_nothing_is_known_of_the_reference_engine() -> None:
    assert for_engine("reference").entries == ()


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_come_along_are_well_formed(name: str) -> None:
    assert for_engine(name).entries


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_raises_is_known_by_what_it_says(name: str) -> None:
    # PRG-6 and PRG-8 are broken by whatever ends a call: one known cause must not hide the next.
    by_id_alone = [
        one.reason
        for one in for_engine(name).entries
        if one.requirement in {"PRG-6", "PRG-8"} and one.covers("fuzz") and not one.message
    ]
    assert not by_id_alone
