"""The table of docs/explanation/neuron-end-to-end.md: vLLM's Neuron code to the end, whatever goes wrong on the way.

    python benchmarks/neuron_table.py

runs the installed vLLM on the emulated device under both block managers and both sizes of the pool, as far as the
release has them, and prints a row for each. No session judges: every request is driven to its end, and its tokens
are then held against the greedy continuation by Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from conformance.adapters.vllm_neuron import VllmNeuronEngine, make
from conformance.operations import Add
from conformance.protocol import ConfigRefused, EngineConfig, OptionValue
from conformance.token_model import request_from

LENGTH = 64
BATCH = 4
STEPS_MAX = 1000
WORKLOADS: dict[str, list[tuple[int, Add]]] = {
    "4 of 10+30": [(0, Add(10, 30))] * 4,
    "9 mixed": [
        (0, Add(prompt, outputs))
        for prompt, outputs in (
            (5, 12), (10, 30), (3, 7), (20, 20), (8, 25), (12, 9), (30, 30), (2, 16), (15, 11),
        )
    ],
    "3 of 10+20, then 1+5": [(0, Add(10, 20))] * 3 + [(3, Add(1, 5))],
}  # fmt: skip
"""Requests, prompt + outputs in tokens, each with the step before which it arrives."""
VARIANTS: list[dict[str, OptionValue]] = [
    {"block_manager": manager, "row_order": order, **more}
    for manager in ("v1", "v2")
    for more in ({}, {"blocks_plus_one": True})
    for order in ("new", "old")
]
HEAD = """\
| vLLM | block manager | blocks | row order | workload | steps | prefills | decode calls | preemptions | right |
|---|---|---|---|---|---|---|---|---|---|"""


class Figures(NamedTuple):
    """What one run came to. ``ended``: what ended the engine early, "" when nothing did."""

    steps: int
    prefills: int
    decodes: int
    preemptions: int
    right: int
    ended: str


def run(engine: VllmNeuronEngine, workload: list[tuple[int, Add]]) -> Figures:
    """Drive ``workload`` to its end. A prefill is a prompt that goes the device's prefill route."""
    requests = {f"r{number}": request_from(add, number) for number, (_, add) in enumerate(workload)}
    arrivals = [(step, request) for (step, _), request in zip(workload, requests.values(), strict=True)]
    outputs: dict[str, list[int]] = {}
    steps = prefills = decodes = preemptions = 0
    ended = ""
    while len(outputs) < len(requests) and steps < STEPS_MAX and not ended:
        for at, request in arrivals:
            if at == steps:
                engine.add_request(request)
        plan = engine.schedule()
        for call in plan.device_calls:
            prefills += len(call.rows) if call.route == "prefill" else 0
            decodes += call.route == "decode"
        preemptions += len(plan.preempted)
        try:
            result = engine.commit(steps, {})
        except Exception as error:  # noqa: BLE001 - it is what the table says
            ended = f"none: {type(error).__name__} in step {steps}"
        else:
            outputs |= {finished.request_id: finished.outputs[0] for finished in result.finished}
        steps += 1
    right = 0
    for name, request in requests.items():
        tokens = list(request.prompt)
        while len(tokens) < len(request.prompt) + request.max_tokens:
            tokens.append(engine.reference_token(tokens))
        right += outputs.get(name) == tokens[len(request.prompt) :]
    return Figures(steps, prefills, decodes, preemptions, right, ended)


def engine_of(options: dict[str, OptionValue]) -> tuple[VllmNeuronEngine, EngineConfig]:
    """Raises `ConfigRefused` for what the release does not have."""
    config = EngineConfig(
        num_blocks=BATCH,
        block_size=LENGTH,
        max_num_seqs=BATCH,
        max_num_batched_tokens=BATCH * LENGTH,
        max_model_len=LENGTH,
        engine_options={"device": "emulated", **options},
    )
    try:
        return make(config), config
    except ConfigRefused as refusal:
        if refusal.instead is None:
            raise
        return make(refusal.instead), refusal.instead


def rows() -> Iterator[str]:
    """The rows of the table, as they come."""
    for options in VARIANTS:
        for name, workload in WORKLOADS.items():
            try:
                engine, config = engine_of(options)
            except ConfigRefused:
                continue
            figures = run(engine, workload)
            blocks = f"{config.num_blocks}" + (" (PR 8008)" if options.get("blocks_plus_one") else "")
            right = figures.ended or f"{figures.right} of {len(workload)}"
            yield (
                f"| {engine.capabilities.version} | {options['block_manager']} | {blocks} | {options['row_order']} "
                f"| {name} | {figures.steps} | {figures.prefills} | {figures.decodes} | {figures.preemptions} "
                f"| {right} |"
            )
            engine.close()


if __name__ == "__main__":
    print(HEAD)
    for row in rows():
        print(row, flush=True)
