"""A model runner over a paged KV tensor: real Hugging Face weights, read and written through block tables.

The arithmetic (embedding, projections, rotary embedding, norms, MLP, head) is that of the model's modules.
Attention, paging and block moves are done here, and nothing but the pool keeps KV. So when the tokens equal
those of the model's own ``generate``, the block tables of every step were right.

Needs the extra ``torch`` (torch and transformers). Layout of the pool, for keys and for values alike:
``[layers, num_blocks, block_size, kv_heads, head_dim]``; the host pool is the same over its own blocks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from reference_engine.block_manager import BlockManager, Move
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.request import Request, Sequence
from reference_engine.runners.serving import SequenceKey
from reference_engine.scheduler import Plan, ScheduledSequence


class PoisonedReadError(RuntimeError):
    """Attention would read a slot that was not written since the pool was made or its block was freed."""


class Row(NamedTuple):
    """One sequence of a pass: ``tokens`` at positions ``first`` onwards, through block table ``table``."""

    key: SequenceKey
    first: int
    tokens: list[int]
    table: list[int]

    @property
    def end(self) -> int:
        """The position after the last one of the pass."""
        return self.first + len(self.tokens)


class _Span(NamedTuple):
    """Where a row stands in the pass, and the slots of positions ``[start, end)`` that it reads.

    It writes the last ones of these, one for each of its queries. ``hidden`` is ``[queries, slots]``.
    """

    row: Row
    queries: slice
    start: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    hidden: torch.Tensor
    """True where the query may not see the position: it comes later, or it has left the window."""


class PagedRunner:
    """Executes plans of the reference engine with a Llama or Mistral model, on its device and in its dtype.

    ``config`` is that of the engine. Every slot holds ``poison`` until it is written. With NaN, the default,
    reading such a slot raises `PoisonedReadError`; a number is read like any KV and spoils the tokens. The
    runner trusts the plan in everything else: ownership is not checked, and bounds only by Python and torch.

    Sampling is greedy, except that sequence ``s`` of a request with n > 1 begins with the (s+1)-th best
    token: else all n would be alike. ``smallest_gap`` is the smallest difference of two logits that decided a token;
    where it is far above the rounding error, the same sums in another order give the same tokens.

    Raises ValueError when the model and the engine disagree on the sliding window.
    """

    def __init__(self, model: Any, config: EngineConfig, *, poison: float = math.nan) -> None:
        self.model = model
        self.block_size = config.block_size
        self.window = config.sliding_window
        self.poison = poison
        models_window = getattr(model.config, "sliding_window", None)
        if self.window != models_window:
            raise ValueError(f"sliding_window = {self.window}: must be {models_window}, as in the model")
        self.keys, self.values = (self._pool(config.num_blocks) for _ in range(2))
        self.host_keys, self.host_values = (self._pool(config.num_swap_blocks) for _ in range(2))
        self.smallest_gap = math.inf
        self._last: dict[SequenceKey, int] = {}
        """The last token of each sequence: with a pipeline it is the next input before the engine has it."""

    def _pool(self, num_blocks: int) -> Any:
        config, weight = self.model.config, self.model.lm_head.weight
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_blocks, self.block_size, config.num_key_value_heads, head_dim)
        return torch.full(shape, self.poison, dtype=weight.dtype, device=weight.device)

    # -- a step ------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Whatever the engine takes can be run."""

    def execute(self, plan: Plan) -> dict[SequenceKey, int]:
        """Do the moves of a step, run its sequences and sample. Steps are executed in the order planned.

        Returns the tokens by (request id, sequence); those of all n sequences when a prompt is complete.
        """
        rows = [self._row(scheduled) for scheduled in plan.sequences]
        states = self.forward(plan.moves, rows)
        sampled: dict[SequenceKey, int] = {}
        end = 0
        for scheduled, row in zip(plan.sequences, rows, strict=True):
            end += len(row.tokens)
            if scheduled.samples:
                sampled.update(self._sample(scheduled.sequence, states[end - 1]))
        self._last.update(sampled)
        return sampled

    def forward(self, moves: list[Move], rows: list[Row]) -> Any:
        """Do ``moves`` in their order, then one pass over ``rows``: each layer writes all KV before it reads.

        Returns the last hidden states, ``[tokens of all rows, hidden_size]``. Raises `PoisonedReadError`.
        """
        with torch.no_grad():
            for move in moves:
                self._move(move)
            return self._pass(rows)

    def settle(self, engine: Engine) -> None:
        """Poison the blocks that are free after a commit."""
        self.poison_free(engine.blocks)

    def poison_free(self, blocks: BlockManager) -> None:
        """Overwrite what nobody holds and no prefix hit can reach, so that a later read of it is seen.

        Not between `Engine.schedule` and `execute`: the source of a move may be free already.
        """
        for pools, free in (
            ((self.keys, self.values), blocks.pool.free),
            ((self.host_keys, self.host_values), blocks.host.free),
        ):
            for pool in pools:
                pool[:, list(free)] = self.poison

    def _row(self, scheduled: ScheduledSequence) -> Row:
        sequence = scheduled.sequence
        key = (sequence.request.request_id, sequence.index)
        tokens = sequence.tokens[scheduled.first : scheduled.first + scheduled.num_tokens]
        if len(tokens) < scheduled.num_tokens:
            tokens.append(self._last[key])
        assert len(tokens) == scheduled.num_tokens, "of its input, only the last token can be in flight"
        return Row(key, scheduled.first, tokens, sequence.table)

    def _sample(self, sequence: Sequence, state: Any) -> dict[SequenceKey, int]:
        request = sequence.request
        members = [sequence.index] if request.forked else list(range(request.n))
        with torch.no_grad():
            best = self.model.lm_head(state).topk(len(members) + 1)
        gaps = best.values[:-1] - best.values[1:]
        self.smallest_gap = min(self.smallest_gap, float(gaps.min()))
        return {(request.request_id, s): int(best.indices[order]) for order, s in enumerate(members)}

    def _move(self, move: Move) -> None:
        device, host = (self.keys, self.values), (self.host_keys, self.host_values)
        sources = host if move.kind == "swap_in" else device
        targets = host if move.kind == "swap_out" else device
        for source, target in zip(sources, targets, strict=True):
            target[:, move.dst] = source[:, move.src]

    # -- the pass ----------------------------------------------------------------------------------------

    def _pass(self, rows: list[Row]) -> Any:
        body, device = self.model.model, self.keys.device
        tokens = [token for row in rows for token in row.tokens]
        states = body.embed_tokens(torch.tensor(tokens, dtype=torch.long, device=device))
        if not rows:
            return states
        positions = [position for row in rows for position in range(row.first, row.end)]
        # Before transformers 4.48 not every model has it at the top, but every attention layer has one.
        rotary = getattr(body, "rotary_emb", None) or body.layers[0].self_attn.rotary_emb
        cosines, sines = rotary(states[None], torch.tensor([positions], device=device))
        spans = self._spans(rows)
        for number, layer in enumerate(body.layers):
            normed = layer.input_layernorm(states)
            states = states + self._attend(number, layer.self_attn, normed, (cosines[0], sines[0]), spans)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return body.norm(states)

    def _spans(self, rows: list[Row]) -> list[_Span]:
        """What each row reads: all positions up to its end, from the earliest that its first query sees."""
        size, window, device = self.block_size, self.window, self.keys.device
        spans: list[_Span] = []
        at = 0
        for row in rows:
            start = 0 if window is None else max(0, row.first - window + 1)
            read = range(start, row.end)
            queries = torch.arange(row.first, row.end, device=device)
            distance = queries[:, None] - torch.arange(start, row.end, device=device)
            spans.append(
                _Span(
                    row,
                    slice(at, at + len(row.tokens)),
                    start,
                    blocks=torch.tensor([row.table[position // size] for position in read], device=device),
                    offsets=torch.tensor([position % size for position in read], device=device),
                    hidden=distance < 0 if window is None else (distance < 0) | (distance >= window),
                )
            )
            at += len(row.tokens)
        return spans

    def _attend(self, number: int, attention: Any, states: Any, rotation: Any, spans: list[_Span]) -> Any:
        """Attention of layer ``number``: write the KV of all rows through their tables, then read it back."""
        heads = (len(states), -1, self.keys.shape[-1])
        queries, keys = attention.q_proj(states).view(heads), attention.k_proj(states).view(heads)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation, unsqueeze_dim=1)
        values = attention.v_proj(states).view(heads)
        key_pool, value_pool = self.keys[number], self.values[number]
        for span in spans:
            new = slice(-len(span.row.tokens), None)
            key_pool[span.blocks[new], span.offsets[new]] = keys[span.queries]
            value_pool[span.blocks[new], span.offsets[new]] = values[span.queries]
        mixed = torch.empty_like(queries)
        for span in spans:
            keys, values = key_pool[span.blocks, span.offsets], value_pool[span.blocks, span.offsets]
            # A pass writes a slot in every layer or in none.
            if number == 0 and math.isnan(self.poison):
                self._check_written(span, keys)
            mixed[span.queries] = _softmax_attention(queries[span.queries], keys, values, span.hidden)
        return attention.o_proj(mixed.flatten(1))

    def _check_written(self, span: _Span, keys: Any) -> None:
        unwritten = keys.isnan().flatten(1).any(1).nonzero().flatten().tolist()
        if unwritten:
            row, position = span.row, span.start + unwritten[0]
            raise PoisonedReadError(
                f"sequence {row.key[1]} of {row.key[0]}, run from position {row.first}, reads position "
                f"{position} in block {row.table[position // self.block_size]}, where nothing was written"
            )


def _softmax_attention(queries: Any, keys: Any, values: Any, hidden: Any) -> Any:
    """Scaled dot-product attention, ``[positions, heads, head_dim]``; several query heads share a KV head."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


# -------------------------------------------------------------------------------------------------- the model


def tiny_model(*, seed: int = 0, sliding_window: int | None = None, vocab_size: int = 64) -> Any:
    """A Llama (with a sliding window, a Mistral) of two layers with random weights, in float64 on the CPU.

    The weights are a function of ``seed``, whatever the release of transformers. They are large enough for
    attention to tell tokens and positions apart; those of the head are larger, so that near-ties are rare.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if sliding_window is None:
        model = LlamaForCausalLM(LlamaConfig(**fields))
    else:
        model = MistralForCausalLM(MistralConfig(sliding_window=sliding_window, **fields))
    model = model.to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                weight.normal_(0.0, 8.0 if name == "lm_head.weight" else 0.2, generator=generator)
    return model
