"""The loader of the contract: what it gives, and what it says of a file that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance import requirements
from conformance.requirements import LEVELS, RequirementsError, load, parse, render

ONE = """
edition = "1"

[[family]]
prefix = "ACC"
title = "Accounting"
text = "Who owns which block."

[[requirement]]
id = "ACC-1"
level = "MUST"
title = "Conservation"
text = "The classes add up to the pool."
since = "1"
source = "kvconform design"
rationale = "A block in no class is leaked."
oracle = "conformance.oracles.accounting"
needs = ["snapshot"]
"""

EMPTY_FAMILY = """
[[family]]
prefix = "KV"
title = "Content"
text = "What attention reads."

"""


def message(text: str) -> str:
    with pytest.raises(RequirementsError) as caught:
        parse(text, name="contract.toml")
    return str(caught.value)


def test_load_gives_the_requirements_by_id() -> None:
    contract = load()
    assert contract["PRE-1"].level == "MUST"
    assert contract["PRE-1"].family == "PRE"
    assert all(key == row.id for key, row in contract.items())


def test_load_gives_a_dictionary_of_the_callers_own() -> None:
    load().clear()
    assert load()


def test_every_level_is_a_known_one() -> None:
    assert {row.level for row in load().values()} <= set(LEVELS)


def test_a_requirement_without_needs_always_applies() -> None:
    assert load()["KV-1"].missing(()) == ()


def test_each_needed_feature_that_is_not_declared_is_named() -> None:
    assert load()["CCH-3"].missing(["prefix_caching"]) == ("reset_prefix_cache",)


def test_one_of_the_alternatives_is_enough() -> None:
    victims = load()["PRE-3"]
    assert victims.missing(["swap"]) == ()
    assert victims.missing(["abort"]) == ("recompute or swap",)


def test_a_well_formed_file_is_read() -> None:
    contract = parse(ONE, name="contract.toml")
    assert contract.edition == "1"
    assert contract.requirements["ACC-1"].needs == ("snapshot",)


MISTAKES = [
    ('id = "ACC-1"', 'id = "ACC-1', "contract.toml: not valid TOML"),
    ('edition = "1"', "edition = 1", 'edition must be a number in quotes such as "1", got 1'),
    ("[[family]]", "[[families]]", "unknown key 'families'; known: edition, family, requirement"),
    ("[[requirement]]", "[requirement]", "expected at least one [[requirement]] table"),
    ("[[requirement]]", f"{EMPTY_FAMILY}[[requirement]]", "family KV: has no requirement"),
    ('id = "ACC-1"', 'id = "ACX-1"', "requirement ACX-1: an id is a family (ACC), a hyphen and 1 to 99"),
    ('id = "ACC-1"', 'id = "ACC-01"', "requirement ACC-01: an id is a family"),
    ('id = "ACC-1"\n', "", "requirement number 1: Object missing required field `id`"),
    ('level = "MUST"', 'level = "SHALL"', "requirement ACC-1: Invalid enum value 'SHALL' - at `$.level`"),
    ('needs = ["snapshot"]', 'needs = ["snapshots"]', "Invalid enum value 'snapshots' - at `$.needs[0]`"),
    ('needs = ["snapshot"]', 'needs = ["usage", "abort"]', "needs must be sorted and free of duplicates"),
    ('needs = ["snapshot"]', 'need = ["snapshot"]', "unknown field `need`"),
    ('since = "1"', 'since = "2"', "since must be an edition from 1 to 1, got '2'"),
    ("up to the pool.", "up to the pool", "text must end with a full stop, got 's add up to the pool'"),
    ('source = "kvconform design"', 'source = " "', "source must be one non-empty line"),
    ('oracle = "conformance.oracles.accounting"', 'oracle = "books!"', "oracle must be the name of a module"),
]


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES)
def test_a_mistake_is_named_with_its_entry_and_field(old: str, new: str, said: str) -> None:
    assert old in ONE
    assert said in message(ONE.replace(old, new, 1))


def test_an_id_is_never_used_twice() -> None:
    again = ONE[ONE.index("[[requirement]]") :]
    assert "requirement ACC-1: the id is used twice" in message(ONE + again)


def test_all_mistakes_are_reported_at_once() -> None:
    said = message(ONE.replace('since = "1"', 'since = "0"').replace("design", "").replace('"kvconform "', '""'))
    assert said.count("contract.toml: requirement ACC-1: ") == 2


def test_the_page_links_each_row_of_its_table_to_a_section() -> None:
    page = render(requirements.load_contract())
    found = re.findall(r"^### (.*)$", page, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}
    links = re.findall(r"^\| \[[A-Z]+-\d+\]\(#([^)]+)\)", page, re.MULTILINE)
    assert len(links) == len(load())
    assert set(links) == headings


def test_write_then_check_agrees(tmp_path: Path) -> None:
    page = tmp_path / "reference" / "requirements.md"
    assert requirements.main(["--write", str(page)]) == 0
    assert requirements.main(["--check", str(page)]) == 0


def test_check_shows_the_difference_and_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "requirements.md"
    requirements.main(["--write", str(page)])
    page.write_text(page.read_text(encoding="utf-8").replace("| MUST | Conservation |", "| MAY | Conservation |"))
    assert requirements.main(["--check", str(page)]) == 1
    said = capsys.readouterr().err
    assert "-| [ACC-1](#acc-1-conservation) | MAY |" in said
    assert f"run python -m conformance.requirements --write {page}" in said


def test_check_of_a_page_that_is_not_there_fails(tmp_path: Path) -> None:
    assert requirements.main(["--check", str(tmp_path / "none.md")]) == 1
