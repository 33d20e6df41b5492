"""What a test of the suite works on: devices of a few shapes, an engine and a runner on them, and the truth.

A `Rig` is of one kind, emulated or hardware; tests do not ask which. Importing this module imports neither torch nor
the SDK.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from neuron_tests.assertions import Kind
from neuron_tests.model import VOCABULARY, Truth, save_tiny_llama
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.request import Request
from reference_engine.runners.neuron.device import Device, DeviceCall, DeviceConfig
from reference_engine.runners.neuron.lines import LineOrder, lowest_first
from reference_engine.runners.neuron.runner import NeuronRunner
from reference_engine.runners.serving import Serving
from reference_engine.scheduler import Plan


class Shape(NamedTuple):
    """What is compiled: lines, and buckets in tokens."""

    lines: int = 4
    context: tuple[int, ...] = (128,)
    tokens: tuple[int, ...] = (128,)
    sample_on_device: bool = False

    def config(self, model_path: Path) -> DeviceConfig:
        """The same, for a device."""
        return DeviceConfig(
            model_path=str(model_path),
            lines=self.lines,
            context_buckets=self.context,
            token_buckets=self.tokens,
            sample_on_device=self.sample_on_device,
        )


MAIN = Shape()
"""Two graphs, which most tests share."""
BUCKETS = Shape(context=(64, 128), tokens=(128, 256))
"""Four graphs, for what happens between buckets."""
SAMPLING = Shape(sample_on_device=True)
"""Two graphs, for sampling on the device."""


def prompt(name: str, length: int) -> list[int]:
    """``length`` tokens that are those of ``name``; never 0, which is padding."""
    random = Random(f"{name}:{length}")  # noqa: S311 - seeded
    return [random.randrange(1, VOCABULARY) for _ in range(length)]


class Run(Serving):
    """One engine serving on one device, and what there is to be said about it."""

    def __init__(self, engine: Engine, runner: NeuronRunner, truth: Truth) -> None:
        self.plans: list[Plan] = []
        super().__init__(engine, runner, self.plans.append)
        self.lines = runner.lines
        self.device = runner.device
        self._truth = truth
        self._asked: dict[str, Request] = {}

    def ask(self, name: str, length: int, max_tokens: int, **fields: Any) -> Request:
        """Add a request with a prompt of ``length`` tokens. Raises `RequestError`."""
        request = Request(name, prompt(name, length), max_tokens, **fields)
        self.add(request)
        self._asked[name] = request
        return request

    def abort(self, name: str) -> None:
        """Drop a request; nothing is expected of it any more."""
        self.engine.abort_request(name)
        self._asked.pop(name, None)

    @property
    def calls(self) -> list[DeviceCall]:
        """What the device was asked to do."""
        return self.device.stats.calls

    @property
    def prefills(self) -> int:
        """Prompts prefilled."""
        return self.device.stats.prefills

    @property
    def preemptions(self) -> int:
        """Requests preempted."""
        return self.engine.scheduler.num_preemptions

    def step_of_first_run(self, name: str) -> int:
        """The step in which a request ran first."""
        return next(
            plan.step for plan in self.plans if any(one.sequence.request.request_id == name for one in plan.sequences)
        )

    def step_of_last_run(self, name: str) -> int:
        """The last step in which a request ran."""
        return max(
            plan.step for plan in self.plans if any(one.sequence.request.request_id == name for one in plan.sequences)
        )

    def wrong(self) -> list[str]:
        """What is wrong with the outputs, one sentence for a request: missing, of another length, other tokens."""
        found: list[str] = []
        for name, request in self._asked.items():
            (output,) = self.outputs.get(name, [[]])
            expected = request.max_len - request.prompt_len
            if len(output) != expected:
                found.append(f"{name}: {expected} tokens were expected, and {len(output)} came")
                continue
            said = self._truth.disagreement(request.sequences[0].tokens[: request.prompt_len], output)
            if said is not None:
                found.append(f"{name}: {said}")
        return found


class Rig(abc.ABC):
    """A device under test with everything around it.

    ``engine_type``, ``runner_type`` and ``forced`` (fields of every engine) are what serves; others than the
    defaults are put there to see the suite fail.
    """

    kind: ClassVar[Kind]
    engine_type: type[Engine] = Engine
    runner_type: type[NeuronRunner] = NeuronRunner

    def __init__(self, folder: Path, **forced: Any) -> None:
        self.folder = folder
        self.forced = forced
        self.notes: dict[str, Any] = {}
        """What was learned beside the verdicts, for the report."""
        self._devices: dict[Shape, Device] = {}

    @functools.cached_property
    def model_path(self) -> Path:
        """The checkpoint, saved when it is first wanted."""
        path = self.folder / "tiny-llama"
        if not path.exists():
            save_tiny_llama(path)
        return path

    @functools.cached_property
    def truth(self) -> Truth:
        """What the model says on the CPU."""
        return Truth(self.model_path)

    def learned(self) -> dict[str, Any]:
        """The notes, with how much was compared to the CPU."""
        truth = vars(self).get("truth")
        return self.notes | ({} if truth is None else truth.counts())

    def device(self, shape: Shape = MAIN) -> Device:
        """The device of a shape, built once; its caches are zero and its statistics empty."""
        if shape not in self._devices:
            self._devices[shape] = self.new_device(shape)
        device = self._devices[shape]
        device.reset()
        device.stats.clear()
        return device

    def run(self, shape: Shape = MAIN, *, line_order: LineOrder = lowest_first, **fields: Any) -> Run:
        """An engine on the device of a shape: as many blocks and sequences as lines, and positions for one each.

        ``max_model_len`` is one more than the line has positions: the last token of a sequence needs none. Raises
        `ConfigError`.
        """
        length = fields.get("max_model_len", shape.tokens[-1] + 1)
        config = EngineConfig(
            **{
                "num_blocks": shape.lines,
                "block_size": length,
                "max_num_seqs": shape.lines,
                "max_num_batched_tokens": shape.lines * (shape.tokens[-1] + 1),
                "max_model_len": length,
                **fields,
                **self.forced,
            }
        )
        runner = self.runner_type(self.device(shape), config, line_order=line_order)
        return Run(self.engine_type(config), runner, self.truth)

    @abc.abstractmethod
    def new_device(self, shape: Shape) -> Device:
        """Build a device."""

    @abc.abstractmethod
    def compiled(self) -> frozenset[str]:
        """Names of all that was compiled so far."""

    @abc.abstractmethod
    def compiling(self) -> list[str]:
        """Compilers at work now."""

    @abc.abstractmethod
    def traced(self, lines: int, length: int, steps: Sequence[Any]) -> list[Any]:
        """Run the hand-traced decode step on the device.

        Each step is (tokens, positions, live), each outcome (logits, keys, values), as in `traced`.
        """

    @abc.abstractmethod
    def device_to_lose(self) -> Device:
        """A device of the main shape that takes what no runner would hand over, and may not come back from it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything up."""
