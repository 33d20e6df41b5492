"""Pages of a pool of slots, as engines have them whose tables are of tokens."""

from __future__ import annotations

from conformance.protocol import BlockId, EngineFault, RequestId


def pages_of(request_id: RequestId, slots: list[int], page_size: int) -> list[BlockId]:
    """The pages that ``slots`` fill in order. Raises `EngineFault` when they are not those of whole pages."""
    pages = [slot // page_size for slot in slots[::page_size]]
    for position, slot in enumerate(slots):
        if slot != pages[position // page_size] * page_size + position % page_size:
            raise EngineFault(f"position {position} of {request_id} lies in slot {slot}, off its page: {slots}")
    return pages
