"""Every call that the driver makes of transformers-neuronx, against a double that writes down what it was given."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from neuron_tests.emulated import HEALTHY, EmulatedRig
from reference_engine.runners.neuron.device import DeviceCall, DeviceConfig, DeviceError, DeviceUnavailableError
from reference_engine.runners.neuron.driver import COMPILER_FLAGS, TransformersNeuronxDevice, compiler_flags

CONFIG = DeviceConfig(
    model_path="/models/tiny", lines=4, context_buckets=(64, 128), token_buckets=(128, 256), compile_workers=2
)

# --------------------------------------------------------------------------------------------- compiler flags


@pytest.mark.parametrize(
    ("users", "ours"),
    [
        ("", "--optlevel 1 --auto-cast=none"),
        ("--verbose=35", "--verbose=35 --optlevel 1 --auto-cast=none"),
        ("-O2", "-O2 --auto-cast=none"),
        ("-O 3 --auto-cast all", "-O 3 --auto-cast all"),
        ("--optlevel=2 --auto-cast-type bf16", "--optlevel=2 --auto-cast-type bf16 --auto-cast=none"),
        ("--model-type transformer --auto-cast=matmult", "--model-type transformer --auto-cast=matmult --optlevel 1"),
    ],
)
def test_what_the_user_set_stays_and_the_rest_is_for_exact_and_quick(users: str, ours: str) -> None:
    assert compiler_flags(users) == ours


# ------------------------------------------------------------------------------------------------- the interface


@pytest.fixture
def torch() -> Any:
    """The driver makes tensors."""
    return pytest.importorskip("torch", reason="the driver makes tensors")


Seen = list[tuple[str, dict[str, Any]]]


class _Model:
    """What `from_pretrained` returns: notes its calls, and answers with the rows it was told to."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.answer: Any = None

    def to_neuron(self) -> None:
        self.seen.append(("to_neuron", {"flags": os.environ.get(COMPILER_FLAGS)}))

    def reset(self) -> None:
        self.seen.append(("reset", {}))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        (input_ids,) = arguments
        self.seen.append(("forward", {"input_ids": input_ids, **keywords}))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


