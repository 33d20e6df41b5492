"""The shadow KV reports a plan exactly when tensors that execute the same plan come out wrong.

Neither knows of the other. When they agree on sound plans, the reference engine is right; when they also agree on
spoilt ones, the shadow KV is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeAlias

import pytest
from msgspec.structs import replace

from conformance.adapters.reference import ReferenceAdapter
from conformance.operations import Abort, Add, Operation, ResetPrefixCache
from conformance.protocol import (
    BlockMove,
    CommitResult,
    EngineConfig,
    Request,
    Sampled,
    SequenceKey,
    StepPlan,
)
from conformance.session import Session
from reference_engine.block_manager import Move
from reference_engine.engine import Engine
from reference_engine.runners.serving import serve
from workloads import arrivals_of, core_config, random_operations

torch: Any = pytest.importorskip("torch", reason="the paged runner needs the extra `torch`")
for library in ("transformers.models.llama.modeling_llama", "transformers.models.mistral.modeling_mistral"):
    pytest.importorskip(library, reason="the paged runner needs the extra `torch`")

from reference_engine.runners.paged import (  # noqa: E402 - only where torch is
    PagedRunner,
    PoisonedReadError,
    Row,
    tiny_model,
)

torch.set_num_threads(1)

WINDOW = 7
CONFIG = EngineConfig(
    num_blocks=10,
    block_size=4,
    max_num_seqs=5,
    max_num_batched_tokens=11,
    max_model_len=28,
    enable_prefix_caching=True,
    enable_chunked_prefill=True,
    preemption_mode="swap",
    num_swap_blocks=8,
)
WRONG_CONTENT = {"KV-1", "KV-2"}
TOLERANCE = 1e-5
"""Hidden states are of the order of 1 and, as the norms round to float32, right to about 1e-7."""


@pytest.fixture(scope="module", params=[None, WINDOW], ids=["full", "window"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(sliding_window=request.param)


def config_for(model: Any) -> EngineConfig:
    return replace(CONFIG, sliding_window=getattr(model.config, "sliding_window", None))


def operations_for(seed: int, config: EngineConfig) -> list[Operation]:
    """Requests in bursts, now and then an abort, and a reset of the prefix cache at the end of it."""
    random = Random(seed)
    operations: list[Operation] = []
    for operation in random_operations(random, config):
        operations.append(operation)
        if random.random() < 0.1:
            operations.append(Abort(random.randrange(4)))
    return [*operations, ResetPrefixCache()]


# ----------------------------------------------------------------------------------------------------- faults

Tables: TypeAlias = list[list[int]]
Spoil: TypeAlias = Callable[[list[Move], Tables], bool]
"""Spoils a plan and says so, or finds nothing to spoil in it."""


def _last_blocks_exchanged(_moves: list[Move], tables: Tables) -> bool:
    for table in tables:
        if len(table) > 1 and table[-1] != table[-2]:
            table[-1], table[-2] = table[-2], table[-1]
            return True
    return False


def _full_blocks_exchanged(_moves: list[Move], tables: Tables) -> bool:
    for table in tables:
        if len(table) > 3 and table[-2] != table[-3]:
            table[-2], table[-3] = table[-3], table[-2]
            return True
    return False


def _block_of_another(_moves: list[Move], tables: Tables) -> bool:
    for table in tables[1:]:
        other = tables[0]
        if len(table) > 1 and len(other) > 1 and table[-2] != other[-2]:
            table[-2] = other[-2]
            return True
    return False


def _writes_into_an_earlier_block(_moves: list[Move], tables: Tables) -> bool:
    for table in tables:
        if len(table) > 1 and table[-1] != table[-2]:
            table[-1] = table[-2]
            return True
    return False


def _no_copy_on_write(moves: list[Move], tables: Tables) -> bool:
    for move in moves:
        if move.kind == "copy":
            table = next(table for table in tables if move.dst in table)
            table[table.index(move.dst)] = move.src
            moves.remove(move)
            return True
    return False


def _leaves_out(kind: str) -> Spoil:
    def leave_out(moves: list[Move], _tables: Tables) -> bool:
        for move in moves:
            if move.kind == kind:
                moves.remove(move)
                return True
        return False

    return leave_out


FAULTS: dict[str, tuple[Spoil, str]] = {
    "last two blocks exchanged": (_last_blocks_exchanged, "KV-1"),
    "a block of another sequence": (_block_of_another, "KV-1"),
    "a block in two places": (_writes_into_an_earlier_block, "KV-1"),
    "no copy on write": (_no_copy_on_write, "ACC-3"),
    "a copy left out": (_leaves_out("copy"), "KV-1"),
    "a swap-in left out": (_leaves_out("swap_in"), "KV-1"),
    "a swap-out left out": (_leaves_out("swap_out"), "KV-4"),
}
"""What spoils a plan, and a requirement that the session then finds broken."""


class Fault:
    """Spoils one plan: the first, from step ``since`` on, that has what the fault needs."""

    def __init__(self, spoil: Spoil, since: int = 0) -> None:
        self._spoil = spoil
        self._since = since
        self.done = False

    def __call__(self, step: int, moves: list[Move], tables: Tables) -> None:
        if not self.done and step >= self._since:
            self.done = self._spoil(moves, tables)


class FaultyRunner(PagedRunner):
    """Executes one plan otherwise than the engine said."""

    def __init__(self, model: Any, engine: Engine, fault: Fault) -> None:
        super().__init__(model, engine.config, poison=0.0)
        self._fault = fault
        self._step = 0

    def forward(self, moves: list[Move], rows: list[Row]) -> Any:
        moves, rows = list(moves), [row._replace(table=list(row.table)) for row in rows]
        self._fault(self._step, moves, [row.table for row in rows])
        self._step += 1
        return super().forward(moves, rows)


class Witness(ReferenceAdapter):
    """The reference engine in a session, with every plan also executed on tensors, with the session's tokens.

    A ``fault`` spoils a plan for the session and for the tensors alike.
    """

    def __init__(self, model: Any, config: EngineConfig, fault: Fault | None = None) -> None:
        super().__init__(core_config(config))
        self._model = model
        self._runner = PagedRunner(model, self.config)
        self._fault = fault
        self._tokens: dict[SequenceKey, list[int]] = {}
        self._prompts: dict[str, list[int]] = {}
        self._states: list[tuple[int, Row, Any]] = []
        self._poisoned: dict[int, str] = {}

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._prompts[request.request_id] = request.prompt

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        moves = [Move(move.kind, move.src, move.dst) for move in plan.moves if move.kind != "zero"]
        if self._fault is not None:
            self._fault(plan.step, moves, [sequence.block_tables[0] for sequence in plan.sequences])
            plan.moves = [BlockMove(*move) for move in moves]
        rows = []
        for sequence in plan.sequences:
            key, first = (sequence.request_id, sequence.seq), sequence.first
            tokens = self._tokens.setdefault(key, list(self._prompts[sequence.request_id]))
            rows.append(Row(key, first, tokens[first : first + sequence.num_tokens], sequence.block_tables[0]))
        try:
            states = self._runner.forward(moves, rows)
        except PoisonedReadError as error:
            self._poisoned[plan.step] = str(error)
            return plan
        parts = states.split([len(row.tokens) for row in rows]) if rows else ()
        self._states += [(plan.step, row, part) for row, part in zip(rows, parts, strict=True)]
        return plan

    def commit(self, step: int, sampled: Mapping[SequenceKey, Sampled]) -> CommitResult:
        for key, sample in sampled.items():
            self._tokens.setdefault(key, list(self._prompts[key[0]])).extend(sample.tokens)
        return super().commit(step, sampled)

    def damage(self) -> dict[int, str]:
        """By step, what was read unwritten, or came out otherwise than from the model without cache or engine."""
        with torch.no_grad():
            dense = {
                key: self._model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
                for key, tokens in self._tokens.items()
            }
        found = dict(self._poisoned)
        for step, row, states in self._states:
            if not torch.allclose(states, dense[row.key][row.first : row.end], rtol=0, atol=TOLERANCE):
                found.setdefault(step, f"{row} gives other states than the model alone")
        return found


# ------------------------------------------------------------------------------------------------------ tests


def test_a_session_without_violation_is_one_whose_tensors_are_right(model: Any) -> None:
    config = config_for(model)
    behaviours: Counter[str] = Counter()
    for seed in range(5):
        witness = Witness(model, config)
        session = Session(witness, config)
        assert session.run(operations_for(seed, config)) == []
        assert witness.damage() == {}
        behaviours.update(session.ledger.behaviours)
    wanted = {"prefix hit", "prefill in chunks", "preempted", "swapped in", "recomputed", "aborted while running"}
    assert wanted <= set(behaviours)


@pytest.mark.parametrize("kind", FAULTS)
def test_the_session_reports_wrong_content_in_the_step_in_which_tensors_come_out_wrong(model: Any, kind: str) -> None:
    config = config_for(model)
    agreed = 0
    for seed in range(5):
        fault = Fault(FAULTS[kind][0], since=5 * seed)
        witness = Witness(model, config, fault)
        session = Session(witness, config)
        session.run(operations_for(seed, config))
        damage = witness.damage()
        reported = {found.step for found in session.violations if found.requirement in WRONG_CONTENT}
        # The session ends with the step in which it finds wrong content; the harm may be done in an earlier one.
        assert reported == set(sorted(damage)[:1]), damage
        assert fault.done or not reported
        agreed += bool(reported)
    assert agreed > 1


@pytest.mark.parametrize("kind", FAULTS)
def test_a_spoilt_plan_is_reported_by_the_session_and_gives_other_tokens(kind: str) -> None:
    model = tiny_model()
    spoil, requirement = FAULTS[kind]
    both = 0
    for seed in range(3):
        operations = random_operations(Random(seed), CONFIG)
        witness = Witness(model, CONFIG, Fault(spoil, since=8))
        session = Session(witness, CONFIG)
        session.run(operations)
        reported = any(found.requirement == requirement for found in session.violations)
        spoilt, sound = (Engine(witness.config) for _ in range(2))
        outputs = serve(spoilt, FaultyRunner(model, spoilt, Fault(spoil, since=8)), arrivals_of(operations))
        right = serve(sound, PagedRunner(model, sound.config), arrivals_of(operations))
        both += reported and outputs != right
    assert both > 1


def test_full_attention_does_not_see_that_two_full_blocks_are_exchanged_but_the_session_does(model: Any) -> None:
    """Softmax attention sums over a set, and keys carry their rotation: only a mask tells positions apart."""
    config = config_for(model)
    witness = Witness(model, config, Fault(_full_blocks_exchanged))
    session = Session(witness, config)
    session.run([Add(prompt_len=11, max_tokens=6)])
    assert WRONG_CONTENT & {found.requirement for found in session.violations}
    assert bool(witness.damage()) == (config.sliding_window is not None)
