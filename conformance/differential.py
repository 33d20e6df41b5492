"""The same operations on two engines, or on one under two configurations: where they first part, and how.

Blocks are compared up to renaming: how many a sequence has, how many of them it kept since its last step, and whom
it shares them with. Which ids a free list hands out is nobody's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from conformance.execute import Execution, execute
from conformance.need import PreemptionVerdict
from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step, describe
from conformance.protocol import BlockId, Capabilities, ConfigRefused, EngineConfig, EngineFactory, Feature
from conformance.trace import Line, SequenceOutcome, StepOutcome, Trace
from conformance.violations import Violation
from conformance.watchdog import Watchdog
from conformance.wording import some

Kind: TypeAlias = Literal["end", "refusal", "answer", "run", "tokens", "blocks", "preemption", "moves", "finish"]


class Side(msgspec.Struct, kw_only=True):
    """One of the two: a run, and what it is called. ``findings``: what was broken in it."""

    label: str
    name: str
    config: EngineConfig
    lines: list[Line]
    steps: int
    findings: list[Violation] = []
    preemptions: int | None = None
    prefills: int | None = None


class Difference(NamedTuple):
    """One thing that is not the same, in a sentence without its full stop."""

    kind: Kind
    text: str


class Divergence(msgspec.Struct, kw_only=True):
    """The first operation, and step within it, in which two runs are not the same. ``None``: there is no such step."""

    operation: int
    steps_alike: int
    """Steps before it."""
    differences: list[Difference]
    steps: tuple[StepOutcome | None, StepOutcome | None] = (None, None)

    @property
    def kind(self) -> Kind:
        """What kind of difference is named first."""
        return self.differences[0].kind


# ------------------------------------------------------------------------------------------------------- sides


def run_side(
    label: str,
    name: str,
    factory: EngineFactory,
    config: EngineConfig,
    operations: Sequence[Operation],
    *,
    judge: Collection[str] | None = None,
    stop_at_first: bool = False,
    watchdog: Watchdog | None = None,
) -> Side:
    """Run one side. Raises `ConfigRefused`, naming the side, and what `conformance.execute.execute` raises."""
    execution: Execution = execute(
        factory, config, operations, judge=judge, stop_at_first=stop_at_first, watchdog=watchdog, record=True
    )
    if execution.refused is not None:
        raise ConfigRefused(f"{label}, {name}: {execution.refused}")
    return Side(
        label=label,
        name=f"{name} {execution.engine_version}".strip(),
        config=config,
        lines=execution.lines,
        steps=execution.steps,
        findings=execution.violations,
        preemptions=execution.preemptions,
        prefills=execution.prefills,
    )


def recorded_side(label: str, trace: Trace) -> Side:
    """The side that a trace has recorded."""
    header = trace.header
    return Side(
        label=label,
        name=f"{header.engine} {header.engine_version} as recorded",
        config=header.config,
        lines=trace.lines,
        steps=trace.footer.steps,
        findings=trace.footer.violations,
    )


def shared_operations(
    operations: Sequence[Operation], capabilities: Sequence[Capabilities], configs: Sequence[EngineConfig]
) -> list[Operation]:
    """The operations that every side can run; a session leaves out what its engine does not declare."""
    features: frozenset[Feature] = frozenset.intersection(*(one.features for one in capabilities))
    encoder = all(config.encoder_cache_size for config in configs)

    def can(operation: Operation) -> bool:
        match operation:
            case Add():
                return (
                    (operation.n == 1 or "fork" in features)
                    and (operation.stop_after is None or "stop_token" in features)
                    and (not (operation.salt or operation.adapter) or "identity" in features)
                    and (not operation.encoder_sizes or encoder)
                    and (not operation.streamed or "streaming_input" in features)
                )
            case Abort() | AbortEnded():
                return "abort" in features
            case ResetPrefixCache():
                return "reset_prefix_cache" in features
            case _:
                return True

    return [operation for operation in operations if can(operation)]


# -------------------------------------------------------------------------------------------------- comparison


def first_divergence(one: Side, other: Side) -> Divergence | None:
    """Where two runs of the same operations part; None when they never do."""
    views = _View(), _View()
    labels = one.label, other.label
    alike = 0
    for number, lines in enumerate(zip_longest(one.lines, other.lines)):
        for steps in zip_longest(*(line.steps if line is not None else [] for line in lines)):
            differences = _compare_steps(labels, views, steps)
            if differences:
                return Divergence(operation=number, steps_alike=alike, differences=differences, steps=steps)
            alike += 1
        answers = [line.outcome if line is not None else {} for line in lines]
        differences = list(_compare_answers(labels, answers))
        if differences:
            return Divergence(operation=number, steps_alike=alike, differences=differences)
    return None


class _View:
    """What one side has shown so far: the tables of each sequence in its last step."""

    def __init__(self) -> None:
        self.tables: dict[str, list[list[BlockId]]] = {}

    def see(self, step: StepOutcome) -> dict[str, _Ran]:
        gone = {verdict.request_id for verdict in step.preempted}
        for name in self.tables:
            if name.partition("/")[0] in gone:
                self.tables[name] = []  # it returns with other blocks, and may get the same ones by chance
        rows = {row.name: _Ran(row, self._kept(row), row.name not in self.tables) for row in step.ran}
        self.tables.update((row.name, row.tables) for row in step.ran)
        return rows

    def _kept(self, row: SequenceOutcome) -> int:
        before = self.tables.get(row.name, [])
        return sum(
            was == now
            for table_before, table in zip(before, row.tables, strict=False)
            for was, now in zip(table_before, table, strict=False)
        )


class _Ran(NamedTuple):
    row: SequenceOutcome
    kept: int
    first_time: bool

    @property
    def blocks(self) -> int:
        return sum(len(table) for table in self.row.tables)

    @property
    def span(self) -> str:
        first, tokens = self.row.first, self.row.tokens
        return f"position {first}" if tokens == 1 else f"positions {first} to {first + tokens - 1}"


def _compare_steps(
    labels: tuple[str, str], views: tuple[_View, _View], steps: tuple[StepOutcome | None, StepOutcome | None]
) -> list[Difference]:
    for label, step, their in zip(labels, steps, reversed(labels), strict=True):
        if step is None:
            return [Difference("end", f"{label} has ended, {their} has not")]
    one, other = (step for step in steps if step is not None)
    return [
        *_compare_preemptions(labels, (one, other)),
        *_compare_rows(labels, (views[0].see(one), views[1].see(other))),
        *_compare_lists(labels, "moves", "moves a block by", _kinds(one), _kinds(other)),
        *_compare_lists(labels, "refusal", "gives up on", _rejected(one), _rejected(other)),
        *_compare_lists(labels, "finish", "finishes", one.finished, other.finished),
    ]


def _kinds(step: StepOutcome) -> list[str]:
    return [kind for kind, _, _ in step.moves]


def _rejected(step: StepOutcome) -> list[str]:
    return [who for who, _ in step.rejected]


def _compare_preemptions(labels: tuple[str, str], steps: tuple[StepOutcome, StepOutcome]) -> Iterator[Difference]:
    victims = [{verdict.request_id: verdict for verdict in step.preempted} for step in steps]
    for label, mine, theirs in zip(labels, victims, reversed(victims), strict=True):
        for rid, verdict in mine.items():
            if rid not in theirs:
                yield Difference("preemption", f"only {label} preempts {rid}{_why(verdict)}")
    both = [rid for rid in victims[0] if rid in victims[1]]
    for rid in both:
        modes = [one[rid].mode for one in victims]
        if modes[0] != modes[1]:
            yield Difference("preemption", f"{rid} is preempted {_apart(labels, [f'by {mode}' for mode in modes])}")
    orders = [[rid for rid in one if rid in both] for one in victims]
    if orders[0] != orders[1]:
        yield Difference("preemption", f"victims are chosen {_apart(labels, [', '.join(order) for order in orders])}")


def _why(verdict: PreemptionVerdict) -> str:
    counted = "" if verdict.counted is None else f", having counted {some(verdict.counted, 'block')} as needed"
    way = "" if verdict.asked_by in {None, verdict.request_id} else f" to make way for {verdict.asked_by}"
    needless = f"; {verdict.needed} were needed and {verdict.free} free"
    return f" by {verdict.mode}{way}{counted}{needless}"


def _compare_rows(labels: tuple[str, str], rows: tuple[dict[str, _Ran], dict[str, _Ran]]) -> Iterator[Difference]:
    for label, mine, theirs in zip(labels, rows, reversed(rows), strict=True):
        for name, ran in mine.items():
            if name not in theirs:
                begins = "begins" if ran.first_time else "runs"
                yield Difference("run", f"only {label} {begins} {name}, {ran.span} with {some(ran.blocks, 'block')}")
    both = [name for name in rows[0] if name in rows[1]]
    for name in both:
        pair = [one[name] for one in rows]
        if pair[0].span != pair[1].span:
            yield Difference("tokens", f"{name} computes {_apart(labels, [ran.span for ran in pair])}")
        elif pair[0].blocks != pair[1].blocks:
            yield Difference("blocks", f"{name} has {_apart(labels, [some(ran.blocks, 'block') for ran in pair])}")
        elif pair[0].kept != pair[1].kept:
            kept = [f"{ran.kept} of its blocks" for ran in pair]
            yield Difference("blocks", f"{name} keeps {_apart(labels, kept)} from its last step")
    for at, name in enumerate(both):
        for mate in both[at + 1 :]:
            shared = [len(_ids(one[name]) & _ids(one[mate])) for one in rows]
            if shared[0] != shared[1]:
                counts = [some(count, "block") for count in shared]
                yield Difference("blocks", f"{name} and {mate} share {_apart(labels, counts)}")


def _ids(ran: _Ran) -> set[BlockId]:
    return {block for table in ran.row.tables for block in table}


def _compare_lists(
    labels: tuple[str, str], kind: Kind, verb: str, one: Sequence[str], other: Sequence[str]
) -> Iterator[Difference]:
    for label, mine, theirs in ((labels[0], one, other), (labels[1], other, one)):
        more = [word for word in dict.fromkeys(mine) if mine.count(word) > theirs.count(word)]
        if more:
            yield Difference(kind, f"only {label} {verb} {', '.join(more)}")


def _compare_answers(labels: tuple[str, str], answers: Sequence[dict[str, object]]) -> Iterator[Difference]:
    """Answers to an operation that is no step. Reasons are the engine's own words; that there is one is compared."""
    for label, mine, theirs in zip(labels, answers, reversed(answers), strict=True):
        if "refused" in mine and "refused" not in theirs:
            yield Difference("refusal", f"only {label} refuses the request: {mine['refused']}")
    resets = [answer.get("reset") for answer in answers]
    if resets[0] != resets[1]:
        words = ["done" if reset else "refused" for reset in resets]
        yield Difference("answer", f"the reset of the prefix cache is {_apart(labels, words)}")


