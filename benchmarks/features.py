"""What a campaign reaches of every feature that an engine declares: a table, feature by feature.

    python benchmarks/features.py --engine vllm-v1 --steps 200000 --seed 1 --write docs/reference/vllm-v1-features.md

runs the fuzzer's swarm and prints for each declared feature and option how many runs and steps had it on, how often
the states were reached that make it worth having (its "sometimes" properties), and what the runs with it broke.
The exit code is 1 when one of a feature's states was never reached, or a feature has none listed here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from conformance.engines import load
from conformance.execute import probe
from conformance.expectations import FUZZ, for_engine
from conformance.operations import Add
from conformance.protocol import Capabilities, EngineConfig
from conformance.requirements import load as load_requirements
from fuzz.driver import Driver, Run, campaign

Uses = Callable[[Run], bool]
ON, OFF = (True,), (False,)


class Aspect(NamedTuple):
    """A feature, or one value of an option: which runs have it on, and the states they should reach sometimes."""

    name: str
    uses: Uses
    states: tuple[str, ...]


def _field(name: str) -> Uses:
    return lambda run: bool(getattr(run.swarm.config, name))


def _option(name: str, *values: object) -> Uses:
    """On when the option has one of ``values``, or any value but "off" when none is named."""
    off = (None, False, 0, "none")

    def uses(run: Run) -> bool:
        value = run.swarm.config.engine_options.get(name)
        return value in values if values else value not in off

    return uses


def _loads(kind: str, name: str = "kv_connector", *values: object) -> Uses:
    inner = _option(name, *values)

    def uses(run: Run) -> bool:
        options = run.swarm.config.engine_options
        loading = options.get("kv_connector") == kind and options.get("kv_role") != "kv_producer"
        return loading and (name == "kv_connector" or inner(run))

    return uses


def _stateful(run: Run) -> bool:
    return any(group.state for group in run.swarm.config.kv_cache_groups)


def _sends(run: Run) -> bool:
    options = run.swarm.config.engine_options
    with_one = options.get("kv_connector", "none") != "none" and options.get("kv_role") != "kv_consumer"
    return with_one and bool(options.get("kv_send_steps"))


def _adds(*names: str) -> Uses:
    """Runs in which some request has one of these fields set."""
    return lambda run: any(
        isinstance(operation, Add) and any(getattr(operation, name) for name in names) for operation in run.operations
    )


def _both(one: Uses, other: Uses) -> Uses:
    return lambda run: one(run) and other(run)


FEATURES: dict[str, tuple[Aspect, ...]] = {
    "abort": (
        Aspect("abort", lambda _: True, ("aborted while waiting", "aborted while running", "aborted while preempted")),
    ),
    "chunked_prefill": (
        Aspect("chunked prefill", _field("enable_chunked_prefill"), ("prefill in chunks", "preempted mid-prefill")),
    ),
    "encoder_cache": (
        Aspect("encoder cache", _field("encoder_cache_size"), ("encoder item computed", "encoder item evicted")),
    ),
    "identity": (
        Aspect(
            "identity (salt, adapter)",
            _both(_field("enable_prefix_caching"), _adds("salt", "adapter")),
            ("prefix hit under an identity",),
        ),
    ),
    "kv_cache_groups": (
        Aspect("KV-cache groups", _field("kv_cache_groups"), ("block behind the window", "preempted")),
    ),
    "kv_connector": (),
    "length_limit": (Aspect("max_model_len", lambda _: True, ("refused",)),),
    "pipeline": (
        Aspect(
            "pipeline",
            lambda run: run.swarm.config.pipeline_depth > 1,
            ("ran with steps in flight", "preempted with steps in flight"),
        ),
    ),
    "prefix_caching": (
        Aspect("prefix caching", _field("enable_prefix_caching"), ("prefix hit", "prefix hit after preemption")),
    ),
    "priority": (
        Aspect(
            "priority",
            lambda run: run.swarm.config.scheduling_policy == "priority",
            ("more urgent one admitted first", "preempted"),
        ),
    ),
    "recompute": (Aspect("recompute", lambda _: True, ("preempted", "preempted again", "recomputed")),),
    "reset_prefix_cache": (
        Aspect("reset", _field("enable_prefix_caching"), ("prefix cache reset", "prefix cache reset refused")),
    ),
    "sliding_window": (Aspect("sliding window", _field("sliding_window"), ("block behind the window", "preempted")),),
    "speculation": (
        Aspect("speculation", _field("num_speculative_tokens"), ("draft accepted", "draft rejected", "preempted")),
    ),
    "state_groups": (
        Aspect(
            "recurrent state",
            _stateful,
            ("prefix hit", "copied on write", "preempted"),
        ),
    ),
    "streaming_input": (),
    "stop_token": (Aspect("stop token", _adds("stop_after"), ("stopped by its token",)),),
    "watermark": (Aspect("watermark", _field("watermark"), ("held back by the watermark",)),),
    "snapshot": (),
    "token_budget": (Aspect("token budget", lambda _: True, ("prefill in chunks",)),),
    "usage": (),
}
"""By declared feature; none for what shows the books and does not change them, or is seen by its options."""
OPTIONS: dict[str, tuple[Aspect, ...]] = {
    "async_scheduling": (
        Aspect(
            "async scheduling",
            _option("async_scheduling", *ON),
            ("ran with steps in flight", "preempted with steps in flight"),
        ),
        Aspect(
            "pipeline parallelism",
            _both(_option("async_scheduling", *OFF), lambda run: run.swarm.config.pipeline_depth > 1),
            ("ran with steps in flight", "preempted with steps in flight"),
        ),
    ),
    "model_runner": tuple(
        Aspect(f"model runner {name}", _option("model_runner", name), ("recomputed",)) for name in ("v1", "v2")
    ),
    "long_prefill_token_threshold": (
        Aspect("long prefill threshold", _option("long_prefill_token_threshold"), ("prefill in chunks",)),
    ),
    "long_prefill_token_threshold_adaptive": (
        Aspect(
            "adaptive threshold",
            _both(_option("long_prefill_token_threshold_adaptive"), _option("long_prefill_token_threshold")),
            ("prefill in chunks",),
        ),
    ),
    "scheduler_reserve_full_isl": (
        Aspect("admission by first chunk", _option("scheduler_reserve_full_isl", *OFF), ("preempted mid-prefill",)),
    ),
    "max_num_active_seqs": (
        Aspect("max_num_active_seqs", _option("max_num_active_seqs"), ("held back below max_num_seqs",)),
    ),
    "prefill_schedule_interval": (
        Aspect("prefill interval", _option("prefill_schedule_interval"), ("waited for its turn to prefill",)),
    ),
    "max_num_queued_reqs": (
        Aspect("max_num_queued_reqs", _option("max_num_queued_reqs"), ("refused for requests in the queue",)),
    ),
    "max_num_queued_tokens": (
        Aspect("max_num_queued_tokens", _option("max_num_queued_tokens"), ("refused for prompt tokens in the queue",)),
    ),
    "pause": tuple(
        Aspect(f"paused: {name}", _option("pause", name), ("a step was paused", "preempted")) for name in ("new", "all")
    ),
    "speculative_method": tuple(
        Aspect(
            f"drafts by {name}",
            _both(_option("speculative_method", name), _field("num_speculative_tokens")),
            ("draft accepted", "draft rejected"),
        )
        for name in ("ngram", "eagle")
    ),
    "prefix_match_unit": (
        Aspect(
            "prefix_match_unit",
            _both(_option("prefix_match_unit"), _field("kv_cache_groups")),
            ("prefix hit", "copied on write"),
        ),
    ),
    "reset_running_requests": (
        Aspect("reset that preempts", _option("reset_running_requests"), ("preempted by a reset",)),
    ),
    "streaming_input": (
        Aspect(
            "inputs sent at once",
            _option("streaming_input", "queued"),
            ("went on with more input", "preempted after more input"),
        ),
        Aspect(
            "inputs sent late",
            _option("streaming_input", "late"),
            ("went on with more input", "preempted after more input", "aborted while between inputs"),
        ),
    ),
    "kv_connector": (
        Aspect("KV loaded in time", _loads("sync"), ("KV loaded in time", "preempted")),
        Aspect(
            "KV loaded late",
            _loads("async"),
            (
                "late load arrived",
                "passed over until the connector knows",
                "aborted while loading",
                "late load arrived after its request ended",
                "preempted while somebody loads",
            ),
        ),
        Aspect(
            "recurrent state loaded",
            _both(_loads("async"), _stateful),
            ("late load arrived", "prefix hit", "preempted"),
        ),
    ),
    "kv_load_failures": (
        Aspect(
            "loads in time that fail",
            _loads("sync", "kv_load_failures"),
            ("a load failed", "recomputed after a failed load"),
        ),
        Aspect(
            "late loads that fail",
            _loads("async", "kv_load_failures"),
            ("a late load failed", "recomputed after a failed load"),
        ),
    ),
    "kv_load_failure_policy": (
        Aspect("failed loads end requests", _option("kv_load_failure_policy", "fail"), ("ended by a failed load",)),
    ),
    "kv_role": (),
    "kv_load_steps": (Aspect("slow loads", _loads("async", "kv_load_steps"), ("aborted while loading",)),),
    "kv_send_steps": (Aspect("blocks kept to be sent", _sends, ("blocks held after their use",)),),
}


class Tally:
    """Runs, steps, behaviours and findings of one aspect."""

    def __init__(self) -> None:
        self.runs = 0
        self.steps = 0
        self.reached: dict[str, int] = {}
        self.findings: dict[str, int] = {}

    def add(self, run: Run) -> None:
        """Count a run that has the aspect on."""
        self.runs += 1
        self.steps += run.steps
        for name, count in run.behaviours.items():
            self.reached[name] = self.reached.get(name, 0) + count
        for violation in run.violations:
            self.findings[violation.requirement] = self.findings.get(violation.requirement, 0) + 1


def aspects_of(capabilities: Capabilities) -> list[Aspect]:
    """The aspects of all that is declared. Raises LookupError for what has no entry here."""
    unknown = sorted(capabilities.features - FEATURES.keys()) + sorted(
        capabilities.swarm_options.keys() - OPTIONS.keys()
    )
    if unknown:
        raise LookupError(f"no states are listed for {', '.join(unknown)}; add them to benchmarks/features.py")
    named = [FEATURES[name] for name in FEATURES if name in capabilities.features]
    named += [OPTIONS[name] for name in OPTIONS if name in capabilities.swarm_options]
    return [aspect for aspects in named for aspect in aspects]


def table(aspects: list[Aspect], tallies: dict[str, Tally]) -> str:
    """The rows in markdown."""
    rows = ["| feature | runs | steps | states reached | findings |", "|---|---:|---:|---|---|"]
    for aspect in aspects:
        tally = tallies[aspect.name]
        states = ", ".join(f"{state} {tally.reached.get(state, 0):,}" for state in aspect.states)
        found = ", ".join(f"{name} {count}" for name, count in sorted(tally.findings.items())) or "none"
        rows.append(f"| {aspect.name} | {tally.runs:,} | {tally.steps:,} | {states} | {found} |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign, print the table, and write the page if asked to. 1 when a state was never reached."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="vllm-v1")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="write the table as a page of the documentation")
    asked = parser.parse_args(arguments)
    factory = load(asked.engine).factory
    capabilities = probe(factory, EngineConfig())
    aspects = aspects_of(capabilities)
    tallies = {aspect.name: Tally() for aspect in aspects}

    def count(_: object, run: Run) -> None:
        for aspect in aspects:
            if aspect.uses(run):
                tallies[aspect.name].add(run)

    expectations = for_engine(asked.engine)
    judged = frozenset(load_requirements()) - expectations.fuzzed(capabilities.version)
    driver = Driver(factory, capabilities, seed=asked.seed, expectations=expectations)
    state = campaign(driver, steps_max=asked.steps, judged=judged, on_run=count)
    rows = table(aspects, tallies)
    sys.stdout.write(rows)
    for discovery in state.discoveries.values():
        print(f"{discovery.seen} x {discovery.violation.requirement}: {discovery.violation.message}")
    if asked.write:
        command = f"python benchmarks/features.py --engine {asked.engine} --steps {asked.steps} --seed {asked.seed}"
        asked.write.write_text(_page(asked.engine, capabilities.version, command, state.runs, state.steps, rows))
    missed = [f"{a.name}: {s}" for a in aspects for s in a.states if not tallies[a.name].reached.get(s)]
    if missed:
        print(f"never reached: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _page(engine: str, version: str, command: str, runs: int, steps: int, rows: str) -> str:
    known = {one.requirement for one in for_engine(engine).entries if one.applies(version) and one.covers(FUZZ)}
    return f"""\
# {engine} {version}: what the fuzzer reaches of each feature

Made by `{command} --write FILE`: {runs:,} runs, {steps:,} steps.
A row counts the runs whose configuration has the feature on, the states that its runs reached and how often, and the
runs that broke a requirement. Known failures of the release are left out, as far as they can be told from others (of
{", ".join(sorted(known)) or "none"}); they are in [the track record](../track-record.md).

{rows}"""


if __name__ == "__main__":
    sys.exit(main())
