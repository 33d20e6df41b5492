"""What a scenario is made of: cases that choose a configuration and a workload, within what the user pinned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import msgspec

from conformance.operations import Add, Operation
from conformance.protocol import Capabilities, EngineConfig, Feature
from conformance.scenarios.bench import Bench, Run, Script, Unsupported

Build: TypeAlias = "Callable[[Setting], Sequence[Operation] | Script]"
Compare: TypeAlias = Callable[[Bench, Run], None]
"""Looks at the run of a case, may make more, and reports (`Run.report`) what only a scenario can see."""

PROMPT_TOKENS_MAX = 10
OUTPUT_TOKENS_MAX = 30
SEQUENCE_BLOCK_TOKENS = 64
"""Size of a block that holds a whole sequence: a multiple of every block size that engines insist on."""
PAGES_PER_SEQUENCE = 10
HOST_BLOCKS = 256
"""A host pool that never fills."""


class Inapplicable(Exception):  # noqa: N818 - an answer, not an error
    """The case cannot be built as things are pinned; the message is the reason it is skipped."""


class Setting:
    """What a case is built on: the base configuration, what the user pinned, what the engine declares.

    A case calls `choose` for what it likes and `need` for what it cannot do without, then builds its workload
    from ``config``, so that pinned fields give it a workload that fits them.
    """

    def __init__(self, base: EngineConfig, pinned: Collection[str], capabilities: Capabilities) -> None:
        self.base = base
        self.pinned = frozenset(pinned)
        self.capabilities = capabilities
        self._changes: dict[str, Any] = {}

    def choose(self, **fields: Any) -> None:
        """Set fields, except those that are pinned."""
        self._changes.update({name: value for name, value in fields.items() if name not in self.pinned})

    def need(self, **fields: Any) -> None:
        """Set fields. Raises `Inapplicable` when one is pinned to another value."""
        for name, value in fields.items():
            if name in self.pinned and getattr(self.base, name) != value:
                raise Inapplicable(f"{name} is pinned to {getattr(self.base, name)}, this case needs {value}")
        self.choose(**fields)

    def vary(self, *names: str) -> None:
        """The case compares runs that differ in these fields. Raises `Inapplicable` when one is pinned."""
        for name in names:
            if name in self.pinned:
                raise Inapplicable(f"{name} is pinned, this case compares runs that differ in it")

    def require(self, condition: bool, reason: str) -> None:  # noqa: FBT001 - reads as a sentence where it is called
        """Raises `Inapplicable` with ``reason`` unless ``condition`` holds."""
        if not condition:
            raise Inapplicable(reason)

    def declares(self, *features: Feature) -> None:
        """Raises `Unsupported` unless the engine declares all ``features``."""
        missing = set(features) - self.capabilities.features
        if missing:
            raise Unsupported(missing)

    @property
    def config(self) -> EngineConfig:
        """The configuration so far. Unless a case says otherwise, the token budget holds a full batch."""
        config = msgspec.structs.replace(self.base, **self._changes)
        if not {"max_num_batched_tokens"} & (self.pinned | self._changes.keys()):
            config = msgspec.structs.replace(config, max_num_batched_tokens=config.max_num_seqs * config.max_model_len)
        return config

    # -- shapes ------------------------------------------------------------------------------------------

    @property
    def unit(self) -> int:
        """Tokens of an ordinary small block on this engine."""
        return max(self.base.block_size, self.capabilities.block_size_min)

    def paged(self) -> None:
        """Several small blocks to a sequence: the ordinary case."""
        self.choose(block_size=self.unit, max_model_len=PAGES_PER_SEQUENCE * self.unit)

    def one_token_blocks(self) -> None:
        """The smallest block there is."""
        self.need(block_size=1)
        self.choose(max_model_len=PROMPT_TOKENS_MAX + OUTPUT_TOKENS_MAX)

    def sequence_blocks(self) -> None:
        """One block holds a whole sequence, as on devices without paging."""
        size, length = self.base.block_size, self.base.max_model_len
        if "max_model_len" not in self.pinned:
            length = size if "block_size" in self.pinned else SEQUENCE_BLOCK_TOKENS
        if "block_size" not in self.pinned:
            size = length
        self.require(size >= length, f"a block of {size} does not hold a sequence of max_model_len = {length}")
        self.choose(block_size=size, max_model_len=length)

    @property
    def span(self) -> int:
        """Tokens of a long sequence: max_model_len, unless that is so long that fewer tokens do as well."""
        config = self.config
        blocks = 1 if config.block_size >= config.max_model_len else PAGES_PER_SEQUENCE * config.block_size
        return min(config.max_model_len, max(SEQUENCE_BLOCK_TOKENS, blocks))

    # -- pools -------------------------------------------------------------------------------------------

    def pool(self, blocks: int) -> None:
        """Choose a pool of ``blocks`` that can serve requests: reserved ones and the watermark come on top."""
        config = self.config
        self.require(config.watermark < 1, f"watermark = {config.watermark} withholds every pool")
        total = blocks + self.reserve
        while total - self.reserve - int(config.watermark * total) < blocks:
            total += 1
        self.choose(num_blocks=total)

    @property
    def reserve(self) -> int:
        """Blocks that never serve a request, or that the engine insists on besides, as it declares."""
        window = self.config.sliding_window is not None and self.capabilities.null_block is None
        return self.capabilities.reserved_blocks + window + self.capabilities.blocks_beyond_lines

    @property
    def usable(self) -> int:
        """Blocks that can be handed out at admission."""
        config = self.config
        return config.num_blocks - self.reserve - int(config.watermark * config.num_blocks)

    def blocks_for(self, tokens: int) -> int:
        """ceil((tokens + lookahead) / block_size)."""
        return -(-(tokens + self.config.num_lookahead_slots) // self.config.block_size)

    def full_blocks(self, add: Add) -> int:
        """Blocks of all sequences of a request that has run to its end, sharing nothing."""
        return self.blocks_for(min(add.prompt_len + add.max_tokens, self.config.max_model_len)) * add.n

    def host_pool(self) -> None:
        """Choose an ample host pool, if the engine has one: some swap wide requests whatever the mode is."""
        if "swap" in self.capabilities.features:
            self.choose(num_swap_blocks=HOST_BLOCKS)

    # -- requests ----------------------------------------------------------------------------------------

    def typical(self, *, outputs: int = OUTPUT_TOKENS_MAX, **fields: Any) -> Add:
        """A request of a short prompt and up to ``outputs`` tokens that fits the model's length."""
        length = self.config.max_model_len
        prompt = max(1, min(PROMPT_TOKENS_MAX, length // 4))
        return self.request(prompt, min(outputs, length - prompt), **fields)

    def request(self, prompt: int, outputs: int, **fields: Any) -> Add:
        """A request of exactly these lengths. Raises `Inapplicable` when they exceed the model's length."""
        if fields.get("n", 1) > 1:
            self.host_pool()
        length = self.config.max_model_len
        self.require(
            prompt >= 1 and outputs >= 1 and prompt + outputs <= length,
            f"max_model_len = {length} is too short for a prompt of {prompt} and {max(1, outputs)} outputs",
        )
        return Add(prompt_len=prompt, max_tokens=outputs, **fields)


class Case:
    """One variant of a scenario under a stable name.

    ``sees``: behaviours (`Ledger.behaviours`) without which the run says nothing, so that it is skipped.
    ``judges`` and ``compare``: instead of the scenario's.
    """

    __slots__ = ("build", "compare", "judges", "name", "sees")

    def __init__(
        self,
        name: str,
        build: Build,
        *,
        sees: Sequence[str] = (),
        judges: Sequence[str] = (),
        compare: Compare | None = None,
    ) -> None:
        self.name = name
        self.build = build
        self.sees = tuple(sees)
        self.judges = tuple(judges)
        self.compare = compare


class Scenario:
    """A deterministic workload family that can break the requirements it judges."""

    __slots__ = ("cases", "compare", "judges", "name", "title")

    def __init__(
        self,
        name: str,
        title: str,
        judges: Sequence[str],
        cases: Sequence[Case],
        *,
        compare: Compare | None = None,
    ) -> None:
        self.name = name
        self.title = title
        self.cases = tuple(cases)
        self.compare = compare
        self.judges = tuple(judges)
        names = [case.name for case in cases]
        assert len(set(names)) == len(names), f"case names of {name} are unique"

    def judged_by(self, case: Case) -> tuple[str, ...]:
        """The requirements that ``case`` judges."""
        return case.judges or self.judges

    def compare_of(self, case: Case) -> Compare | None:
        """The comparison that follows the run of ``case``."""
        return case.compare or self.compare

    def __repr__(self) -> str:
        return f"<scenario {self.name}>"