def _apart(labels: tuple[str, str], words: Sequence[str]) -> str:
    return f"{words[0]} on {labels[0]}, {words[1]} on {labels[1]}"


# ------------------------------------------------------------------------------------------------- explanation


def explain_divergence(one: Side, other: Side, divergence: Divergence | None) -> list[str]:
    """What is compared, where the two part, what each did there, and how each went on: a paragraph a string."""
    sides = one, other
    paragraphs = [f"{side.label} is {side.name}" for side in sides]
    fields = [
        f"{name} {_apart((one.label, other.label), [str(getattr(side.config, name)) for side in sides])}"
        for name in EngineConfig.__struct_fields__
        if getattr(one.config, name) != getattr(other.config, name)
    ]
    if fields:
        paragraphs.append(f"configured apart: {'; '.join(fields)}")
    if divergence is None:
        paragraphs.append(f"the same in all of {some(one.steps, 'step')}, up to the names of blocks")
    else:
        paragraphs.extend(_parting(one, other, divergence))
    paragraphs.extend(_whole(side) for side in sides)
    return paragraphs


def _parting(one: Side, other: Side, divergence: Divergence) -> Iterator[str]:
    lines = one.lines if divergence.operation < len(one.lines) else other.lines
    operation = lines[divergence.operation].operation
    alike = f"{some(divergence.steps_alike, 'step')} the same" if divergence.steps_alike else "nothing the same"
    stepping = isinstance(operation, Step | Drain) or divergence.steps == (None, None)
    where = "in" if stepping else "as what is left is served, after"
    yield f"{alike}; they part {where} operation {divergence.operation + 1}, {describe(operation)}:"
    yield from (f"  {difference.text}" for difference in divergence.differences)
    for side, step in zip((one, other), divergence.steps, strict=True):
        if step is not None:
            yield f"step {step.step} on {side.label}: {_told(step)}"


