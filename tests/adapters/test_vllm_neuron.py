"""The vLLM Neuron adapter: the release's own code from the engine down to an emulated device, and nothing hidden.

What needs no vLLM runs everywhere; the rest on whatever release is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.adapters._greedy import greedy
from conformance.adapters._vllm_neuron_device import tiny_llama
from conformance.adapters.vllm_neuron import VllmNeuronEngine, make
from conformance.execute import Execution, execute
from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, Step
from conformance.protocol import ConfigRefused, EngineConfig, OptionValue, Request, Sampled, StepPlan, Taken
from conformance.requirements import load as load_requirements
from conformance.smoke import find_base
from reference_engine.runners.neuron.emulated import site_path

pytestmark = pytest.mark.filterwarnings("default")  # importing these releases warns

LENGTH = 48
FOUR: list[Operation] = [Add(10, 30)] * 4
MIXED: list[Operation] = [
    Add(prompt, outputs)
    for prompt, outputs in (
        (5, 12), (10, 30), (3, 7), (20, 20), (8, 25), (12, 9), (18, 30), (2, 16), (15, 11),
    )
]  # fmt: skip
ONE_TOKEN: list[Operation] = [*[Add(10, 20)] * 3, Step(3), Add(1, 5), Drain()]


@pytest.fixture(scope="module")
def version() -> tuple[int, ...]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    release = importlib.import_module("conformance.adapters._vllm_v0_release").installed_release()
    return tuple(map(int, release.version.split(".")[:3]))


@pytest.fixture(params=["v1", "v2"])
def manager(request: pytest.FixtureRequest, version: tuple[int, ...]) -> str:
    name: str = request.param
    if name == "v1" and version >= (0, 6, 4):
        pytest.skip("the release has no block manager v1")
    return name


def options_of(**options: OptionValue) -> dict[str, OptionValue]:
    return {"device": "emulated", **options}


def config_of(
    version: tuple[int, ...], *, options: dict[str, OptionValue] | None = None, seqs: int = 4, **fields: Any
) -> EngineConfig:
    """The pool that the release insists on; one block more from 0.8.0 on, or with PR 8008."""
    options = options_of(**(options or {}))
    length = fields.pop("max_model_len", LENGTH)
    more = version >= (0, 8) or bool(options.get("blocks_plus_one"))
    given = {"num_blocks": seqs + more, "block_size": length, "max_num_batched_tokens": seqs * length} | fields
    return EngineConfig(max_num_seqs=seqs, max_model_len=length, engine_options=options, **given)


def with_spare(version: tuple[int, ...], **options: OptionValue) -> EngineConfig:
    """N + 1 blocks under block manager v2: as released from 0.8.0 on, before that with PR 8008."""
    if version < (0, 8):
        options = {"blocks_plus_one": True, "block_manager": "v2", **options}
    return config_of(version, options=options)


def found(execution: Execution) -> dict[str, str]:
    assert execution.refused is None, execution.refused
    return {violation.requirement: violation.message for violation in execution.violations}


def judge(config: EngineConfig, operations: list[Operation]) -> Execution:
    return execute(make, config, operations, stop_at_first=False)


def request(number: int, prompt_len: int, max_tokens: int) -> Request:
    prompt = [2 + (number * 13 + position * 5) % 50 for position in range(prompt_len)]
    return Request(request_id=f"r{number}", prompt=prompt, max_tokens=max_tokens, arrival=number)


class Driven:
    """An engine driven without a session, which would end at the first harm; every output is kept."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = make(config)
        self.plans: list[StepPlan] = []
        self.taken: list[Taken] = []
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.requests[one.request_id] = one
            self.engine.add_request(one)

    def step(self, sampled: dict[tuple[str, int], Sampled] | None = None) -> StepPlan:
        self.plans.append(self.engine.schedule())
        result = self.engine.commit(len(self.plans) - 1, sampled or {})
        self.taken += result.taken
        self.outputs |= {finished.request_id: finished.outputs[0] for finished in result.finished}
        return self.plans[-1]

    def drain(self) -> None:
        for _ in range(400):
            if len(self.outputs) == len(self.requests):
                return
            self.step()
        raise AssertionError(f"not finished: {self.requests.keys() - self.outputs.keys()}")

    def right(self) -> list[str]:
        """The requests whose outputs are the greedy continuation of their prompts."""
        return [
            name for name, one in self.requests.items() if self.outputs[name] == continued(self.engine, one)
        ]  # fmt: skip


