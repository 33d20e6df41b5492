"""Prefix caching: what is worth keeping is hit, what is not there is not, and nobody pays for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from conformance.operations import Abort, Add, Drain, Operation, ResetPrefixCache, Step
from conformance.records import RequestState
from conformance.scenarios.base import Build, Case, Scenario, Setting
from conformance.scenarios.bench import Bench, Run, Script
from conformance.session import Session


def cached(setting: Setting) -> None:
    """Prefix caching on, in blocks that a prompt can fill."""
    setting.need(enable_prefix_caching=True)
    setting.paged()
    size, length = setting.config.block_size, setting.config.max_model_len
    setting.require(length >= 6 * size, f"max_model_len = {length} must be at least six blocks of {size}")


def _prompt(setting: Setting, blocks: int, extra: int, outputs: int = 2, **fields: int) -> Add:
    """A prompt of ``blocks`` blocks and ``extra`` tokens, all of it shared with its family."""
    length = blocks * setting.config.block_size + extra
    return setting.request(length, outputs, shared_len=length, **fields)


# ----------------------------------------------------------------------------------------------------- repeats


def repeated(extra: int, *, longer_by: int = 0, alive: bool = False, between: int = 0) -> Build:
    """A prompt of two blocks and ``extra`` tokens comes again, with nothing evicted in between."""

    def build(setting: Setting) -> Sequence[Operation]:
        cached(setting)
        setting.need(pipeline_depth=1)  # what is in flight is not cached yet
        setting.choose(max_num_seqs=4)
        first = _prompt(setting, 2, extra, outputs=12 if alive else 2)
        again = msgspec.structs.replace(
            first, prompt_len=first.prompt_len + longer_by, shared_len=first.shared_len + longer_by
        )
        others = [_prompt(setting, 2, extra, family=family + 1) for family in range(between)]
        blocks = sum(setting.full_blocks(add) for add in (first, *others, again, again))
        setting.pool(blocks)
        setting.require(blocks <= setting.usable, f"{setting.usable} usable blocks cannot keep the {blocks} in use")
        operations: list[Operation] = [first, Step(3) if alive else Drain()]
        for other in others:
            operations += [other, Drain()]
        return [*operations, again, Drain(), again, Drain()]

    return build


def repeats_hit(bench: Bench, run: Run) -> None:
    """CCH-1: of every repeat all full blocks are hit, but the one whose last token must be computed."""
    size = run.config.block_size
    seen: dict[tuple[int, ...], str] = {}
    for rid, request in run.requests.items():
        prompt = request.spec.prompt
        whole = (len(prompt) - 1) // size
        expected = next((blocks for blocks in range(whole, 0, -1) if tuple(prompt[: blocks * size]) in seen), 0)
        hit = run.watch.first_positions.get(rid, 0)
        if hit < expected * size:
            run.report(
                "CCH-1",
                f"{rid} repeats {expected} full blocks of {seen[tuple(prompt[: expected * size])]} "
                f"and hits {hit} of its {len(prompt)} positions",
                expected=f"at least {expected * size} positions from the cache",
                got=str(hit),
            )
        for blocks in range(1, len(prompt) // size + 1):
            seen.setdefault(tuple(prompt[: blocks * size]), rid)


REPEATS = Scenario(
    "repeats",
    "A prompt comes again with nothing evicted in between",
    ("CCH-1",),
    [
        Case("whole-blocks", repeated(0)),
        Case("one-token-more", repeated(1)),
        Case("one-token-less", repeated(-1)),
        Case("longer-each-time", repeated(0, longer_by=3)),
        Case("while-the-first-runs", repeated(1, alive=True)),
        Case("after-others", repeated(1, between=3)),
    ],
    compare=repeats_hit,
)

# --------------------------------------------------------------------------------- cached blocks are available


def pool_of_cached_blocks(families: int, *, share: int = 0, seqs: int = 4) -> Build:
    """Finished requests leave a pool full of cached blocks; then requests come that need all of it."""

    def build(setting: Setting) -> Sequence[Operation]:
        cached(setting)
        setting.choose(max_num_seqs=seqs)
        size, length = setting.config.block_size, setting.config.max_model_len
        setting.pool(setting.blocks_for(length))
        setting.require(
            setting.usable * size <= 4 * length, f"{setting.usable} blocks are more than a few prompts fill"
        )
        operations: list[Operation] = []
        for family in range(families * setting.usable // setting.blocks_for(length)):
            operations += [_prompt(setting, 3, 1, family=family), Drain()]
        whole = setting.request(length - 2, 2, shared_len=share * size)
        half = setting.request(max(1, length // 2 - 2), 2, shared_len=share * size)
        return [*operations, whole, Drain(), half, half, Drain(), half, Step(), half, Drain()]

    return build


def nobody_waits_for_the_cache(bench: Bench, run: Run) -> None:
    """CCH-2: nobody waits longer, or is refused, than with caching off."""
    off = msgspec.structs.replace(run.config, enable_prefix_caching=False)
    without = bench.run(off, run.operations).completed()
    for rid, request in run.requests.items():
        other = without.requests[rid]
        if other.state is not RequestState.FINISHED:
            continue
        if request.admitted_step is None or other.admitted_step is None:
            run.report(
                "CCH-2",
                f"{rid} is {request.state.value} with prefix caching and finishes without it",
                expected="served, as without caching",
                got=request.state.value,
            )
            return
        waited = request.admitted_step - request.arrived_step
        allowed = other.admitted_step - other.arrived_step
        if waited > allowed:
            run.report(
                "CCH-2",
                f"{rid} waits {waited} steps with prefix caching, {allowed} without",
                expected=f"at most {allowed} steps: cached blocks can be evicted",
                got=f"{waited} steps",
            )


AVAILABLE = Scenario(
    "cached-blocks-are-available",
    "A pool full of cached blocks, and requests that need them",
    ("CCH-2", "PRG-2"),
    [
        Case("full-of-other-prefixes", pool_of_cached_blocks(4)),
        Case("full-and-partly-hit", pool_of_cached_blocks(4, share=2)),
        Case("partly-full-and-hit", pool_of_cached_blocks(2, share=3)),
        Case("one-seq", pool_of_cached_blocks(4, share=1, seqs=1)),
    ],
    compare=nobody_waits_for_the_cache,
)

# ----------------------------------------------------------------------------------------------------- resets


def reset_when_idle(setting: Setting) -> Sequence[Operation]:
    """Cached, hit, reset, and asked again."""
    cached(setting)
    setting.choose(max_num_seqs=4)
    add = _prompt(setting, 3, 1)
    setting.pool(4 * setting.full_blocks(add))
    return [add, Drain(), add, Drain(), ResetPrefixCache(), add, Drain(), add, Drain()]


def reset_and_left_alone(setting: Setting) -> Sequence[Operation]:
    """After the reset nobody comes: every block must be free."""
    cached(setting)
    setting.choose(max_num_seqs=4)
    add = _prompt(setting, 3, 1)
    setting.pool(4 * setting.full_blocks(add))
    return [add, add, Drain(), ResetPrefixCache(), Step()]


def reset_when_live(*, waiting: bool) -> Build:
    """A reset while requests run, and others wait for places."""

    def build(setting: Setting) -> Sequence[Operation]:
        cached(setting)
        setting.choose(max_num_seqs=2)
        add = _prompt(setting, 3, 1, outputs=8)
        setting.pool(2 * setting.full_blocks(add))
        queue = [add, add] if waiting else []
        return [
            add, Drain(), add, add, *queue, Step(3), ResetPrefixCache(), Step(2), ResetPrefixCache(), add, Drain(),
            ResetPrefixCache(), add, Drain(),
        ]  # fmt: skip

    return build


def reset_after_aborts(setting: Setting) -> Sequence[Operation]:
    """Nothing is live because everything was aborted."""
    cached(setting)
    setting.declares("abort")
    setting.choose(max_num_seqs=4)
    add = _prompt(setting, 3, 1, outputs=8)
    setting.pool(4 * setting.full_blocks(add))
    return [
        add, Drain(), add, add, Step(2), Abort(), Abort(), Step(2), ResetPrefixCache(), add, Drain(), add, Drain(),
    ]  # fmt: skip


def all_finished(bench: Bench, run: Run) -> None:
    """CCH-3: a reset harms no request."""
    for rid, request in run.requests.items():
        # Whether a refusal was right is for PRG-2 to say.
        if request.state not in {RequestState.FINISHED, RequestState.ABORTED, RequestState.REFUSED}:
            run.report(
                "CCH-3",
                f"{rid} is {request.state.value} at the end, after a reset of the prefix cache",
                expected="finished: a reset harms no request",
                got=request.state.value,
            )


RESETS = Scenario(
    "resets",
    "The prefix cache is reset, idle and in use",
    ("CCH-3", "ACC-6"),
    [
        Case("idle", reset_when_idle, sees=["prefix hit", "prefix cache reset"]),
        Case("idle-and-left-alone", reset_and_left_alone, sees=["prefix cache reset"]),
        Case("running", reset_when_live(waiting=False), sees=["prefix hit"]),
        Case("running-and-waiting", reset_when_live(waiting=True), sees=["prefix hit"]),
        Case("after-aborts", reset_after_aborts, sees=["prefix hit", "prefix cache reset"]),
    ],
    compare=all_finished,
)

# ------------------------------------------------------------------------------------------------ wrong hits


def recycled(families: int, *, seqs: int, rounds: int = 3, chunked: bool = False) -> Build:
    """More prefixes than the pool can keep come round again and again, so that blocks change what they hold."""

    def build(setting: Setting) -> Sequence[Operation]:
        cached(setting)
        setting.need(enable_chunked_prefill=chunked)
        setting.choose(max_num_seqs=seqs)
        if chunked:
            setting.choose(max_num_batched_tokens=max(8, setting.config.max_num_seqs))
        setting.pool(setting.blocks_for(setting.config.max_model_len) + 2)
        operations: list[Operation] = []
        for turn in range(rounds):
            for family in range(families):
                blocks, extra = 2 + (family + turn) % 2, (family + turn) % 3
                operations.append(_prompt(setting, blocks, extra, outputs=3, family=family % (families - turn)))
                operations.append(Step(1 + (family + turn) % 3))
        return [*operations, Drain()]

    return build


def hits_are_still_there(setting: Setting) -> Script:
    """A prefix is hit by a waiting request just as its blocks are about to be evicted for a running one."""
    cached(setting)
    setting.choose(max_num_seqs=3)
    setting.pool(setting.blocks_for(setting.config.max_model_len))
    hit = _prompt(setting, 3, 1, outputs=4)
    grows = setting.request(setting.config.block_size, 3 * setting.config.block_size, family=1)

    def script(session: Session) -> Iterator[Operation]:
        yield from (hit, Drain(), grows, Step())
        for _ in range(4):
            yield from (hit, Step(3), grows, Step(2))
        yield Drain()

    return script


WRONG_HITS = Scenario(
    "recycled-prefixes",
    "More prefixes than the pool can keep come round again",
    ("KV-2", "KV-1", "ACC-1", "ACC-4"),
    [
        Case("one-at-a-time", recycled(6, seqs=1), sees=["prefix hit"]),
        Case("together", recycled(6, seqs=4), sees=["prefix hit"]),
        Case("together-chunked", recycled(6, seqs=4, chunked=True), sees=["prefix hit"]),
        Case("two-families", recycled(4, seqs=3, rounds=4), sees=["prefix hit"]),
        Case("hit-next-to-eviction", hits_are_still_there, sees=["prefix hit"]),
    ],
)

# ------------------------------------------------------------------------------------------------ identities

Identify = Callable[[Setting, int], Add]


def _salted(setting: Setting, number: int) -> Add:
    return _prompt(setting, 3, 1, outputs=4, salt=number)


def _adapted(setting: Setting, number: int) -> Add:
    return _prompt(setting, 3, 1, outputs=4, adapter=number)


def _both(setting: Setting, number: int) -> Add:
    return _prompt(setting, 3, 1, outputs=4, salt=number % 2, adapter=number // 2)


def _pictured(setting: Setting, number: int) -> Add:
    setting.choose(encoder_cache_size=64, enable_chunked_prefill=True)
    add = _prompt(setting, 3, 1, outputs=4)
    return msgspec.structs.replace(add, encoder_sizes=(2 + number,))


def same_tokens(identify: Identify, *, together: bool) -> Build:
    """The same prompt under several identities, and each of them again."""

    def build(setting: Setting) -> Sequence[Operation]:
        cached(setting)
        setting.choose(max_num_seqs=6)
        adds = [identify(setting, number) for number in range(3)]
        setting.pool(6 * max(setting.full_blocks(add) for add in adds))
        operations: list[Operation] = []
        for add in (*adds, *adds):
            operations += [add, Step()] if together else [add, Drain()]
        return [*operations, Drain()]

    return build


def only_its_own(bench: Bench, run: Run) -> None:
    """ID-1: the first request of an identity hits nothing, whatever others have cached."""
    seen: set[object] = set()
    for rid, request in run.requests.items():
        spec = request.spec
        identity = (spec.cache_salt, spec.adapter, spec.encoder_items)
        hit = run.watch.first_positions.get(rid, 0)
        if identity not in seen and hit and seen:
            run.report(
                "ID-1",
                f"{rid} is the first of its identity (salt {spec.cache_salt!r}, adapter {spec.adapter!r}) and hits",
                expected="no hit on what other identities cached",
                got=f"{hit} positions from the cache",
            )
        seen.add(identity)


IDENTITIES = Scenario(
    "identities",
    "The same tokens under other salts, adapters and pictures",
    ("ID-1",),
    [
        Case(f"{name}-{when}", same_tokens(identify, together=when == "together"), sees=["prefix hit"])
        for name, identify in (
            ("salts", _salted),
            ("adapters", _adapted),
            ("salts-and-adapters", _both),
            ("pictures", _pictured),
        )
        for when in ("one-by-one", "together")
    ],
    compare=only_its_own,
)

SCENARIOS = (REPEATS, AVAILABLE, RESETS, WRONG_HITS, IDENTITIES)
