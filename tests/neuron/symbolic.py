"""A device without tensors that keeps tokens where the real one keeps KV, and loses them as the real one does."""

from __future__ import annotations

from collections.abc import Sequence

from reference_engine.runners.neuron.device import DeviceCall, DeviceConfig, DeviceStats, Rows

VOCABULARY = 61


def config(lines: int = 4, context: tuple[int, ...] = (32,), tokens: tuple[int, ...] = (32,)) -> DeviceConfig:
    return DeviceConfig(model_path="none", lines=lines, context_buckets=context, token_buckets=tokens)


def next_token(tokens: Sequence[int]) -> int:
    """A token that depends on every token before it and on their order."""
    return sum((position + 1) * token for position, token in enumerate(tokens)) % (VOCABULARY - 1) + 1


class SymbolicDevice:
    def __init__(self, config: DeviceConfig) -> None:
        self.config = config
        self.stats = DeviceStats()
        self.content = [[0] * config.positions for _ in range(config.lines)]

    def build(self) -> None:
        pass

    def prefill(self, lines: Sequence[int], prompts: Sequence[Sequence[int]], width: int | None = None) -> Rows:
        width = width or max(map(len, prompts))
        assert width <= self.config.prompt_max, "invalid input prompt length"
        if width == 1:
            return self.decode(lines, [prompt[0] for prompt in prompts], [0] * len(lines))
        last = tuple(len(prompt) - 1 for prompt in prompts)
        self.stats.calls.append(DeviceCall("prefill", tuple(lines), last, width))
        for line, prompt in zip(lines, prompts, strict=True):
            self.content[line] = [*prompt, *[0] * (self.config.positions - len(prompt))]
        return [self._row(prompt) for prompt in prompts]

    def decode(self, lines: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Rows:
        self.stats.calls.append(DeviceCall("decode", tuple(lines), tuple(positions), 1))
        for line in set(range(self.config.lines)) - set(lines):
            self.content[line][0] = 0
        for line, token, position in zip(lines, tokens, positions, strict=True):
            self.content[line][position] = token
        return [self._row(self.content[line][: position + 1]) for line, position in zip(lines, positions, strict=True)]

    def reset(self) -> None:
        self.content = [[0] * self.config.positions for _ in range(self.config.lines)]

    def close(self) -> None:
        pass

    def _row(self, tokens: Sequence[int]) -> list[float]:
        best = next_token(tokens)
        if self.config.sample_on_device:
            return [best]
        return [float(token == best) for token in range(VOCABULARY)]
