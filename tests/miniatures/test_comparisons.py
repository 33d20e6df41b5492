"""What only several runs show: each miniature fails the check of its requirement, and the clean one none."""

from __future__ import annotations

import pytest

from conformance.check import check
from conformance.engines import EngineSource
from conformance.protocol import Engine, EngineConfig
from conformance.requirements import load
from conformance.results import CheckResult
from conformance.violations import Violation

from . import broken_accounting, broken_content, broken_on_device, broken_scheduling
from . import broken_in_comparison as broken
from .clean import Miniature, PrefillsFirst

MODULES = (broken_accounting, broken_content, broken_on_device, broken_scheduling, broken)


class Source(EngineSource):
    """Builds a miniature instead of importing an engine."""

    __slots__ = ("_kind",)

    def __init__(self, kind: type[Miniature]) -> None:
        super().__init__(kind.__name__, "miniatures:miniature")
        self._kind = kind

    def resolve(self) -> type[Miniature]:
        return self._kind

    def factory(self, config: EngineConfig) -> Engine:
        return self._kind(config)


def judged(kind: type[Miniature]) -> CheckResult:
    report = check(Source(kind), requirements=[kind.breaks])
    assert report.smoke.status == "ok", report.smoke.reason
    return report.results[0]


def violation(kind: type[Miniature]) -> Violation:
    result = judged(kind)
    assert result.status == "fail", result.reason
    shown = next(case.violation for case in result.cases if case.status == "fail")
    assert shown is not None
    return shown


def test_usable_concurrency_short_of_the_pool_is_reported() -> None:
    found = violation(broken.KeepsBlockInReserve)
    assert "never ran more than 3 at once" in found.message
    assert (found.expected, found.got) == ("4 sequences running at once", "3 at most")


def test_throughput_that_collapses_at_the_brim_is_reported() -> None:
    found = violation(broken.SlowWhenFull)
    assert found.message.startswith("4 requests take ")
    assert "3 take 30" in found.message


def test_a_repeat_that_hits_less_than_it_could_is_reported() -> None:
    found = violation(broken.DropsLastHit)
    assert found.message.startswith("r1 repeats ")
    assert found.expected.endswith("positions from the cache")


def test_a_request_that_waits_because_of_the_cache_is_reported() -> None:
    found = violation(broken.CountsCachedAsUsed)
    assert "steps with prefix caching, 0 without" in found.message
    assert found.expected == "at most 0 steps: cached blocks can be evicted"


def test_another_plan_for_the_same_operations_is_reported() -> None:
    found = violation(broken.DiffersFromOneToTheNext)
    assert found.message.endswith("differs when the same operations are run again")
    assert found.expected != found.got


def test_other_tokens_under_another_schedule_are_reported() -> None:
    found = violation(broken.GarblesThePreempted)
    assert "gets other tokens" in found.message
    assert found.got.endswith("0]]")


@pytest.mark.parametrize("clean", [Miniature, PrefillsFirst], ids=["decodes-on", "prefills-first"])
def test_a_clean_miniature_keeps_the_whole_contract(clean: type[Miniature]) -> None:
    report = check(Source(clean))
    assert [(row.requirement, row.reason) for row in report.results if row.status == "fail"] == []
    assert report.ok


def test_every_requirement_of_an_engine_has_a_miniature_that_breaks_it() -> None:
    kinds = [kind for module in MODULES for kind in vars(module).values() if isinstance(kind, type)]
    broken_ids = {kind.breaks for kind in kinds if issubclass(kind, Miniature) and kind.breaks}
    assert broken_ids == set(load())
