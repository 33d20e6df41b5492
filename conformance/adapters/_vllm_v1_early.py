"""The V1 scheduler of vLLM 0.8 in the shape that those of later releases have.

There is one KV-cache group, whose tables the cache manager keeps itself; what is scheduled is told request by request,
what came of it is not told by client, and the waiting queue is a deque. Nothing is decided here.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

WITHOUT_A_MODEL = {
    "structured_output_manager": SimpleNamespace(grammar_bitmask=lambda *_: None),
    "mm_registry": SimpleNamespace(get_max_tokens_per_item_by_nonzero_modality=lambda _: {}),
}
"""Arguments of the scheduler that would be made from the files of a model: its tokenizer, its encoder's items."""


class _Waiting(deque[Any]):
    """The waiting queue, with the name that putting a request back at its head has later."""

    def prepend_request(self, request: Any) -> None:
        super().appendleft(request)

    def appendleft(self, request: Any) -> None:
        self.prepend_request(request)


class EarlyScheduler:
    """Passes everything on to the ``scheduler``."""

    connector = None

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        scheduler.waiting = _Waiting()
        manager = scheduler.kv_cache_manager
        manager.coordinator = SimpleNamespace(single_type_managers=(manager,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def get_request_counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def schedule(self) -> Any:
        """A scheduler's output, with tables by group and what has changed of each running request by field."""
        output = self._scheduler.schedule()
        cached = output.scheduled_cached_reqs
        news = [SimpleNamespace(**(vars(one) | {"block_ids": (one.block_ids,)})) for one in output.scheduled_new_reqs]
        changes = SimpleNamespace(
            req_ids=[one.req_id for one in cached],
            resumed_from_preemption=[one.resumed_from_preemption for one in cached],
            new_token_ids=[list(one.new_token_ids) for one in cached],
            new_block_ids=[(list(one.new_block_ids),) for one in cached],
            num_computed_tokens=[one.num_computed_tokens for one in cached],
        )
        return SimpleNamespace(
            **(vars(output) | {"scheduled_new_reqs": news, "scheduled_cached_reqs": changes, "as_scheduled": output})
        )

    def update_from_output(self, output: Any, model_runner_output: Any) -> dict[int, Any]:
        """The outputs for the one client there is."""
        return {0: self._scheduler.update_from_output(output.as_scheduled, model_runner_output)}

    def shutdown(self) -> None:
        """There is nothing to stop."""
