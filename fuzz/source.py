"""The operations of one run: requests at block and model-length boundaries, in bursts, related to those before them."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from conformance.operations import Abort, AbortEnded, Add, Drain, Operation, ResetPrefixCache, Step
from fuzz.swarm import Swarm, longest


class OperationSource:
    """Draws operations of one run. The state it keeps does not depend on the engine, so draws never do."""

    __slots__ = ("_chase", "_kinds", "_left", "_lengths", "_pending", "_rng", "_totals", "_whole", "swarm")

    def __init__(self, rng: Random, swarm: Swarm) -> None:
        self._rng = rng
        self.swarm = swarm
        self._kinds = [kind for kind, _ in swarm.weights]
        totals, total = [], 0
        for _, weight in swarm.weights:
            total += weight
            totals.append(total)
        self._totals = totals
        self._pending = min(swarm.requests, rng.randint(0, swarm.config.max_num_seqs + 1))
        self._left = swarm.requests
        self._chase: Literal["", "step", "add", "steps"] = ""
        """What comes next of computing a prompt, extending it at once, and running both."""
        self._lengths: list[int] = []
        """Tokens that the requests so far may come to."""
        self._whole: Add | None = None
        """The last request whose prompt is shared as a whole."""

    @property
    def exhausted(self) -> bool:
        """No request is left to add."""
        return not self._left

    def draw(self) -> Operation:
        """The next operation."""
        rng = self._rng
        chase = self._go_on_with_the_chase()
        if chase is not None:
            return chase
        self._pending = min(self._pending, self._left)
        if self._pending:
            self._pending -= 1
            return self.draw_add()
        kind = rng.choices(self._kinds, cum_weights=self._totals)[0]
        operation: Operation
        match kind:
            case "step":
                operation = Step()
            case "step_many":
                operation = Step(count=rng.randint(2, 8))
            case "drain":
                operation = Drain()
            case "abort":
                operation = Abort(index=rng.randint(0, 7))
            case "abort_ended":
                operation = AbortEnded(index=rng.randint(0, 7))
            case "reset":
                operation = ResetPrefixCache()
            case _:
                if not self._left:
                    return Step()
                if kind == "burst":
                    self._pending = min(rng.randint(1, self.swarm.burst_max), self._left - 1)
                operation = self.draw_add()
        return operation

    def _go_on_with_the_chase(self) -> Operation | None:
        match self._chase:
            case "step":
                self._chase = "add"
                return Step()
            case "add" if self._left:
                return self.draw_add()
            case "steps":
                self._chase = ""
                return Step(count=2)
            case _:
                return None

    def draw_add(self) -> Add:
        """A request: often at a block or model-length boundary, often sharing a prefix."""
        rng, swarm = self._rng, self.swarm
        self._left -= 1
        config = swarm.config
        size = config.block_size
        n = rng.randint(2, max(2, min(4, config.max_num_seqs, swarm.blocks))) if rng.random() < swarm.forking else 1
        too_long = rng.random() < swarm.oversize
        length = config.max_model_len if too_long else longest(config, swarm.blocks, n)
        prompt = rng.randint(1, swarm.prompt_max)
        outputs = rng.randint(min(swarm.output_min, swarm.output_max), swarm.output_max)
        if rng.random() < swarm.boundary:
            prompt = max(1, rng.choice((size, 2 * size, size * rng.randint(1, 4), length - 1)) + rng.choice((-1, 0, 1)))
        if prompt < length and rng.random() < swarm.boundary:
            outputs = max(1, length - prompt + rng.choice((-1, 0, 1)))
        if too_long and swarm.overlong:
            prompt = rng.randint(1, length - 1)
            outputs = length - prompt + rng.choice((0, 1))
        elif not too_long:
            prompt = min(prompt, length - 1) or 1
            outputs = max(1, min(outputs, length - prompt))
        shared = 0
        if rng.random() < swarm.sharing:
            shared = prompt if rng.random() < 0.5 else rng.randint(1, prompt)
        continues = rng.randrange(8) if rng.random() < swarm.continuing else None
        encoder: tuple[int, ...] = ()
        if swarm.encoder and rng.random() < swarm.encoder:
            encoder = tuple(rng.randint(1, config.encoder_cache_size) for _ in range(rng.randint(1, 2)))
        family = rng.randrange(swarm.families) if shared or encoder else 0
        kin, grown = self._draw_kin(prompt, continues=continues is not None)
        if grown:
            prompt = shared = max(1, min(grown, length - 2))  # so that it runs on for some steps
            outputs = max(1, min(max(2, outputs), length - prompt))
        add = Add(
            prompt_len=prompt,
            max_tokens=outputs,
            family=family,
            shared_len=shared,
            priority=rng.randrange(swarm.priorities),
            n=n,
            stop_after=rng.randint(1, outputs) if rng.random() < swarm.stopping else None,
            salt=rng.randrange(swarm.identities),
            adapter=rng.randrange(swarm.identities),
            encoder_sizes=encoder,
            continues=continues,
        )
        if kin is not None:
            add = msgspec.structs.replace(add, family=kin.family, salt=kin.salt, adapter=kin.adapter)
        elif self._chase == "step":  # it must still run when it is extended, and make way
            tokens = max(outputs, min(2 + size, length - prompt))
            add = msgspec.structs.replace(add, max_tokens=tokens, n=1, stop_after=None, priority=swarm.priorities - 1)
        if swarm.streaming and n == 1 and not too_long and rng.random() < swarm.streaming:
            add = self._in_parts(add, length)
        self._lengths.append(prompt + outputs)
        if shared == prompt:
            self._whole = add
        return add

    def _in_parts(self, add: Add, length: int) -> Add:
        """The request with a prompt that comes in parts, which all together grow no longer than ``length``."""
        rng = self._rng
        outputs = rng.randint(1, add.max_tokens)
        stop_after = None if add.stop_after is None else min(add.stop_after, outputs)
        room = length - add.prompt_len - outputs
        streamed = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            tokens, answer = rng.randint(1, max(1, room // 2)), rng.randint(1, max(1, room // 2))
            if tokens + answer > room:
                break
            streamed.append((tokens, answer))
            room -= tokens + answer
        return msgspec.structs.replace(add, max_tokens=outputs, stop_after=stop_after, streamed=tuple(streamed))

    def _draw_kin(self, prompt: int, *, continues: bool) -> tuple[Add | None, int]:
        """Whose prompt the next one extends, if any one's, and its length; 0 for that of any other prompt.

        With prefix caching a prompt is a whole turn of a chat and more, goes on from the last prompt that is shared
        as a whole, or ends with a block and is extended as soon as it is computed, perhaps to the end of the pool.
        """
        rng, size, whole = self._rng, self.swarm.config.block_size, self._whole
        chasing, self._chase = self._chase == "add", ""
        if continues and self._lengths:
            return None, rng.choice(self._lengths) + rng.randint(0, size)
        if whole is not None and chasing:
            self._chase = "steps"
            most = self.swarm.blocks * size - rng.randrange(2 * size)
            return whole, max(whole.prompt_len + 1, rng.choice((most, whole.prompt_len + rng.randint(1, size))))
        if not self.swarm.extending or rng.random() >= self.swarm.extending:
            return None, 0
        if whole is not None and rng.random() < 0.3:
            return whole, whole.prompt_len + rng.randint(1, 2 * size)
        self._chase = "step"
        return None, max(1, prompt // size) * size
