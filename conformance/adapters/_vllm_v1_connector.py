"""A KV connector of our own for vLLM V1: KV of prompts comes from nowhere, in time, late or not at all.

`Transfers` decides, from the request's id and the number of the load alone, what there is to load, how long it takes
and where it fails; it knows nothing of vLLM. The connector, a class that vLLM finds in this module under
`CONNECTOR`, passes the scheduler's calls on to it. What a worker would do (load, send, report) is read off by the
adapter, step by step, and done to the shadow KV by the harness.

What is there for a request never changes: nothing, some blocks of its prompt, or all of it. A load in time is of
whole blocks and leaves at least one token to compute, as connectors do; so is any for a request that has outputs, or
whose whole prompt was loaded before. The null block takes nothing.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from typing import Any, NamedTuple

from conformance.protocol import BlockId, KVLoad, RequestId

CONNECTOR = "KvconformConnector"
_NULL = 0


class TransferSettings(NamedTuple):
    """How loads and sends go. ``unit``: tokens that divide every load but that of a whole prompt."""

    late: bool
    loads: bool
    unit: int
    load_steps_max: int
    """A late load takes from 0 to so many steps, beyond the one in which it begins."""
    failing: int
    """Every load of this number fails from some block on; 0: none."""
    whole: bool
    """A late load may be of a whole prompt, for a request that has had no such load yet."""
    by_request: bool
    """Failures are told by request, which starts over, and not by block."""
    send_steps: int
    """Steps for which the blocks of a finished request are held, so that they can be sent; 0: no sending."""


class _Pending:
    """A late load on its way."""

    __slots__ = ("load", "steps_left")

    def __init__(self, load: KVLoad, steps_left: int) -> None:
        self.load = load
        self.steps_left = steps_left


class StepTransfers(NamedTuple):
    """What the worker's side of the connector does and reports in one step."""

    loads: list[KVLoad]
    loaded: list[KVLoad]
    sent: set[RequestId]
    blocks_failed: set[BlockId]
    requests_failed: set[RequestId]


def _draw(name: str) -> int:
    return zlib.crc32(name.encode())


class Transfers:
    """The books of the connector: loads begun and pending, requests whose blocks are being sent."""

    def __init__(self, settings: TransferSettings) -> None:
        self.settings = settings
        self._first: dict[RequestId, int] = {}
        """Request -> positions that the engine had itself, when it last asked."""
        self._had_whole: set[RequestId] = set()
        self._last = False
        """The last answer was a whole prompt: blocks are set aside before the next one is asked for."""
        self._asked: set[RequestId] = set()
        self._begun: list[KVLoad] = []
        self._pending: list[_Pending] = []
        self._sending: dict[RequestId, int | None] = {}
        """Request -> steps until its blocks are sent; None until the worker has heard of its end."""
        self._count = 0

    def match(self, request_id: RequestId, prompt_len: int, length: int, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the ``computed`` ones, None for "ask again", and whether they come late."""
        if not self.settings.loads:
            return 0, False
        draw = _draw(request_id)
        if self.settings.late and draw % 5 == 0 and request_id not in self._asked:
            self._asked.add(request_id)
            self._begun.append(KVLoad(request_id=request_id, first=0, num_tokens=0, block_tables=[], late=True))
            return None, False
        there = (0, prompt_len, prompt_len, prompt_len - draw // 64 % prompt_len)[draw // 8 % 4]
        whole = self.settings.late and self.settings.whole and request_id not in self._had_whole
        if not whole or there != length:
            there = min(there, length - 1) // self.settings.unit * self.settings.unit
        self._first[request_id] = computed
        self._last = there == length
        more = max(0, there - computed)
        return more, self.settings.late and more > 0

    def allocated(self, request_id: RequestId, tables: list[list[BlockId]], num_tokens: int) -> None:
        """The engine has set blocks aside; the load begins. Nothing to do without tokens to load."""
        if not num_tokens:
            return
        settings = self.settings
        first = self._first[request_id]
        self._count += 1
        end, size = first + num_tokens, settings.unit
        if self._last:
            self._had_whole.add(request_id)
        failed_from = None
        if settings.failing and self._count % settings.failing == 0:
            places = [place for place in range(first // size, -(-end // size)) if tables[0][place] != _NULL]
            failed_from = 0 if settings.by_request else size * places[_draw(f"f{self._count}") % len(places)]
        load = KVLoad(
            request_id=request_id,
            first=first,
            num_tokens=num_tokens,
            block_tables=tables,
            late=settings.late,
            failed_from=failed_from,
        )
        self._begun.append(load)
        if settings.late:
            steps = _draw(f"s{self._count}{request_id}") % (settings.load_steps_max + 1)
            self._pending.append(_Pending(load, steps))

    def keeps(self, request_id: RequestId, *, sends: bool) -> bool:
        """Whether the blocks of a request that is over are kept until they are sent."""
        if not sends or not self.settings.send_steps:
            return False
        self._sending[request_id] = None
        return True

    def step(self, finished: set[RequestId]) -> StepTransfers:
        """What happens while the step runs. ``finished``: requests of whose end the worker is told in it."""
        begun, self._begun = self._begun, []
        arrived = [pending.load for pending in self._pending if not pending.steps_left]
        self._pending = [pending for pending in self._pending if pending.steps_left]
        for pending in self._pending:
            pending.steps_left -= 1
        sent = {name for name, steps in self._sending.items() if steps == 0}
        self._sending = {
            name: self.settings.send_steps - 1 if steps is None and name in finished else steps and steps - 1
            for name, steps in self._sending.items()
            if name not in sent
        }
        failed = [one for one in [*begun, *arrived] if one.failed_from is not None and (one in arrived or not one.late)]
        blocks: set[BlockId] = set()
        if not self.settings.by_request:
            for one in failed:
                size, end = self.settings.unit, one.first + one.num_tokens
                blocks.update(one.block_tables[0][(one.failed_from or 0) // size : -(-end // size)])
        blocks.discard(_NULL)
        requests = {one.request_id for one in failed} if self.settings.by_request else set()
        return StepTransfers(begun, arrived, sent, blocks, requests)


@functools.cache
def _connector_class() -> Any:
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    hybrid = (base.SupportsHMA,) if hasattr(base, "SupportsHMA") else ()

    class Metadata(base.KVConnectorMetadata):  # type: ignore[name-defined, misc]  # a base found at run time
        """Nothing: the worker's side is played by the adapter."""

    class KvconformConnector(base.KVConnectorBase_V1, *hybrid):  # type: ignore[name-defined, misc]  # a base found at run time
        """Passes the scheduler's calls on to `Transfers`. It has no worker's side."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            more = {} if kv_cache_config is None else {"kv_cache_config": kv_cache_config}
            super().__init__(vllm_config=vllm_config, role=role, **more)
            self.transfers = Transfers(TransferSettings(**vllm_config.kv_transfer_config.kv_connector_extra_config))

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            return self.transfers.match(
                request.request_id, request.num_prompt_tokens, request.num_tokens, num_computed_tokens
            )

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            self.transfers.allocated(
                request.request_id, [list(group) for group in blocks.get_block_ids()], num_external_tokens
            )

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return Metadata()

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            ended_well = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
            return self.transfers.keeps(request.request_id, sends=ended_well), None

        request_finished_all_groups = request_finished

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

        def wait_for_layer_load(self, layer_name: str) -> None: ...

        def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

        def wait_for_save(self) -> None: ...

    return KvconformConnector


def __getattr__(name: str) -> Any:
    if name == CONNECTOR:
        return _connector_class()
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
