"""Why each preemption of a trace happened, in sentences with numbers.

Works on what the trace recorded; no engine is needed. For every preemption: which sequence, who asked, the
blocks the engine counted against the blocks really needed, what was free, what it cost, and what would have
avoided it.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.need import PreemptionVerdict
from conformance.protocol import BlockId, EngineConfig
from conformance.trace import DeviceOutcome, StepOutcome, Trace
from conformance.wording import some

DEVICE_CALLS_SHOWN = 12
"""The last ones: a finding is over soon after its cause."""


def steps_of(trace: Trace) -> Iterator[StepOutcome]:
    """All steps of the trace, in order."""
    for line in trace.lines:
        yield from line.steps


def explain(trace: Trace) -> list[str]:
    """The explanation, one paragraph a string: configuration, preemptions, block ids, device calls, violations."""
    config = trace.header.config
    steps = list(steps_of(trace))
    paragraphs = [setting(trace)]
    count: dict[str, int] = {}
    for step in steps:
        for verdict in step.preempted:
            count[verdict.request_id] = count.get(verdict.request_id, 0) + 1
            paragraphs.append(_preemption(step, verdict, count[verdict.request_id], config))
    if not count:
        paragraphs.append(f"No preemption in {len(steps)} steps.")
    else:
        wasted = sum(verdict.tokens_recomputed for step in steps for verdict in step.preempted)
        needless = sum(verdict.needless for step in steps for verdict in step.preempted)
        paragraphs.append(
            f"In all: {some(sum(count.values()), 'preemption')} in {len(steps)} steps, {needless} of them "
            f"needless, {some(wasted, 'position')} thrown away to be computed again."
        )
    paragraphs.append(_block_ids(steps, config))
    paragraphs.extend(_device_calls(steps))
    paragraphs.extend(
        f"{finding.requirement} is broken in step {finding.step}: {finding.message}. "
        f"Expected {finding.expected}; got {finding.got}."
        for finding in trace.footer.violations
    )
    return paragraphs


def setting(trace: Trace) -> str:
    """Engine, release and configuration in one sentence."""
    config = trace.header.config
    whole = "; one block holds a whole sequence" if config.block_size >= config.max_model_len else ""
    whole += ", on a device of fixed batch" if config.fixed_batch else ""
    options = "".join(f", {name} = {value}" for name, value in sorted(config.engine_options.items()))
    return (
        f"{trace.header.engine} {trace.header.engine_version}: {config.num_blocks} blocks of {config.block_size} "
        f"tokens, max_num_seqs {config.max_num_seqs}, max_model_len {config.max_model_len}{options}{whole}."
    )


def _preemption(step: StepOutcome, verdict: PreemptionVerdict, number: int, config: EngineConfig) -> str:
    parts = [f"Step {step.step}: {verdict.request_id} is preempted by {verdict.mode} (time {number})."]
    if verdict.asked_by is not None:
        what = "itself" if verdict.asked_by == verdict.request_id else verdict.asked_by
        parts.append(f"It made way for {what}.")
    if verdict.counted is not None:
        seen = verdict.free if verdict.engine_free is None else verdict.engine_free
        parts.append(f"The engine counted {some(verdict.counted, 'block')} as needed and saw {seen} free.")
    parts.append(f"Really needed by the whole running set: {some(verdict.needed, 'block')}; free: {verdict.free}.")
    cost = (
        f"{some(verdict.tokens_recomputed, 'position')} must be computed again"
        if verdict.mode != "swap"
        else "its KV is swapped out"
    )
    parts.append(f"It frees {some(verdict.released, 'block')} and {cost}.")
    parts.append(_avoidance(verdict, config))
    return " ".join(parts)


def _avoidance(verdict: PreemptionVerdict, config: EngineConfig) -> str:
    """What would have avoided the preemption."""
    if verdict.needless:
        advice = "Needless: counting only the blocks that must be new avoids it"
        if verdict.counted is not None and verdict.engine_free is not None:
            short = max(1, verdict.counted - verdict.engine_free)
            advice += f"; so does a pool of {some(short, 'block')} more, which nobody would ever fill"
        return advice + "."
    short = verdict.needed - verdict.free
    advice = f"Needed: the pool was {some(short, 'block')} short"
    if verdict.full_need > verdict.usable:
        advice += (
            f"; {some(verdict.full_need - verdict.usable, 'more block')} hold every running request to its end, "
            f"or fewer than max_num_seqs = {config.max_num_seqs} at once"
        )
    return advice + "."


def _block_ids(steps: list[StepOutcome], config: EngineConfig) -> str:
    """Which block ids were handed out, and which of them a device with one line per sequence would not have."""
    first_use: dict[BlockId, str] = {}
    for step in steps:
        for ran in step.ran:
            for table in ran.tables:
                for block in table:
                    first_use.setdefault(block, ran.name)
    if not first_use:
        return "No block was handed out."
    ids = sorted(first_use)
    text = f"Block ids handed out: {', '.join(map(str, ids))}."
    beyond = [block for block in ids if block >= config.max_num_seqs]
    if config.block_size >= config.max_model_len and beyond:
        who = ", ".join(f"block {block} (first given to {first_use[block]})" for block in beyond)
        text += (
            f" A device with one line per sequence has lines 0 to {config.max_num_seqs - 1}: used as a line "
            f"number, {who} names a line that does not exist."
        )
    return text


def _device_calls(steps: list[StepOutcome]) -> Iterator[str]:
    """How often the device was called, and who was on which line in the last calls."""
    calls = [(step.step, call) for step in steps for call in step.device]
    if calls:
        decodes = sum(call.route == "decode" for _, call in calls)
        prefills = sum(len(call.rows) for _, call in calls if call.route == "prefill")
        yield f"The device ran {some(decodes, 'decode')} and prefilled {some(prefills, 'prompt')}; its last calls:"
    for step, call in calls[-DEVICE_CALLS_SHOWN:]:
        yield f"Step {step}, {_device_call(call)}"


def _device_call(call: DeviceOutcome) -> str:
    at = "to" if call.route == "prefill" else "at"
    rows = ", ".join(f"{name} on line {line} {at} position {position}" for name, line, position in call.rows)
    text = f"{call.route}{f' of width {call.width}' if call.width > 1 else ''}: {rows}."
    if call.returned:
        text += f" What came back was given to {', '.join(call.returned)}."
    if call.compiled:
        text += f" {some(call.compiled, 'graph')} had to be compiled."
    return text
