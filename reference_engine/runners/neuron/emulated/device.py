"""The device proper: runs compiled graphs over one cache, and is where planted faults act.

A prefill graph runs one padded prompt and writes all of its rows; a decode graph runs one token on every line.
"""

from __future__ import annotations

from typing import Any

import torch

from reference_engine.runners.neuron.emulated.behaviour import Behaviour, Fault
from reference_engine.runners.neuron.emulated.buckets import holding
from reference_engine.runners.neuron.emulated.cache import Cache
from reference_engine.runners.neuron.emulated.ledger import Graph, Ledger
from reference_engine.runners.neuron.emulated.llama import Llama
from reference_engine.runners.neuron.emulated.sampling import DeviceSampler

_noise = torch.Generator().manual_seed(0)
"""Never set back: what a device that is not deterministic goes by (`Fault.NONDETERMINISTIC`)."""


class Device:
    """Weights, cache and sampler of one model after `to_neuron`; every execution is entered in its ledger."""

    def __init__(
        self, llama: Llama, cache: Cache, ledger: Ledger, token_buckets: list[int], sampler: DeviceSampler | None
    ) -> None:
        self.llama, self.cache, self.ledger, self.sampler = llama, cache, ledger, sampler
        self.behaviour: Behaviour = ledger.behaviour
        self.token_buckets = token_buckets
        self._bucket = 0
        """That of the last decode."""

    def reset(self) -> None:
        """Zero the cache."""
        self.cache.reset()
        self._bucket = 0

    def prefill(self, prompts: Any, positions: Any, last: list[int], lines: list[int], width: int) -> Any:
        """Run prompts padded to their bucket, each on its line, as one execution: float32 [n, vocab].

        Args: tokens and rotary positions, [n, bucket]; the index of the last token of each prompt; the width before
        padding. Raises DeviceError and NewGraphError.
        """
        n, bucket = prompts.shape
        call = self.ledger.execute(Graph("prefill", bucket, n), tuple(lines), tuple(last), width)
        results = []
        for tokens, rotary, end, line in zip(prompts, positions, last, lines, strict=True):
            early = end == bucket - 1 and self.behaviour.has(Fault.FULL_BUCKET_OFF_BY_ONE)
            logits, keys, values = self.llama.prefill(tokens, rotary, end - early)
            self.cache.write_prompt(line, keys, values, end + 1, call.number)
            results.append(logits)
        return torch.stack(results)

    def decode(self, tokens: Any, positions: Any, lines: list[int]) -> Any:
        """Run one token on every line: float32 [N, vocab].

        Args: tokens and positions [N]; the lines asked for, all others being at position 0 with token 0.
        Raises StopIteration when no bucket holds the largest position, StaleReadError and NewGraphError.
        """
        cache, where = self.cache, positions.tolist()
        if min(where) < 0:
            raise ValueError(f"cache_ids: {min(where)} is not a position")
        bucket = holding(self.token_buckets, max(where))
        asked = set(lines)
        inactive = tuple(line for line in range(cache.lines) if line not in asked)
        graph = Graph("decode", bucket, cache.lines)
        call = self.ledger.execute(graph, tuple(lines), tuple(where[line] for line in lines), 1, inactive)
        if self._bucket not in (0, bucket) and self.behaviour.has(Fault.TOKEN_BUCKET_LOSES_CACHE):
            cache.reset()
        self._bucket = bucket
        seen = torch.arange(bucket) < positions[:, None]
        if self.behaviour.has(Fault.STALE_ROWS_VISIBLE):
            for line in lines:
                seen[line, : cache.longest[line]] = True
        if self.behaviour.poison:
            cache.check_read(seen, lines)
        logits = self.llama.decode(tokens, positions, cache, seen, self._writes(lines))
        cache.note_tokens(where, lines, call.number)
        if self.behaviour.has(Fault.NONDETERMINISTIC) and float(torch.rand((), generator=_noise)) < 0.25:  # noqa: PLR2004 - now and then
            best = logits.topk(2).indices
            logits = logits.scatter(1, best, logits.gather(1, best.flip(1)))
        return logits

    def _writes(self, lines: list[int]) -> tuple[Any, Any]:
        """The lines whose row a decode writes, and those whose KV goes there: all of them, each its own."""
        targets = torch.arange(self.cache.lines)
        if self.behaviour.has(Fault.INACTIVE_LINES_IDLE):
            targets = torch.tensor(sorted(lines))
        sources = targets.clone()
        if self.behaviour.has(Fault.LINES_LEAK):
            sources[torch.isin(targets, torch.tensor(lines))] = torch.tensor(sorted(lines)).roll(1)
        return targets, sources

    def results(self, logits: Any, lines: list[int]) -> Any:
        """What is returned to the host for rows of logits on ``lines``: themselves, or token ids int32 [n, 1]."""
        if self.sampler is None:
            return logits
        if self.behaviour.has(Fault.SAMPLES_SECOND_BEST):
            return logits.topk(2).indices[:, 1:].to(torch.int32)
        return self.sampler.tokens(logits, lines)
