"""The pairs of releases: well-formed, told apart from other faults, each with a trace, in step with their page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.engines import load as load_engine
from conformance.execute import execute
from conformance.trace import read_trace
from fuzz.bugbench.releases import measured
from fuzz.bugbench.releases.page import page
from fuzz.bugbench.releases.records import SIDES, PairsError, ReleasePair, load
from fuzz.bugbench.releases.runner import BAD_STEPS

ROOT = Path(__file__).parents[3]
BOOK = load()
PAIRS = {pair.id: pair for pair in BOOK.pair}

ONE = """
[[lock]]
distribution = "vllm"
releases = ">=0.10,<0.24"
file = "vllm-0.16.0.txt"

[[pair]]
id = "a-pair"
engine = "vllm-v1"
bad = "0.10.2"
good = "0.12.0"
report = "https://github.com/vllm-project/vllm/pull/26661"
cause = "What goes wrong."
breaks = ["ACC-7"]
message = "preempts"
settings = ["scheduling_policy=priority"]
trace = "0.10.2-preempted-and-run"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pairs.toml"
    path.write_text(text, encoding="utf-8")
    return path


each_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())


def test_there_are_enough_and_most_of_them_of_v1() -> None:
    assert len(PAIRS) >= 14
    assert sum(pair.engine == "vllm-v1" for pair in PAIRS.values()) >= 8


@each_pair
def test_a_pair_names_a_thread_and_locks_that_are_there(pair: ReleasePair) -> None:
    assert re.fullmatch(r"https://github\.com/\S+/(issues|pull)/\d+|https://github\.com/\S+\.py", pair.report)
    for side in SIDES:
        lock = BOOK.lock_for(pair.distribution, pair.release(side))
        assert (ROOT / "requirements" / lock.file).is_file()


@each_pair
def test_its_trace_shows_what_it_is_recognised_by(pair: ReleasePair) -> None:
    trace = read_trace(pair.path)
    finding = trace.footer.violations[0]
    assert pair.order("bad", seed=1, steps_max=1).recognises(finding.requirement, finding.message)


@each_pair
def test_it_takes_nothing_else_for_the_fault(pair: ReleasePair) -> None:
    order = pair.order("good", seed=1, steps_max=1)
    finding = read_trace(pair.path).footer.violations[0]
    assert not order.recognises("DEV-1" if "DEV-1" not in pair.breaks else "DEV-2", finding.message)
    if pair.message:
        assert not order.recognises(finding.requirement, "schedule raised KeyError: 'r0' at somewhere")


@each_pair
def test_the_reference_engine_does_not_show_it(pair: ReleasePair) -> None:
    trace, order = read_trace(pair.path), pair.order("good", seed=1, steps_max=1)
    execution = execute(load_engine("reference").factory, trace.header.config, trace.operations)
    assert not [one for one in execution.violations if order.recognises(one.requirement, one.message)]


def test_what_identifies_a_hunt_changes_with_the_hunt_and_with_nothing_else(tmp_path: Path) -> None:
    (pair,) = load(written(tmp_path, ONE)).pair
    same = ONE.replace("What goes wrong.", "Said otherwise.")
    other = ONE.replace("policy=priority", "policy=fcfs")
    later = ONE.replace("0.12.0", "0.14.0")
    assert load(written(tmp_path, same)).pair[0].digest("bad") == pair.digest("bad")
    assert load(written(tmp_path, other)).pair[0].digest("bad") != pair.digest("bad")
    assert load(written(tmp_path, later)).pair[0].digest("bad") == pair.digest("bad")
    assert load(written(tmp_path, later)).pair[0].digest("good") != pair.digest("good")


def test_a_fix_that_is_one_of_configuration_is_hunted_with_it(tmp_path: Path) -> None:
    text = ONE.replace('good = "0.12.0"', 'good = "0.10.2"').replace(
        "trace =", 'settings_good = ["num_blocks=5"]\ntrace ='
    )
    (pair,) = load(written(tmp_path, text)).pair
    assert pair.order("bad", seed=1, steps_max=1).settings == ("scheduling_policy=priority",)
    assert pair.order("good", seed=1, steps_max=1).settings == ("num_blocks=5",)


MISTAKES = [
    ('id = "a-pair"', 'id = "a-pair', "pairs.toml: "),
    ("bad =", "worse =", "pairs.toml: Object contains unknown field `worse` - at `$.pair[0]`"),
    ('engine = "vllm-v1"', 'engine = "reference"', "pair a-pair: engine 'reference' is no built-in one"),
    ("https://", "http://", "pair a-pair: report must be one https link, got 'http://github"),
    ("What goes wrong.", "What goes wrong", "pair a-pair: cause must end with a full stop, got 'goes wrong'"),
    ('"ACC-7"', '"ACC-99"', "pair a-pair: breaks must name requirements of the contract, got ACC-99"),
    ('["ACC-7"]', "[]", "pair a-pair: breaks must name requirements of the contract, got none"),
    ('"preempts"', '"(preempts"', "pair a-pair: message is no regular expression: missing )"),
    ("scheduling_policy=priority", "policy=priority", "pair a-pair: settings: policy=priority: no such field"),
    ('good = "0.12.0"', 'good = "0.10.2"', "good must be later than bad unless settings_good is given, got 0.10.2"),
    ('good = "0.12.0"', 'good = "0.33.0"', "pair a-pair: no [[lock]] covers vllm 0.33.0"),
    ('bad = "0.10.2"', 'bad = "ten"', "pair a-pair: Invalid version: 'ten'"),
]


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES)
def test_a_mistake_is_named_with_its_pair(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in ONE
    with pytest.raises(PairsError) as caught:
        load(written(tmp_path, ONE.replace(old, new, 1)))
    assert said in str(caught.value)


def test_an_id_is_used_once(tmp_path: Path) -> None:
    with pytest.raises(PairsError, match="pair a-pair: the id is used twice"):
        load(written(tmp_path, ONE + ONE[ONE.index("[[pair]]") :]))


def test_what_is_checked_in_was_measured_with_the_pairs_as_they_are() -> None:
    figures = measured.load()
    assert figures.keys() == PAIRS.keys()
    for name, one in figures.items():
        assert one.digests == (PAIRS[name].digest("bad"), PAIRS[name].digest("good")), f"{name}: hunt again"


def test_every_fault_was_seen_with_every_seed_and_in_the_bad_release_alone() -> None:
    """How many steps of the good release were done without it is on the page."""
    for name, one in measured.load().items():
        assert one.found, name
        assert not one.good_sights, name
        assert all(hunt.steps <= BAD_STEPS for hunt in one.bad), name


def test_the_page_is_up_to_date() -> None:
    path = ROOT / "docs" / "reference" / "release-pairs.md"
    assert path.read_text(encoding="utf-8") == page(), f"run: python -m fuzz.bugbench.releases --write {path}"