def continued(engine: VllmNeuronEngine, one: Request) -> list[int]:
    tokens = list(one.prompt)
    for _ in range(one.max_tokens):
        tokens.append(engine.reference_token(tokens))
    return tokens[len(one.prompt) :]


# ---------------------------------------------------------------------------------------------- without vLLM at all


def test_without_a_device_the_refusal_says_what_to_do() -> None:
    with pytest.raises(ConfigRefused, match=r"cannot be imported .* --set engine_options.device=emulated"):
        make(EngineConfig())


def test_a_placeholder_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformers_neuronx"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('wrong package')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("transformers_neuronx") is not None
    with pytest.raises(ConfigRefused, match="wrong package"):
        make(EngineConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "imagined"}, "device = 'imagined': must be one of installed, emulated"),
        (options_of(row_order="random"), "row_order = 'random': must be one of new, old"),
        (options_of(out_of_range="wrap"), "out_of_range = 'wrap': must be one of drop, raise"),
        (options_of(poison="yes"), "poison = 'yes': must be true or false"),
        (options_of(blocks_plus_one=1), "blocks_plus_one = 1: must be true or false"),
        (options_of(tensor_parallel_size=0), "tensor_parallel_size = 0: must be a whole number from 1"),
        (options_of(model="nowhere"), "model = 'nowhere': must be a folder with a config.json"),
        ({"row_order": "old"}, "row_order = 'old': goes with device=emulated only"),
    ],
)
def test_an_option_of_the_wrong_value_is_refused(options: dict[str, OptionValue], message: str) -> None:
    with pytest.raises(ConfigRefused, match=message):
        make(EngineConfig(engine_options=options))


# --------------------------------------------------------------------------------------------------- what it accepts


def test_a_configuration_that_the_worker_would_not_take_names_the_nearest_one(version: tuple[int, ...]) -> None:
    blocks = 3 + (version >= (0, 8))
    for block_size, message in (
        (16, "block_size = 16: a block must hold a whole sequence, max_model_len = 32"),
        (32, f"num_blocks = 9: the worker insists on .* = {blocks}"),
    ):
        config = EngineConfig(
            block_size=block_size, max_model_len=32, num_blocks=9, max_num_seqs=3, engine_options=options_of()
        )
        with pytest.raises(ConfigRefused, match=message) as refusal:
            make(config)
        instead = refusal.value.instead
        assert instead is not None
        assert (instead.block_size, instead.num_blocks) == (32, blocks)
        assert refusal.value.instead_of(config, ["num_blocks"]) is None
        make(instead).close()


def test_a_base_configuration_is_found_and_the_adapter_passes_its_smoke_test(version: tuple[int, ...]) -> None:
    base, result = find_base(make, EngineConfig(engine_options=options_of()))
    assert (result.status, result.reason) == ("ok", "")
    assert base.block_size == base.max_model_len == 32
    assert base.num_blocks == base.max_num_seqs + (version >= (0, 8))


def test_what_this_release_does_not_have_is_refused(version: tuple[int, ...]) -> None:
    unknown = "blocks_plus_one" if version >= (0, 8) else "on_device_sampling"
    with pytest.raises(ConfigRefused, match=f"engine_options {unknown}: not known; taken are device, "):
        make(config_of(version, options={unknown: True}, num_blocks=5))
    with pytest.raises(ConfigRefused, match="does not have: chunked_prefill"):
        make(config_of(version, enable_chunked_prefill=True))
    with pytest.raises(ConfigRefused, match=r"max_num_batched_tokens \(16\) is smaller than max_model_len \(48\)"):
        make(config_of(version, max_num_batched_tokens=16))


# ------------------------------------------------------------------------------------------------------- the issue


