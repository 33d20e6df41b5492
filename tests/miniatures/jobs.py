"""What the clean miniature knows of a request: its sequences, their tokens and tables."""

from __future__ import annotations

from conformance.protocol import Request


class Sequence:
    """One sequence of a job. ``computed`` counts what is scheduled; ``pending`` tokens are still in flight."""

    def __init__(self, index: int, tokens: list[int]) -> None:
        self.index = index
        self.tokens = tokens
        self.table: list[int] = []
        self.host: list[int] = []
        self.computed = 0
        self.pending = 0
        self.published = 0
        self.drafts: list[int] = []
        self.done = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.pending


class Job:
    """One request in the engine."""

    def __init__(self, spec: Request) -> None:
        self.spec = spec
        self.rid = spec.request_id
        self.sequences = [Sequence(0, list(spec.prompt))]
        self.identity = (spec.cache_salt, spec.adapter, spec.encoder_items)

    @property
    def forked(self) -> bool:
        return len(self.sequences) == self.spec.n

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.done]

    @property
    def width(self) -> int:
        """Sequences it counts for against max_num_seqs."""
        return len(self.live) if self.forked else self.spec.n
