"""Scenarios: they cover the contract, keep to what is pinned, and say in figures what they saw."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from conformance.adapters.reference import make
from conformance.operations import Abort, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.protocol import Capabilities, EngineConfig
from conformance.requirements import load
from conformance.scenarios import SCENARIOS, Bench, Case, Scenario, Setting, case_names, cases_of, run_case
from conformance.scenarios.base import Inapplicable
from conformance.scenarios.bench import Unjudged, Unsupported, features_of
from conformance.settings import PRESETS

REQUIREMENTS = list(load())
CASES = [pytest.param(case, id=name) for name, (_, case) in case_names().items()]
REFERENCE = make(EngineConfig()).capabilities
NEURON = EngineConfig(**PRESETS["neuron"].fields)


def setting(base: EngineConfig | None = None, pinned: tuple[str, ...] = (), **declared: object) -> Setting:
    capabilities = msgspec.structs.replace(REFERENCE, **declared)
    return Setting(EngineConfig() if base is None else base, pinned, capabilities)


# --------------------------------------------------------------------------------------------------- the coverage


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_every_requirement_has_a_case(requirement: str) -> None:
    assert cases_of(requirement)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_cites_known_requirements(scenario: Scenario) -> None:
    cited = {requirement for case in scenario.cases for requirement in scenario.judged_by(case)}
    assert cited <= set(REQUIREMENTS)
    assert cited
    assert scenario.title


def test_names_are_unique_and_fit_for_files_and_patterns() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert len(case_names()) == sum(len(scenario.cases) for scenario in SCENARIOS)
    for name in case_names():
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-/"), name


@pytest.mark.parametrize("case", CASES)
def test_a_case_builds_the_same_workload_each_time(case: Case) -> None:
    one, other = setting(), setting()
    first, second = case.build(one), case.build(other)
    assert one.config == other.config
    if not callable(first):
        assert first == second


@pytest.mark.parametrize("case", CASES)
def test_a_case_changes_nothing_that_is_pinned(case: Case) -> None:
    pinned = tuple(PRESETS["neuron"].fields)
    built = setting(NEURON, pinned)
    with contextlib.suppress(Inapplicable):
        case.build(built)
    assert {name: getattr(built.config, name) for name in pinned} == PRESETS["neuron"].fields


def test_the_configurations_that_break_engines_are_all_there() -> None:
    configs = []
    for scenario in SCENARIOS:
        for case in scenario.cases:
            built = setting()
            case.build(built)
            configs.append(built.config)
    whole = [config for config in configs if config.block_size == config.max_model_len]
    spare = {config.num_blocks - config.max_num_seqs for config in whole}
    assert {0, 1, 2} <= spare
    assert any(config.max_num_seqs > config.num_blocks for config in configs)
    assert {1, 4, 16} <= {config.max_num_seqs for config in configs}
    assert any(config.block_size == 1 for config in configs)
    assert any(config.num_blocks == 1 for config in configs)


# ------------------------------------------------------------------------------------------------------ the setting


def test_choose_leaves_what_is_pinned() -> None:
    built = setting(EngineConfig(num_blocks=5), ("num_blocks",))
    built.choose(num_blocks=9, max_num_seqs=2)
    assert (built.config.num_blocks, built.config.max_num_seqs) == (5, 2)


def test_need_does_not_do_with_less() -> None:
    built = setting(EngineConfig(num_blocks=5), ("num_blocks",))
    built.need(num_blocks=5)
    with pytest.raises(Inapplicable, match="num_blocks is pinned to 5, this case needs 9"):
        built.need(num_blocks=9)


def test_the_token_budget_holds_a_full_batch_unless_something_else_is_said() -> None:
    built = setting()
    built.choose(max_num_seqs=3, max_model_len=50)
    assert built.config.max_num_batched_tokens == 150
    built.choose(max_num_batched_tokens=60)
    assert built.config.max_num_batched_tokens == 60
    assert setting(EngineConfig(), ("max_num_batched_tokens",)).config.max_num_batched_tokens == 64


def test_reserved_blocks_and_the_watermark_come_on_top_of_a_pool() -> None:
    built = setting(reserved_blocks=1, null_block=0)
    built.pool(9)
    assert (built.config.num_blocks, built.usable) == (10, 9)
    built.choose(watermark=0.5)
    built.pool(9)
    assert (built.config.num_blocks, built.usable) == (19, 9)


def test_blocks_are_counted_with_lookahead_and_up_to_the_models_length() -> None:
    built = setting()
    built.choose(block_size=4, max_model_len=20, num_lookahead_slots=3)
    assert built.blocks_for(9) == 3
    assert built.full_blocks(Add(prompt_len=10, max_tokens=90, n=2)) == 2 * 6


def test_the_seed_of_it_all() -> None:
    """Prompts of 10 and 30 outputs, as many as there are places, also where everything is pinned."""
    built = setting(NEURON, tuple(PRESETS["neuron"].fields))
    scenario, case = case_names()["full-batch/sequence-blocks-4-seqs"]
    assert scenario.judged_by(case) == ("PRE-1", "PRE-2", "PRE-7")
    assert case.build(built) == [Add(prompt_len=10, max_tokens=30)] * 4 + [Drain()]
    assert built.config == NEURON


def test_small_blocks_are_as_small_as_the_engine_takes_them() -> None:
    built = setting(block_size_min=16)
    built.paged()
    assert (built.config.block_size, built.config.max_model_len) == (16, 160)


def test_a_request_that_does_not_fit_is_no_request() -> None:
    with pytest.raises(Inapplicable, match="max_model_len = 32 is too short for a prompt of 40 and 1 outputs"):
        setting().request(40, -8)


# -------------------------------------------------------------------------------------------------------- the bench


@pytest.fixture
def bench() -> Bench:
    return Bench(make, REFERENCE)


def test_a_run_is_told_in_figures(bench: Bench) -> None:
    run = bench.run(EngineConfig(), [Add(prompt_len=5, max_tokens=3), Add(prompt_len=5, max_tokens=3), Drain()])
    assert run.tally() == "2 requests at batch size 4 with 16 blocks: 3 steps, 0 preemptions, 2 prefills"
    assert run.watch.peak == 2
    assert [len(outputs[0]) for outputs in run.watch.outputs.values()] == [3, 3]
    assert not run.cut_short


def test_a_run_drains_what_its_workload_leaves(bench: Bench) -> None:
    run = bench.run(EngineConfig(), [Add(prompt_len=5, max_tokens=3)])
    assert run.steps == 3
    assert run.completed() is run


def test_a_run_whose_requests_never_finish_is_not_compared(bench: Bench) -> None:
    run = bench.run(EngineConfig(), [Add(prompt_len=5, max_tokens=3)])
    run.ledger.live.update(run.requests)
    with pytest.raises(Unjudged, match="r0 never finished, which PRG-1, PRG-2 and PRG-4 judge"):
        run.completed()


def test_a_hit_shows_as_the_first_position(bench: Bench) -> None:
    twice: list[Operation] = [Add(prompt_len=9, max_tokens=1, shared_len=9), Drain()] * 2
    run = bench.run(EngineConfig(enable_prefix_caching=True), twice)
    assert run.watch.first_positions == {"r0": 0, "r1": 8}


def test_a_feature_that_is_not_declared_is_not_asked_for() -> None:
    plain = Capabilities(engine="plain", version="1", features=frozenset())
    with pytest.raises(Unsupported, match="the engine does not declare prefix_caching"):
        Bench(make, plain).run(EngineConfig(enable_prefix_caching=True), [])


OPERATIONS = [
    (Add(prompt_len=1, max_tokens=1), set()),
    (Add(prompt_len=1, max_tokens=1, n=2, stop_after=1), {"fork", "stop_token"}),
    (Add(prompt_len=1, max_tokens=1, salt=1), {"identity"}),
    (Add(prompt_len=1, max_tokens=1, encoder_sizes=(1,)), {"encoder_cache"}),
    (Abort(), {"abort"}),
    (ResetPrefixCache(), {"reset_prefix_cache"}),
    (Step(), set()),
]


@pytest.mark.parametrize(("operation", "features"), OPERATIONS, ids=lambda one: type(one).__name__)
def test_operations_need_features(operation: Add, features: set[str]) -> None:
    assert features_of(operation) == features


def test_only_the_first_report_of_a_comparison_counts(bench: Bench) -> None:
    run = bench.run(EngineConfig(), [])
    run.report("PRE-6", "first", expected="a", got="b")
    run.report("PRE-6", "second", expected="a", got="b")
    assert [violation.message for violation in run.violations] == ["first"]


# ---------------------------------------------------------------------------------------------------- case outcomes


def outcome(bench: Bench, name: str, base: EngineConfig | None = None, pinned: tuple[str, ...] = ()) -> dict[str, str]:
    scenario, case = case_names()[name]
    shown = run_case(
        bench,
        scenario,
        case,
        engine="reference",
        base=EngineConfig() if base is None else base,
        pinned=pinned,
        capabilities=bench.capabilities,
    )
    return {requirement: f"{result.status} {result.reason}".strip() for requirement, result in shown.judged.items()}


def test_what_is_pinned_against_a_case_skips_it_with_the_reason(bench: Bench) -> None:
    said = outcome(bench, "full-batch/one-token-blocks-4-seqs", EngineConfig(block_size=8), ("block_size",))
    assert said["PRE-1"] == "skip block_size is pinned to 8, this case needs 1"


def test_a_configuration_that_is_refused_skips_the_case_with_the_reason() -> None:
    declared = msgspec.structs.replace(REFERENCE, features=REFERENCE.features | {"encoder_cache"})
    said = outcome(Bench(make, declared), "encoder-cache/ample")
    assert said["ENC-1"].startswith("skip refused: encoder_cache_size = 64: the reference engine does not have this")


def test_a_run_that_never_saw_what_it_is_about_says_nothing() -> None:
    scenario = Scenario("calm", "Nobody is thrown out", ["PRE-3"], [
        Case("one", lambda setting: [setting.typical(), Drain()], sees=["preempted"])
    ])  # fmt: skip
    shown = run_case(
        Bench(make, REFERENCE), scenario, scenario.cases[0],
        engine="reference", base=EngineConfig(), pinned=(), capabilities=REFERENCE,
    )  # fmt: skip
    assert shown.judged["PRE-3"].status == "skip"
    assert shown.judged["PRE-3"].reason == "never seen in this run: preempted"


def test_a_fault_of_a_scenario_is_an_error_and_no_verdict() -> None:
    def broken(_: Setting) -> list[Drain]:
        raise ZeroDivisionError("ours")

    scenario = Scenario("broken", "It does not build", ["PRE-3"], [Case("one", broken)])
    shown = run_case(
        Bench(make, REFERENCE), scenario, scenario.cases[0],
        engine="reference", base=EngineConfig(), pinned=(), capabilities=REFERENCE,
    )  # fmt: skip
    assert shown.judged["PRE-3"].status == "error"
    assert shown.judged["PRE-3"].reason.startswith("ZeroDivisionError: ours at test_scenarios.py:")