Built = tuple[TransformersNeuronxDevice, _Model, Seen]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The calls; meanwhile `transformers_neuronx` is a double that writes them down."""
    calls: Seen = []

    def recorded(name: str) -> Any:
        def make(**keywords: Any) -> tuple[str, dict[str, Any]]:
            calls.append((name, keywords))
            return name, keywords

        return make

    class LlamaForSampling:
        @classmethod
        def from_pretrained(cls, *arguments: Any, **keywords: Any) -> _Model:
            calls.append(("from_pretrained", {"": arguments, **keywords}))
            return _Model(calls)

    modules = {
        "transformers_neuronx": {},
        "transformers_neuronx.config": {
            name: recorded(name) for name in ("ContinuousBatchingConfig", "GenerationConfig", "NeuronConfig")
        },
        "transformers_neuronx.llama": {},
        "transformers_neuronx.llama.model": {"LlamaForSampling": LlamaForSampling},
    }
    for name, fields in modules.items():
        module = types.ModuleType(name)
        vars(module).update(fields, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.fixture
def built(torch: Any, seen: Seen) -> Built:  # noqa: ARG001 - skips where there is no torch
    """A device that was built, the model inside, and the calls since."""
    device = TransformersNeuronxDevice(CONFIG)
    device.build()
    seen.clear()
    return device, device._model, seen


@pytest.mark.usefixtures("torch")
def test_a_model_is_made_with_exactly_these_keywords(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER_FLAGS, "--verbose=35")
    TransformersNeuronxDevice(CONFIG).build()
    batching = ("ContinuousBatchingConfig", {"batch_size_for_shared_caches": 4})
    config = ("NeuronConfig", {"continuous_batching": batching, "compilation_worker_count": 2})
    assert seen == [
        batching,
        config,
        (
            "from_pretrained",
            {
                "": ("/models/tiny",),
                "batch_size": 4,
                "amp": "f32",
                "tp_degree": 2,
                "n_positions": [128, 256],
                "context_length_estimate": [64, 128],
                "neuron_config": config,
            },
        ),
        ("to_neuron", {"flags": "--verbose=35 --optlevel 1 --auto-cast=none"}),
    ]
    assert os.environ[COMPILER_FLAGS] == "--verbose=35"


@pytest.mark.usefixtures("torch", "seen")
def test_flags_are_gone_after_building_where_there_were_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMPILER_FLAGS, raising=False)
    TransformersNeuronxDevice(CONFIG).build()
    assert COMPILER_FLAGS not in os.environ


@pytest.mark.usefixtures("torch")
def test_sampling_on_the_device_is_asked_for_by_a_generation_config(seen: Seen) -> None:
    config = DeviceConfig(model_path="m", lines=1, context_buckets=(8,), token_buckets=(8,), sample_on_device=True)
    TransformersNeuronxDevice(config).build()
    assert ("GenerationConfig", {"do_sample": True, "top_k": 1}) in seen


def tensors(keywords: dict[str, Any]) -> dict[str, tuple[list[Any], str]]:
    """Values and dtype of each argument of a forward pass."""
    return {name: (tensor.tolist(), str(tensor.dtype)) for name, tensor in keywords.items()}


def test_a_prefill_pads_prompts_and_positions_with_0(torch: Any, built: Built) -> None:
    device, model, seen = built
    model.answer = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    assert device.prefill([2, 0], [[7, 8, 9], [5]]) == [[0.5, 0.25], [1.0, 2.0]]
    ((name, keywords),) = seen
    assert name == "forward"
    assert tensors(keywords) == {
        "input_ids": ([[7, 8, 9], [5, 0, 0]], "torch.int64"),
        "cache_ids": ([[0, 1, 2], [0, 0, 0]], "torch.int64"),
        "start_ids": ([2, 0], "torch.int64"),
    }
    (call,) = device.stats.calls
    assert call._replace(seconds=0.0) == DeviceCall("prefill", (2, 0), (2, 0), 3)
    assert device.stats.prefills == 2


def test_a_prompt_of_one_token_is_as_wide_as_asked(torch: Any, built: Built) -> None:
    device, model, seen = built
    model.answer = torch.zeros(1, 2)
    device.prefill([3], [[77]], width=2)
    device.prefill([3], [[77]])
    assert [tensors(keywords)["input_ids"][0] for _, keywords in seen] == [[[77, 0]], [[77]]]
    assert [tensors(keywords)["cache_ids"][0] for _, keywords in seen] == [[[0, 0]], [[0]]]


def test_a_decode_is_one_column(torch: Any, built: Built) -> None:
    device, model, seen = built
    model.answer = torch.zeros(2, 2)
    device.decode([3, 1], [11, 12], [40, 9])
    ((_, keywords),) = seen
    assert tensors(keywords) == {
        "input_ids": ([[11], [12]], "torch.int64"),
        "cache_ids": ([[40], [9]], "torch.int64"),
        "start_ids": ([3, 1], "torch.int64"),
    }
    (call,) = device.stats.decodes
    assert call._replace(seconds=0.0) == DeviceCall("decode", (3, 1), (40, 9), 1)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_sampled_tokens_come_one_to_a_row(torch: Any, shape: tuple[int, ...]) -> None:
    device = TransformersNeuronxDevice(
        DeviceConfig(model_path="m", lines=2, context_buckets=(8,), token_buckets=(8,), sample_on_device=True)
    )
    device.build()
    device._model.answer = torch.tensor([5, 6]).reshape(shape)
    assert device.decode([0, 1], [1, 2], [3, 4]) == [[5], [6]]


@pytest.mark.parametrize(
    "error", [AssertionError("invalid input prompt length"), StopIteration(), RuntimeError("index 4"), IndexError("4")]
)
def test_whatever_the_package_raises_is_said_with_the_call(built: Built, error: Exception) -> None:
    device, model, _ = built
    model.answer = error
    with pytest.raises(DeviceError, match=rf"decode of lines \[1\] up to positions \[9\]: {type(error).__name__}"):
        device.decode([1], [5], [9])
    assert device.stats.calls == []


def test_reset_and_close(built: Built) -> None:
    device, _, seen = built
    device.reset()
    assert seen == [("reset", {})]
    device.close()
    with pytest.raises(DeviceError, match="the device is not built"):
        device.decode([0], [1], [1])


def test_a_package_that_is_not_there_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers_neuronx.config", None)
    with pytest.raises(DeviceUnavailableError, match="transformers-neuronx cannot be imported: "):
        TransformersNeuronxDevice(CONFIG).build()


# ------------------------------------------------------------------------------------------- what can be compiled


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lines": 0}, "lines = 0: must be at least 1"),
        ({"tp_degree": 3}, "tp_degree = 3: must be one of 1, 2, 4, 8, 24, 32"),
        ({"context_buckets": ()}, r"context_buckets = \(\): must be positive, ascending and at least one"),
        ({"token_buckets": (256, 128)}, r"token_buckets = \(256, 128\): must be positive, ascending"),
        ({"token_buckets": (64,)}, r"context_buckets = \(64, 128\): the largest must not exceed .* \(64\)"),
    ],
)
def test_a_configuration_out_of_range_is_refused(fields: dict[str, Any], said: str) -> None:
    plain: dict[str, Any] = {"model_path": "m", "lines": 4, "context_buckets": (64, 128), "token_buckets": (256,)}
    with pytest.raises(ValueError, match=said):
        DeviceConfig(**{**plain, **fields})


def test_graphs_are_counted_by_bucket() -> None:
    assert CONFIG.graphs == 4


# --------------------------------------------------------------------------------------------- the strict stand-in


def test_the_strict_emulated_device_accepts_every_argument(tmp_path: Path) -> None:
    for library in ("torch", "transformers", "safetensors"):
        pytest.importorskip(library, reason="the emulated device needs the extra `torch`")
    assert HEALTHY.strict_interface
    device = EmulatedRig(tmp_path).device()
    device.prefill([0, 2], [[5, 6, 7], [8]])
    device.prefill([1], [[9]], width=2)
    rows = device.decode([2, 0, 1], [1, 2, 3], [1, 3, 1])
    assert [len(row) for row in rows] == [512] * 3