def test_at_n_blocks_a_full_batch_is_recomputed_for_ever_and_right(version: tuple[int, ...], manager: str) -> None:
    if version >= (0, 8):
        pytest.skip("the worker insists on one more block")
    config = config_of(version, options={"block_manager": manager})
    execution = judge(config, FOUR)
    assert (execution.steps, execution.prefills, execution.preemptions) == (59, 33, 29)
    assert found(execution).keys() == {"PRE-1", "PRE-2"}
    execution = judge(config, MIXED)
    assert (execution.steps, execution.prefills, execution.preemptions) == (80, 39, 30)
    assert found(execution).keys() == {"PRE-1", "PRE-2"}


def test_at_n_plus_1_blocks_nothing_is_recomputed_and_every_token_is_right(version: tuple[int, ...]) -> None:
    config = with_spare(version)
    execution = judge(config, FOUR)
    assert (execution.steps, execution.prefills, execution.preemptions) == (30, 4, 0)
    assert found(execution) == {}
    execution = judge(config, MIXED)
    assert (execution.steps, execution.prefills, execution.preemptions) == (53, 9, 0)
    assert found(execution) == {}
    assert execution.behaviours["device: full batch, lines out of order"] > 1


def test_with_the_spare_block_manager_v1_uses_a_line_that_does_not_exist(version: tuple[int, ...]) -> None:
    if version >= (0, 8):
        pytest.skip("the release has no block manager v1")
    options: dict[str, OptionValue] = {"block_manager": "v1", "blocks_plus_one": True}
    config = config_of(version, options=options)
    broken = found(judge(config, FOUR))
    assert broken == {"DEV-1": "in step 0 a prefill runs r0 on line 4, which the device does not have"}
    driven = Driven(config)
    driven.add(*(request(number, 10, 5) for number in range(4)))
    driven.step()  # silently written over line 0
    driven.plans.append(driven.engine.schedule())
    assert driven.plans[1].device_calls[0].lines == [4, 3, 2, 1]
    with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
        driven.engine.commit(1, {})
    loud = make(config_of(version, options=options | {"out_of_range": "raise"}))
    loud.add_request(request(0, 10, 5))
    (call,) = loud.schedule().device_calls
    assert (call.lines, call.returned) == ([4], None)
    with pytest.raises(RuntimeError, match="status 1006"):
        loud.commit(0, {})


def test_the_spare_block_exposes_the_old_order_of_rows(version: tuple[int, ...]) -> None:
    config = with_spare(version, row_order="old")
    assert found(judge(config, FOUR)) == {}  # lines 0, 1, 2, 3 are in order
    assert found(judge(config, MIXED)).keys() == {"DEV-3"}
    driven = Driven(config)
    for number, one in enumerate(MIXED):
        assert isinstance(one, Add)
        driven.add(request(number, one.prompt_len, one.max_tokens))
    driven.drain()
    assert len(driven.right()) < 5
    mixed_up = [call for plan in driven.plans for call in plan.device_calls if call.returned != call.rows]
    assert all(len(call.rows) == 4 and call.lines != sorted(call.lines) for call in mixed_up)
    for call in mixed_up:
        assert call.returned is not None
        assert sorted(call.returned) == sorted(call.rows)


def test_n_blocks_hide_the_old_order_of_rows(version: tuple[int, ...], manager: str) -> None:
    if version >= (0, 8):
        pytest.skip("the worker insists on one more block")
    config = config_of(version, options={"block_manager": manager, "row_order": "old"})
    assert found(judge(config, MIXED)).keys() == {"PRE-1", "PRE-2"}


def test_a_one_token_prompt_spoils_everybody_but_itself(version: tuple[int, ...], manager: str) -> None:
    config = config_of(version, options={"block_manager": manager})
    assert found(judge(config, ONE_TOKEN))["DEV-4"].endswith("when the one-token prompt of r3 ran as a decode")
    others = frozenset(load_requirements()) - {"DEV-4", "PRE-1", "PRE-2"}
    assert execute(make, config, ONE_TOKEN, judge=others).violations == []  # wrong tokens are symptoms of DEV-4
    driven = Driven(config)
    driven.add(*(request(number, 10, 20) for number in range(3)))
    for _ in range(3):
        driven.step()
    driven.add(request(3, 1, 5))
    (call,) = driven.step().device_calls
    assert (call.route, call.width, call.positions) == ("decode", 1, [0])
    driven.drain()
    assert driven.right() == ["r3"]


