"""What an oracle is: a listener on the session that reports violations of its requirements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from conformance.ledger import Ledger
from conformance.protocol import Capabilities, EngineConfig, Finished, Sampled, SequenceKey, Snapshot, Taken, Usage
from conformance.records import RequestRecord, StepFacts

Report = Callable[..., None]
"""``report(requirement, message, expected=…, got=…)``: one violation, in the words of the field."""


class Oracle:
    """Judges one family of requirements. The hooks are called by the session in the order given here.

    An oracle never asserts concrete block ids or queue orders beyond what the contract says, keeps only
    what it needs to judge, and does work proportional to what changed in the step.
    """

    requirements: ClassVar[tuple[str, ...]] = ()

    def __init__(self, ledger: Ledger, report: Report) -> None:
        self.ledger = ledger
        self.report = report

    @classmethod
    def concerns(cls, config: EngineConfig, capabilities: Capabilities) -> bool:  # noqa: ARG003 - for others to use
        """Whether the oracle has anything to judge of such an engine; what it does not concern costs nothing."""
        return True

    def on_add(self, request: RequestRecord) -> None:
        """The engine accepted the request."""

    def on_refused(self, request: RequestRecord, reason: str) -> None:
        """The engine refused the request, at once or while scheduling."""

    def before_step(self, facts: StepFacts) -> None:
        """A plan was made; the ledger still shows the state before it."""

    def on_step(self, facts: StepFacts) -> None:
        """The plan's tables and preemptions are in the ledger; its tokens are not yet computed."""

    def after_step(self, facts: StepFacts) -> None:
        """The plan is executed: positions computed, tokens sampled, ``facts.usage_after`` known."""

    def on_taken(self, step: int, taken: list[Taken], sampled: Mapping[SequenceKey, Sampled]) -> None:
        """``step`` is committed by an engine that ``taken`` its own tokens, in place of the right ones, ``sampled``."""

    def on_commit(self, step: int, finished: list[Finished], ended: list[RequestRecord]) -> None:
        """The tokens of ``step`` are committed; ``ended`` are the requests that are now complete."""

    def on_end(self, request: RequestRecord) -> None:
        """The request has finished, was aborted or was refused."""

    def on_reset(self, done: bool) -> None:  # noqa: FBT001 - the engine's one-word answer
        """The prefix cache was asked to reset; ``done`` is the engine's answer."""

    def audit(self, snapshot: Snapshot, usage: Usage) -> None:
        """The engine shows its whole books and its figures: every so often, when idle, and at the end."""
