"""`LlamaForSampling` and `MistralForSampling`: what the host does around the graphs, and when they run.

Under continuous batching `forward` is the interface of the hardware suite and of vLLM: a width above 1 that begins at
position 0 is a prefill, one prompt after another; everything of width 1 is one decode step of all lines. Without it
(``start_ids`` None) all rows go on together, as in `sample`. The rules are those of base.py, decoder.py and module.py
of transformers-neuronx (2024-12 sync), and of its 2024-07 sync for ``row_order="old"``; the code is not.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from reference_engine.runners.neuron.emulated import checkpoint, interface
from reference_engine.runners.neuron.emulated.behaviour import Behaviour, Fault
from reference_engine.runners.neuron.emulated.buckets import (
    batch_sizes,
    context_buckets,
    covering,
    token_buckets,
)
from reference_engine.runners.neuron.emulated.cache import Cache
from reference_engine.runners.neuron.emulated.configuration import GenerationConfig, NeuronConfig
from reference_engine.runners.neuron.emulated.device import Device
from reference_engine.runners.neuron.emulated.installation import current
from reference_engine.runners.neuron.emulated.ledger import Graph, Ledger
from reference_engine.runners.neuron.emulated.llama import Llama, check_architecture
from reference_engine.runners.neuron.emulated.sampling import DeviceSampler, check_generation, generate

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class LlamaForSampling(torch.nn.Module):  # type: ignore[misc] # torch is not followed
    """A Llama on the emulated device. `from_pretrained`, then `to_neuron`, then calls.

    Keywords and defaults are those of the real class. ``ledger`` and ``cache`` are open to tests.

    Raises AssertionError where the real one does; ValueError and NotImplementedError for what is not emulated;
    `InterfaceError` under ``strict_interface``.
    """

    def __init__(
        self,
        config: Any,
        *,
        n_positions: int | list[int] = 2048,
        batch_size: int | list[int] = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        context_length_estimate: int | list[int] | None = None,
        context_unroll: int | None = None,
        unroll: int | None = None,
        neuron_config: NeuronConfig | None = None,
        prefixed_length: int = 0,
        **unknown: Any,
    ) -> None:
        super().__init__()
        installation = current()
        self.behaviour: Behaviour = installation.behaviour
        if self.behaviour.strict_interface:
            interface.check_constructor(
                {
                    "n_positions": n_positions,
                    "batch_size": batch_size,
                    "amp": amp,
                    "tp_degree": tp_degree,
                    "context_length_estimate": context_length_estimate,
                    "neuron_config": neuron_config,
                },
                unknown,
            )
        self.config, self.amp, self.tp_degree = config, amp, tp_degree
        self.neuron_config = neuron_config or NeuronConfig()
        self.token_buckets = token_buckets(n_positions)
        self.context_buckets = context_buckets(context_length_estimate, self.token_buckets)
        self.batch_sizes = batch_sizes(batch_size)
        self.lines = self.batch_sizes[-1]
        self._check(prefixed_length)
        self.context_batch_sizes = [1] if self.neuron_config.continuous_batching else self.batch_sizes
        self.ledger = Ledger(self.behaviour)
        self._weights: dict[str, Any] | None = None
        self._artefacts: Path | None = None
        self._device: Device | None = None
        generation = self.neuron_config.on_device_generation
        self._sampler = (
            None if generation is None else DeviceSampler(generation, self.lines, self.behaviour.sampling_seed)
        )
        installation.models.append(self)

    def _check(self, prefixed_length: int) -> None:
        refused = self.neuron_config.not_emulated()
        if prefixed_length:
            refused.append(f"prefixed_length = {prefixed_length}")
        if len(self.batch_sizes) > 1:
            refused.append(f"batch_size = {self.batch_sizes}")
        window = getattr(self.config, "sliding_window", None)
        if window is not None and window < self.token_buckets[-1]:
            refused.append(f"sliding_window = {window}")
        if refused:
            raise NotImplementedError(f"the emulated device has no {', no '.join(refused)}")
        check_architecture(self.config)
        heads, kv_heads = self.config.num_attention_heads, getattr(self.config, "num_key_value_heads", None)
        if heads % self.tp_degree:
            raise ValueError(f"{heads} attention heads cannot be split over tp_degree = {self.tp_degree}")
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
        if self.amp not in DTYPES:
            raise ValueError(f"amp = {self.amp!r}: must be one of {', '.join(DTYPES)}")

    @classmethod
    def from_pretrained(cls, pretrained_model_path: str | Path, *model_args: Any, **kwargs: Any) -> LlamaForSampling:
        """Make a model from a checkpoint folder. Weights are read now and used by `to_neuron`.

        Raises AssertionError for sizes that do not go together, FileNotFoundError for a folder without a checkpoint.
        """
        positions, estimate = kwargs.get("n_positions", 2048), kwargs.get("context_length_estimate")
        largest, longest = (max(value) if isinstance(value, list) else value for value in (positions, estimate))
        if isinstance(largest, int) and isinstance(longest, int):
            assert largest >= longest, f"context_length_estimate {longest} is more than the {largest} of n_positions"
        config = kwargs.get("neuron_config")
        batching = config and config.continuous_batching
        if batching:
            shared, batch = batching.batch_size_for_shared_caches, kwargs.get("batch_size")
            assert shared == batch, f"batch_size_for_shared_caches is {shared}, batch_size is {batch}: must be equal"
        elif config is not None:
            assert config.cache_layout != "BSH", "the cache layout BSH goes with continuous batching only"
        model = cls(checkpoint.read_config(pretrained_model_path), *model_args, **kwargs)
        model._weights = checkpoint.read_weights(pretrained_model_path)
        return model

    # -- life cycle ---------------------------------------------------------------------------------------

    def graphs(self) -> list[Graph]:
        """The graphs this model is made of: prefill buckets x context batch sizes, decode buckets x batch sizes."""
        prefill = [Graph("prefill", size, n) for size in self.context_buckets for n in self.context_batch_sizes]
        return prefill + [Graph("decode", size, n) for size in self.token_buckets for n in self.batch_sizes]

    def to_neuron(self) -> None:
        """Take the weights and compile every graph; from then on there are no new ones.

        Raises RuntimeError without weights, FileNotFoundError when `load` named a folder that lacks a graph.
        """
        if self._weights is None:
            raise RuntimeError("no weights to load: make the model with from_pretrained")
        if self._artefacts is not None:
            missing = [graph for graph in self.graphs() if not (self._artefacts / self._file(graph)).is_file()]
            if missing:
                raise FileNotFoundError(f"{self._artefacts}: holds no artefact for {missing[0]} of this model")
            self.ledger.loaded = tuple(self.graphs())
        else:
            self.cpu_compile()
        # Tensors made in a caller's inference mode could not be written outside of it.
        with torch.inference_mode(mode=False), torch.no_grad():
            llama = Llama(self.config, self._weights, DTYPES[self.amp])
            shape = (len(llama.layers), self.lines, llama.kv_heads, self.token_buckets[-1], llama.head_dim)
            cache = Cache(*shape, DTYPES[self.amp], self.behaviour)
            self._device = Device(llama, cache, self.ledger, self.token_buckets, self._sampler)

    def cpu_compile(self) -> None:
        """Compile every graph; needs no device."""
        self.ledger.compiled = tuple(self.graphs())

    def save(self, directory: str | Path) -> None:
        """Write one artefact for each graph. Raises AssertionError before anything was compiled."""
        assert self.ledger.known, "nothing to save: compile first, with to_neuron() or cpu_compile()"
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for graph in self.ledger.known:
            (folder / self._file(graph)).write_text(f"{graph}\n", encoding="utf-8")

    def load(self, directory: str | Path) -> None:
        """Let `to_neuron` take its graphs from a folder that `save` wrote, and compile nothing."""
        self._artefacts = Path(directory)

    def _file(self, graph: Graph) -> str:
        """Name of an artefact: a digest of the graph and of everything that shapes it."""
        shape = {name: value for name, value in sorted(vars(self.config).items()) if isinstance(value, int | float)}
        digest = hashlib.sha256(f"{graph} {shape} {self.amp} {self.tp_degree} {self.lines}".encode())
        return f"{digest.hexdigest()[:20]}.neff"

    def reset(self) -> None:
        """Zero the caches. Raises RuntimeError before `to_neuron`."""
        self._ready().reset()

    @property
    def cache(self) -> Cache:
        """The KV cache, for tests to look into. Raises RuntimeError before `to_neuron`."""
        return self._ready().cache

    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        """Change the settings of sampling on the device. Raises AssertionError when it was not compiled for that."""
        if self.behaviour.strict_interface:
            interface.check_generation_config(generation_config)
        if self._sampler is None:
            check_generation(generation_config, self.lines)
            raise AssertionError("the model was compiled without on_device_generation: it samples nothing")
        self._sampler.update(generation_config)

    def _ready(self) -> Device:
        if self._device is None:
            raise RuntimeError("the model is not on the device yet: call to_neuron() first")
        return self._device

    # -- calls --------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Any,
        cache_ids: Any = None,
        start_ids: Any = None,
        last_token_id: Any = None,
        input_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run a prefill or a decode step. Under continuous batching, all three are needed.

        Args:
            input_ids: token ids [n, T]; prompts padded with 0 at their right, or one token each (T = 1).
            cache_ids: their positions [n, T]; 0 on padding.
            start_ids: the line of each row, [n] or [n, 1].
            last_token_id: not emulated.
            input_embeddings: not emulated.
            **kwargs: not emulated.

        Returns: logits of the last token of each row, float32 [n, vocab]; token ids [n, 1] with sampling on the
        device.

        Raises: AssertionError for a prompt longer than the largest bucket, StopIteration for a position beyond the
        largest, RuntimeError (old row order: IndexError) for a decode on a line that does not exist; DeviceError,
        StaleReadError, NewGraphError and InterfaceError as `Behaviour` says.
        """
        self._ready()
        extra = {"last_token_id": last_token_id, "input_embeddings": input_embeddings, **kwargs}
        batching = self.neuron_config.continuous_batching
        if self.behaviour.strict_interface and batching:
            interface.check_forward(input_ids, cache_ids, start_ids, extra, self.config.vocab_size, self.lines)
        if any(value is not None for value in extra.values()):
            raise NotImplementedError(f"the emulated device takes no {', '.join(sorted(extra))}")
        with torch.no_grad():
            if start_ids is None or not batching:
                return self._static(input_ids, cache_ids, start_ids)
            if input_ids.shape[1] == 1:
                return self._decode_rows(input_ids, cache_ids, start_ids.flatten())
            assert int(cache_ids.flatten()[0]) == 0, (
                f"a width of {input_ids.shape[1]} from position {int(cache_ids.flatten()[0])} is speculation, "
                f"for which nothing was compiled"
            )
            return self._prefill_rows(input_ids, cache_ids, start_ids.flatten().tolist())

    def _prefill_rows(self, inputs: Any, cache_ids: Any, lines: list[int]) -> Any:
        """Prompts one after another: float32 [n, vocab] in the order of the input."""
        n, width = inputs.shape
        if not self.context_buckets:
            raise TypeError("no prefill graph was compiled (context_length_estimate=0): prompts cannot be batched")
        bucket = covering(self.context_buckets, width)
        assert width <= bucket, f"invalid input prompt length: {width} tokens, the largest bucket is {bucket}"
        assert cache_ids.shape[0] == n, f"{n} rows of input_ids and {cache_ids.shape[0]} of cache_ids"
        if len(lines) != n:
            raise ValueError(f"{n} prompts and {len(lines)} start_ids: must be a line for each")
        last = cache_ids.max(dim=1).values.tolist()
        # At the exact width positions are kept as given, 0 on the padding of shorter rows: seen in no result.
        positions = torch.arange(bucket).expand(n, bucket) if width < bucket else cache_ids
        if width == bucket and self.behaviour.has(Fault.FULL_BUCKET_SHARED_END):
            last = [width - 1] * n
        if self.behaviour.has(Fault.LATE_COMPILE):
            bucket = width
        padded = torch.zeros(n, bucket, dtype=torch.int64)
        padded[:, :width] = inputs
        device = self._ready()
        logits = [
            device.prefill(padded[row, None], positions[row, None, :bucket], [last[row]], [lines[row]], width)
            for row in range(n)
        ]
        return device.results(torch.cat(logits), lines)

    def _decode_rows(self, inputs: Any, cache_ids: Any, start_ids: Any) -> Any:
        """One token on each line asked for: float32 [n, vocab], by default in the order of the input."""
        n = len(inputs)
        if n > self.lines:
            raise ValueError(f"{n} rows to decode: the model has {self.lines} lines")
        device = self._ready()
        tokens, positions = self._scatter(inputs, cache_ids, start_ids)
        lines = [line % self.lines for line in start_ids.tolist()]
        results = device.results(device.decode(tokens, positions, lines), list(range(self.lines)))
        if self.behaviour.row_order == "old" and n == self.lines:
            return results
        if self.behaviour.has(Fault.PARTIAL_ROWS_PACKED):
            return results[:n]
        return results[lines]

    def _scatter(self, inputs: Any, cache_ids: Any, start_ids: Any) -> tuple[Any, Any]:
        """Tokens and positions of all lines, [N]: those asked for, and 0 at 0 on every other."""
        if self.behaviour.row_order == "old":
            tokens, positions = (torch.zeros(self.lines, 1, dtype=torch.int64) for _ in range(2))
            for row, line in enumerate(start_ids.tolist()):
                tokens[line], positions[line] = inputs[row], cache_ids[row]
            return tokens[:, 0], positions[:, 0]
        tokens, positions = (torch.zeros(self.lines, 1, dtype=inputs.dtype) for _ in range(2))
        index = start_ids.to(torch.int64)[:, None]
        tokens.scatter_(0, index, inputs)
        positions.scatter_(0, index, cache_ids)
        return tokens[:, 0].to(torch.int64), positions[:, 0].to(torch.int64)

    # -- all rows together --------------------------------------------------------------------------------

    def _static(self, inputs: Any, cache_ids: Any, start_ids: Any) -> Any:
        """Without continuous batching: row i is line i, and all rows stand at the same position."""
        n, width = inputs.shape
        if self.neuron_config.continuous_batching:
            raise ValueError("start_ids are missing: under continuous batching every row needs its line")
        if n not in self.batch_sizes:
            raise ValueError(f"{n} rows: the model was compiled for a batch of one of {self.batch_sizes}")
        if start_ids is not None and bool(start_ids.any()):
            raise NotImplementedError("start_ids as an offset of padding at the left: not emulated")
        device, lines = self._ready(), list(range(n))
        first = 0 if cache_ids is None else int(cache_ids.flatten()[0])
        done, logits = 0, None
        if width > 1 and first == 0 and self.context_buckets:
            bucket = covering(self.context_buckets, width)
            done = min(width, bucket)
            padded = torch.zeros(n, bucket, dtype=torch.int64)
            padded[:, :done] = inputs[:, :done]
            logits = device.prefill(padded, torch.arange(bucket).expand(n, bucket), [done - 1] * n, lines, done)
        for column in range(done, width):
            tokens = inputs[:, column].to(torch.int64)
            logits = device.decode(tokens, torch.full((n,), first + column), lines)
        return device.results(logits, lines)

    def sample(
        self,
        input_ids: Any,
        sequence_length: int,
        cache_ids: Any = None,
        start_ids: Any = None,
        top_k: int = 50,
        top_p: float = 1.0,
        eos_token_override: int | list[int] | None = None,
        temperature: float = 1.0,
        streamer: Any = None,
        stopping_criteria_list: Any = None,
        no_repeat_ngram_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Greedy continuation of prompts [n, T] to ``sequence_length`` tokens, prompt included; int [n, up to that].

        Only ``top_k=1``, or sampling on the device. Raises ValueError for a number of rows that was not compiled,
        NotImplementedError for another choice of tokens.
        """
        if len(input_ids) not in self.batch_sizes:
            raise ValueError(f"{len(input_ids)} rows: the model was compiled for a batch of one of {self.batch_sizes}")
        generation = self.neuron_config.on_device_generation
        others = (streamer, stopping_criteria_list, no_repeat_ngram_size, *kwargs.values())
        if (generation is None and top_k != 1) or any(other is not None for other in others):
            raise NotImplementedError("the emulated device samples with top_k=1 and without further options")
        if generation is not None:
            stop = generation.eos_token_id
        else:
            stop = getattr(self.config, "eos_token_id", None) if eos_token_override is None else eos_token_override
            if stop is None:
                raise TypeError("the checkpoint has no eos_token_id: pass eos_token_override")
        stops = set() if stop is None else {stop} if isinstance(stop, int) else set(stop)
        on_device = generation is not None
        return generate(self, input_ids, sequence_length, cache_ids, start_ids, stops, on_device=on_device)


class MistralForSampling(LlamaForSampling):
    """A Mistral without a sliding window narrower than its positions; else it is a Llama."""


class NeuronAutoModelForCausalLM:
    """Picks the class by the ``model_type`` of a checkpoint."""

    @staticmethod
    def from_pretrained(pretrained_model_path: str | Path, *model_args: Any, **kwargs: Any) -> LlamaForSampling:
        """As of the class. Raises ValueError for a model that is neither a Llama nor a Mistral."""
        kind = checkpoint.read_config(pretrained_model_path).model_type
        classes = {"llama": LlamaForSampling, "mistral": MistralForSampling}
        if kind not in classes:
            raise ValueError(f"model_type = {kind!r}: the emulated device has {', '.join(classes)}")
        return classes[kind].from_pretrained(pretrained_model_path, *model_args, **kwargs)