def _told(step: StepOutcome) -> str:
    rows = [
        f"{row.name} from {row.first} ({some(row.tokens, 'token')}, {some(sum(map(len, row.tables)), 'block')})"
        for row in step.ran
    ]
    parts = [f"runs {', '.join(rows)}" if rows else "runs nothing"]
    if step.preempted:
        parts.append(f"preempts {', '.join(verdict.request_id for verdict in step.preempted)}")
    if step.moves:
        parts.append(f"moves {', '.join(f'{kind} {src} to {dst}' for kind, src, dst in step.moves)}")
    if step.finished:
        parts.append(f"finishes {', '.join(step.finished)}")
    return f"{'; '.join(parts)}; {some(step.free, 'block')} free before it"


def _whole(side: Side) -> str:
    figures = [some(side.steps, "step")]
    if side.preemptions is not None and side.prefills is not None:
        figures += [some(side.preemptions, "preemption"), some(side.prefills, "prefill")]
    broken = [f"{finding.requirement} broken in step {finding.step}: {finding.message}" for finding in side.findings]
    return f"{side.label} in all: {', '.join(figures)}" + "".join(f"; {one}" for one in broken)


# -------------------------------------------------------------------------------------------------- shortening


def shortened(
    operations: list[Operation],
    divergence: Divergence,
    compare: Callable[[list[Operation]], Divergence | None],
    executions_max: int,
) -> list[Operation]:
    """The operations without those that the divergence does not need, as far as ``executions_max`` comparisons tell.

    What counts as the same divergence is its kind. Runs of operations are left out, long ones first.
    """
    kept = operations[: divergence.operation + 1]
    spent, chunk = 0, max(1, len(kept) // 2)
    while chunk:
        at = 0
        while at < len(kept) and spent < executions_max:
            candidate = kept[:at] + kept[at + chunk :]
            found = compare(candidate) if candidate else None
            spent += 1
            if found is not None and found.kind == divergence.kind:
                kept = candidate[: found.operation + 1]
            else:
                at += chunk
        chunk //= 2
    return kept
