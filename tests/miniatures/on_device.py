"""The clean miniature on a device of fixed batch, where the configuration asks for one: who has which line."""

from __future__ import annotations

import msgspec

from conformance.protocol import Capabilities, ConfigRefused, DeviceCall, DeviceShape, EngineConfig, Request, StepPlan

from .clean import Miniature


class OnDevice(Miniature):
    """Keeps a line for each running job. Decodes go before prefills, since they spoil lines they do not name."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        moves = config.num_swap_blocks or config.enable_prefix_caching or config.num_lookahead_slots
        parts = config.enable_chunked_prefill or config.num_speculative_tokens or config.pipeline_depth > 1
        if config.fixed_batch and (moves or parts or config.block_size < config.max_model_len):
            raise ConfigRefused("fixed_batch: whole prompts on lines of their own, one block and one token each")
        self.line_of: dict[str, int] = {}

    @property
    def capabilities(self) -> Capabilities:
        plain = super().capabilities
        features = plain.features | {"device"}
        if not self.config.fixed_batch:
            return msgspec.structs.replace(plain, features=features)
        features -= {"chunked_prefill", "encoder_cache", "fork", "lookahead", "pipeline", "prefix_caching"}
        features -= {"speculation", "swap"}
        return msgspec.structs.replace(plain, features=features, device=self.shape)

    @property
    def shape(self) -> DeviceShape:
        """One bucket of half the model's length and one of the whole."""
        length = self.config.max_model_len
        buckets = (length // 2, length)
        return DeviceShape(batch=self.config.max_num_seqs, context_buckets=buckets, token_buckets=buckets)

    def refusal(self, request: Request) -> str:
        several = self.config.fixed_batch and request.n > 1
        return "n > 1: a line cannot be copied" if several else super().refusal(request)

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        if self.config.fixed_batch:
            running = [job.rid for job in self.running]
            self.line_of = {rid: line for rid, line in self.line_of.items() if rid in running}
            for row in plan.sequences:
                if row.request_id not in self.line_of:
                    self.line_of[row.request_id] = self.line()
            plan.device_calls = self.calls(plan)
        return plan

    def line(self) -> int:
        """A free line."""
        return min(set(range(self.config.max_num_seqs)) - set(self.line_of.values()))

    def calls(self, plan: StepPlan) -> list[DeviceCall]:
        """What the step asks of the device."""
        decodes = {row.request_id: row.first for row in plan.sequences if row.first}
        prefills = {row.request_id: row.num_tokens - 1 for row in plan.sequences if not row.first}
        calls = [self.call("decode", decodes, 1)] if decodes else []
        if prefills:
            calls.append(self.call("prefill", prefills, self.width(prefills)))
        return calls

    def width(self, prefills: dict[str, int]) -> int:
        """Tokens of a row: at least two, or the device takes it for a decode."""
        return max(2, 1 + max(prefills.values()))

    def call(self, route: str, positions: dict[str, int], width: int) -> DeviceCall:
        """One call for jobs at their last positions."""
        rows = [(rid, 0) for rid in positions]
        return DeviceCall(
            route="prefill" if route == "prefill" and width > 1 else "decode",
            rows=rows,
            lines=[self.line_of[rid] for rid in positions],
            positions=list(positions.values()),
            width=width,
            returned=rows,
        )