def test_poison_says_which_row_was_read(version: tuple[int, ...]) -> None:
    driven = Driven(with_spare(version, poison=True))
    driven.add(request(0, 10, 20))
    driven.step()
    driven.add(request(1, 1, 5))
    driven.step()
    driven.engine.schedule()
    with pytest.raises(RuntimeError, match="line 0 reads position 0, but a decode step that did not ask for the line"):
        driven.engine.commit(2, {})


def test_under_prefix_caching_block_manager_v1_shares_a_line(version: tuple[int, ...]) -> None:
    if version >= (0, 8):
        pytest.skip("the release has no block manager v1")
    config = config_of(version, options={"block_manager": "v1"}, enable_prefix_caching=True)
    alike: list[Operation] = [Add(10, 4, shared_len=10)] * 2
    assert found(judge(config, alike)) == {"DEV-1": "in step 0 a prefill runs r0, r1 on line 0"}
    driven = Driven(config)
    driven.add(request(0, 10, 4), Request(request_id="r1", prompt=request(0, 10, 4).prompt, max_tokens=4, arrival=1))
    driven.step()
    plan = driven.engine.schedule()
    assert [move.kind for move in plan.moves] == ["copy"]
    assert plan.device_calls == []
    with pytest.raises(AssertionError, match="Cache operations are not supported for Neuron backend"):
        driven.engine.commit(1, {})


def test_under_prefix_caching_the_spare_block_is_handed_out_by_block_manager_v2_too(version: tuple[int, ...]) -> None:
    config = msgspec.structs.replace(with_spare(version), enable_prefix_caching=True)
    filled: list[Operation] = [Add(LENGTH, 1), *[Add(10, 5)] * 4]
    message = found(judge(config, filled))["DEV-1"]
    assert message.endswith("on line 4, which the device does not have")
    assert found(judge(config, filled[1:])) == {}  # nobody has filled a block


def test_settings_of_sampling_on_the_device_go_to_the_wrong_line(version: tuple[int, ...]) -> None:
    if version < (0, 6, 3):
        pytest.skip("the release has no sampling on the device")
    config = config_of(version, options={"on_device_sampling": True})
    assert found(judge(config, [Add(6, 4)] * 4)) == {}  # rows 0 to 3 on lines 0 to 3
    apart = found(judge(config, [Add(6, 20), Step(2), Add(8, 2), Step(2), Add(9, 2)]))
    assert apart == {"PRG-5": "in step 2 r1 takes a token that is not its own, which no call explains"}


# -------------------------------------------------------------------------------------------- what the adapter says


def test_calls_are_shown_as_the_device_gets_them(version: tuple[int, ...]) -> None:
    driven = Driven(with_spare(version))
    driven.add(request(0, 7, 3), request(1, 4, 3))
    plan = driven.step()
    (prefill,) = plan.device_calls
    assert (prefill.route, prefill.width, prefill.compiled) == ("prefill", 7, 0)
    assert (prefill.rows, prefill.lines, prefill.positions) == ([("r0", 0), ("r1", 0)], [0, 1], [6, 3])
    assert [sequence.block_tables for sequence in plan.sequences] == [[[0]], [[1]]]
    (decode,) = driven.step().device_calls
    assert (decode.route, decode.width, decode.lines, decode.positions) == ("decode", 1, [0, 1], [7, 4])
    assert prefill.returned == decode.returned == [("r0", 0), ("r1", 0)]


def test_the_engine_takes_the_tokens_of_its_own_device(version: tuple[int, ...]) -> None:
    driven = Driven(with_spare(version))
    one = request(0, 7, 3)
    driven.add(one)
    for _ in range(3):
        driven.step({("r0", 0): Sampled([1])})
    assert [taken.tokens for taken in driven.taken] == [[token] for token in driven.outputs["r0"]]
    assert driven.outputs["r0"] == continued(driven.engine, one)


