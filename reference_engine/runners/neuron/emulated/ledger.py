"""What a model has compiled, what it was asked, and what that cost. Standard library only."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from reference_engine.runners.neuron.emulated.behaviour import Behaviour, NewGraphError

Route = Literal["prefill", "decode"]


class Graph(NamedTuple):
    """A compiled graph: ``bucket`` positions, ``batch`` rows."""

    route: Route
    bucket: int
    batch: int


class Call(NamedTuple):
    """One execution of a graph: one prompt, or one decode step of all lines."""

    number: int
    """Counts executions since the model was made, from 0."""
    graph: Graph
    lines: tuple[int, ...]
    """The lines asked for, in the order of the rows of the result."""
    positions: tuple[int, ...]
    """Of each line, the position of the last token: prompt length - 1, or the position decoded."""
    width: int
    """Tokens in a row of the input before it is padded to the bucket."""
    inactive: tuple[int, ...]
    """Lines that ran although they were not asked for; token 0 was written to position 0 of each."""

    @property
    def route(self) -> Route:
        """Prefill or decode."""
        return self.graph.route


@dataclass
class Ledger:
    """Counters of one model. Only `calls` is bounded by ``calls_kept``; the counters see every call."""

    behaviour: Behaviour
    compiled: tuple[Graph, ...] = ()
    """The graphs made by `to_neuron` or `cpu_compile`, in the order of their making."""
    loaded: tuple[Graph, ...] = ()
    """The graphs taken from a folder instead."""
    late: list[Graph] = field(default_factory=list)
    """Graphs that had to be made afterwards."""
    executions: Counter[Graph] = field(default_factory=Counter)
    rows: Counter[Route] = field(default_factory=Counter)
    """Prompts prefilled, and lines decoded because they were asked for."""
    cost: int = 0
    calls: deque[Call] = field(init=False)

    def __post_init__(self) -> None:
        self.calls = deque(maxlen=self.behaviour.calls_kept)

    @property
    def known(self) -> tuple[Graph, ...]:
        """Every graph there is."""
        return (*self.compiled, *self.loaded, *self.late)

    @property
    def prefills(self) -> int:
        """Prompts that went the prefill route."""
        return self.rows["prefill"]

    @property
    def decodes(self) -> int:
        """Decode steps, whatever the number of lines."""
        return sum(count for graph, count in self.executions.items() if graph.route == "decode")

    def execute(
        self,
        graph: Graph,
        lines: tuple[int, ...],
        positions: tuple[int, ...],
        width: int,
        inactive: tuple[int, ...] = (),
    ) -> Call:
        """Record one execution. Raises `NewGraphError` when its graph is not there and none may be made."""
        if graph not in self.known:
            if self.behaviour.forbid_new_graphs:
                raise NewGraphError(
                    f"{graph} is not among the graphs of to_neuron(): {', '.join(map(str, self.known))}"
                )
            self.late.append(graph)
        call = Call(sum(self.executions.values()), graph, lines, positions, width, inactive)
        self.executions[graph] += 1
        self.rows[graph.route] += len(lines)
        prices = self.behaviour.cost
        if prices is not None and graph.route == "prefill":
            self.cost += prices.prefill_per_position * graph.bucket * graph.batch
        elif prices is not None:
            self.cost += prices.decode + prices.decode_per_line * len(lines)
        self.calls.append(call)
        return call