def test_the_reference_is_generate_of_hugging_face(version: tuple[int, ...]) -> None:
    assert version
    import torch  # noqa: PLC0415 - it comes with vLLM
    import transformers  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama(on_cpu=True))
    one = request(5, 9, 12)
    whole = model.generate(torch.tensor([one.prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    reference = greedy(tiny_llama(on_cpu=True))
    for backwards in range(len(whole) - 1, 8, -1):  # each from the start, and then each from where the last one ended
        assert reference.token(whole[:backwards]) == whole[backwards]
    again = type(reference)(tiny_llama(on_cpu=True))
    assert [again.token(whole[:length]) for length in range(9, len(whole))] == whole[9:]


def test_abort_reaches_every_state_and_frees_the_line(version: tuple[int, ...]) -> None:
    operations: list[Operation] = [
        *[Add(5, 8)] * 5,
        Abort(4),
        Step(2),
        Abort(1),
        AbortEnded(),
        Step(),
        Add(6, 4),
        Drain(),
    ]
    execution = judge(with_spare(version), operations)
    assert found(execution) == {}
    assert {"aborted while waiting", "aborted while running"} <= execution.behaviours.keys()


def test_a_prompt_that_is_too_long_stops_nobody_else(version: tuple[int, ...]) -> None:
    execution = judge(with_spare(version), [Add(5, 8), Add(LENGTH + 1, 1), Add(6, 4), Drain()])
    assert found(execution) == {}
    assert {"refused", "refused while scheduling"} & execution.behaviours.keys()


def test_a_prompt_beyond_the_largest_bucket_ends_the_engine(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "8,16")
    config = with_spare(version)
    engine = make(config)
    assert engine.capabilities.device is not None
    assert engine.capabilities.device.context_buckets == (8, 16)
    engine.close()
    assert found(judge(config, [Add(16, 4)])) == {}
    broken = found(judge(config, [Add(17, 4)]))
    assert broken.keys() == {"DEV-5", "PRG-8"}
    assert "invalid input prompt length: 17 tokens, the largest bucket is 16" in broken["PRG-8"]


def test_the_same_operations_give_the_same_trace(version: tuple[int, ...]) -> None:
    runs = [execute(make, with_spare(version), MIXED, record=True) for _ in range(2)]
    assert runs[0].digest == runs[1].digest


# ------------------------------------------------------------------------------------------ what it leaves behind


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of that name on the path, as where the SDK is installed: nothing is told of its emulation."""
    monkeypatch.syspath_prepend(site_path())
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_neuronx"]:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_a_package_that_is_installed_is_driven_without_being_asked_what_it_did(version: tuple[int, ...]) -> None:
    config = with_spare(version)
    config.engine_options.pop("device")
    execution = execute(make, config, [Add(5, 6), Add(7, 4), Drain()], stop_at_first=False, record=True)
    assert found(execution) == {}
    engine = make(config)
    assert "a real device" in engine.capabilities.engine
    engine.add_request(request(0, 5, 2))
    (call,) = engine.schedule().device_calls
    assert (call.route, call.lines, call.returned) == ("prefill", [0], None)


def test_nothing_is_left_on_the_path_nor_in_the_environment(version: tuple[int, ...]) -> None:
    platforms = importlib.import_module("vllm.platforms")
    before = dict(os.environ), list(sys.path), platforms.current_platform
    engine = make(with_spare(version))
    assert (dict(os.environ), list(sys.path), platforms.current_platform) == before
    assert "transformers_neuronx" not in sys.modules
    assert importlib.util.find_spec("transformers_neuronx") is None
    engine.close()
    pinned = importlib.import_module("vllm.utils").is_pin_memory_available
    assert callable(pinned)


def test_the_scheduler_alone_can_be_driven_in_the_same_process(version: tuple[int, ...]) -> None:
    make(with_spare(version)).close()
    v0 = importlib.import_module("conformance.adapters.vllm_v0")
    execution = execute(v0.make, EngineConfig(), [Add(5, 6), Add(7, 4), Drain()], stop_at_first=False)
    assert found(execution) == {}
    make(with_spare(version)).close()
