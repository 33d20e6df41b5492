"""The command line. Composition only: every command is a few calls into the packages below."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn, cast, get_args

import typer
from rich.console import Console

from conformance.advice import next_command
from conformance.check import UnknownRequirement, rejudge
from conformance.engines import EngineNotFound, installed, load, load_recorded
from conformance.execute import execute, probe, trace_of
from conformance.expectations import ExpectationsError
from conformance.explain import explain as explanation
from conformance.operations import Add, Drain, Operation
from conformance.protocol import AdapterError, ConfigRefused, EngineConfig
from conformance.reports.conformance_page import absolute, write_conformance_page
from conformance.reports.events import EventsError, EventWriter, combine, event_file, read_run
from conformance.reports.formats import markdown
from conformance.requirements import load as load_requirements
from conformance.requirements import load_contract
from conformance.settings import PRESETS, parse_settings
from conformance.trace import TraceError, read_trace, write_trace
from conformance.version import __version__, as_built
from conformance.watchdog import EngineHung, MemoryExhausted, Watchdog
from conformance.wording import some
from fuzz.corpus import corpus
from fuzz.driver import flatten
from fuzz.findings import keep
from fuzz.shrink import EXECUTIONS_MAX, Shrinker
from kvconform.bench_command import bench_command
from kvconform.check_command import check_engines
from kvconform.console import INDENT, make_console, print_kept, print_violation, wrapped
from kvconform.diff_command import diff_command
from kvconform.exit_codes import BROKEN, HOLDS, USAGE, VIOLATED
from kvconform.fuzz_command import fuzz_engine
from kvconform.matrix_command import Matrix, entries_of, exit_code
from kvconform.matrix_command import Plan as MatrixPlan
from kvconform.page_command import StepsOption, page_command, steps_of_interest
from kvconform.plan_command import batches, picture_of, plan_engine, plot
from kvconform.report_command import Format, print_reasons, print_run, render, written
from kvconform.serve_command import ValidateOption, serve_command

FINDINGS = Path("kvconform-findings")

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",  # in its default mode a help text loses what stands in brackets
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Does this engine's scheduler and KV-cache block manager keep the books right? "
    "Exit codes: 0 holds, 1 contract violated, 2 usage or configuration, 3 the suite or an adapter broke.",
)

EngineArgument = Annotated[
    str,
    typer.Argument(
        help="reference, vllm-v0, smol-vllm, an installed plugin, package.module:factory, exec:COMMAND, or NAME@PYTHON"
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value for any EngineConfig field, engine_options.NAME=value for the engine's own"),
]
OtherEngineOption = Annotated[
    str | None, typer.Option(help="Another engine than the one in the trace; needed when that is no installed one")
]
PresetOption = Annotated[str | None, typer.Option(help=f"A configuration by name: {', '.join(sorted(PRESETS))}")]


def _folder(out: Path) -> Path:
    """A folder that can be written to, now or once it is made: said before the work and not after it."""
    there = out
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{out}: expected a folder that can be written to; name another one")
    return out


OutOption = Annotated[Path, typer.Option("--out", help="Folder for traces and ready tests", callback=_folder)]
TimeoutOption = Annotated[
    float, typer.Option("--call-seconds", min=0.0, help="Bound on one call into the engine; 0 for none")
]


EventsOption = Annotated[
    Path | None, typer.Option("--events", help="Write everything found to this event file, for `report`")
]
LabelOption = Annotated[str, typer.Option(help="The name of the engine's column in the event file")]


def _written(path: Path | None, command: str, seed: int | None = None) -> AbstractContextManager[EventWriter | None]:
    return nullcontext() if path is None else event_file(path, command, edition=load_contract().edition, seed=seed)


@app.command()
def check(
    engines: Annotated[
        list[str] | None, typer.Argument(help="Engines to check; every installed one when none is named")
    ] = None,
    preset: PresetOption = None,
    settings: SetOption = None,
    requirement: Annotated[
        list[str] | None, typer.Option("--requirement", "-r", help="Judge only this requirement; repeatable")
    ] = None,
    out: OutOption = FINDINGS,
    events: EventsOption = None,
    label: LabelOption = "",
    call_seconds: TimeoutOption = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Check the contract on an engine, as a table, with the reason for each red line."""
    config, pinned = parse_settings(preset, settings or [])
    named = [load(name, validate_wire=validate_wire) for name in engines or []]
    sources = named or [source for source in installed() if source.available]
    if label and len(sources) != 1:
        raise typer.BadParameter(f"--label names one column: expected one engine, got {len(sources)}")
    with _written(events, "check") as writer:
        code = check_engines(
            sources,
            config,
            pinned,
            requirements=requirement,
            out=out,
            call_seconds=call_seconds,
            everything=not engines,
            events=writer,
            label=label,
        )
    raise typer.Exit(code)


@app.command()
def fuzz(
    engine: EngineArgument = "reference",
    seed: Annotated[int, typer.Option(help="Decides everything; printed first")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Engine steps to run, shrinking not counted")] = 100_000,
    preset: PresetOption = None,
    settings: SetOption = None,
    requirement: Annotated[
        list[str] | None, typer.Option("--requirement", "-r", help="Judge only this requirement; repeatable")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", help="Do not judge this requirement; repeatable")
    ] = None,
    out: OutOption = FINDINGS,
    events: EventsOption = None,
    label: LabelOption = "",
    call_seconds: TimeoutOption = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Hunt for violations with random requests; each is shrunk to its shortest sequence and kept as a file."""
    source = load(engine, validate_wire=validate_wire)
    config, pinned = parse_settings(preset, settings or [])
    with _written(events, "fuzz", seed) as writer:
        code = fuzz_engine(
            source,
            config,
            pinned,
            seed=seed,
            steps=steps,
            judged=_judged(requirement, ignore),
            out=out,
            watchdog=_watchdog(call_seconds),
            events=writer,
            label=label,
        )
    raise typer.Exit(code)


@app.command("replay")
def replay_command(
    trace: Annotated[Path, typer.Argument(help="A trace file")],
    engine: OtherEngineOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for every step of the new run")] = False,
    call_seconds: TimeoutOption = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Run a trace again: FAILED (exit 1) while the violation is there, FIXED (0) when it is gone."""
    console = make_console()
    loaded = read_trace(trace)
    source = load_recorded(loaded.header.engine, engine, validate_wire=validate_wire)
    watchdog = _watchdog(call_seconds)
    result = rejudge(source.factory, loaded, watchdog)
    if verbose:
        again = trace_of(source.name, loaded.header.config, result.execution)
        for line in steps_of_interest(again, everything=True):
            wrapped(console, line)
    if result.execution.violations:
        first = result.execution.violations[0]
        print_violation(console, first)
        stopped_at = watchdog.stopped_at if watchdog is not None else ""
        if stopped_at and first.got.startswith((EngineHung.__name__, MemoryExhausted.__name__)):
            wrapped(console, f"stopped  this time at {stopped_at}", INDENT)
    else:
        wrapped(console, result.reason)
    version = result.execution.engine_version
    recorded = loaded.header.engine_version
    where = f"{source.name} {version}".rstrip() + (
        f" (recorded on {recorded})" if recorded not in {"", version} else ""
    )
    same = "the same plans as recorded" if result.same_digest else "other plans than recorded"
    wrapped(console, f"{result.status}: {trace} on {where}, {result.execution.steps} steps, {same}")
    raise typer.Exit({"FIXED": HOLDS, "FAILED": VIOLATED, "ERROR": BROKEN}[result.status])


@app.command()
def shrink(
    trace: Annotated[Path, typer.Argument(help="A trace file that fails")],
    engine: OtherEngineOption = None,
    out: OutOption = FINDINGS,
    executions: Annotated[int, typer.Option(min=1, help="Executions to spend")] = EXECUTIONS_MAX,
    call_seconds: TimeoutOption = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Shrink a failing trace to the shortest sequence of requests that fails in the same way."""
    console = make_console()
    loaded = read_trace(trace)
    source = load_recorded(loaded.header.engine, engine, validate_wire=validate_wire)
    watchdog = _watchdog(call_seconds)
    result = rejudge(source.factory, loaded, watchdog)
    if result.status == "FAILED" and not result.execution.violations:
        wrapped(
            console, f"{result.reason}: seen by comparing several runs, which cannot be shrunk; {trace} stays as it is"
        )
        raise typer.Exit(VIOLATED)
    if result.status != "FAILED":
        wrapped(console, f"{result.status}: {result.reason}; there is nothing to shrink")
        raise typer.Exit(HOLDS if result.status == "FIXED" else BROKEN)
    shrinker = Shrinker(source.factory, executions_max=executions, watchdog=watchdog)
    shrunk = shrinker.shrink(loaded.header.config, flatten(loaded.operations), result.execution.violations[0])
    kept = keep(source.factory, source.name, shrunk, out, seed=loaded.header.seed, watchdog=watchdog)
    print_kept(console, kept, "", f"from {trace}")
    raise typer.Exit(VIOLATED)


app.command("page")(page_command)
app.command("bench")(bench_command)


@app.command("explain")
def explain_command(trace: Annotated[Path, typer.Argument(help="A trace file")], steps: StepsOption = False) -> None:
    """Show what a trace did in each step, and say why each preemption happened and what would have avoided it."""
    console = make_console()
    loaded = read_trace(trace)
    for line in steps_of_interest(loaded, everything=steps):
        wrapped(console, line)
    for paragraph in explanation(loaded):
        wrapped(console, paragraph)


@app.command()
def record(
    engine: EngineArgument,
    requests: Annotated[
        list[str],
        typer.Argument(metavar="REQUESTS...", help="PROMPT+OUTPUTS, or COUNTxPROMPT+OUTPUTS: 4x10+30"),
    ],
    preset: PresetOption = None,
    settings: SetOption = None,
    out: Annotated[Path, typer.Option("--out", help="The trace file to write")] = Path("trace.jsonl"),
    call_seconds: TimeoutOption = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Run requests through an engine, all added at once, and write the trace, for `explain`."""
    console = make_console()
    config, _ = parse_settings(preset, settings or [])
    source = load(engine, validate_wire=validate_wire)
    operations: list[Operation] = [add for word in requests for add in _requests(word)]
    operations.append(Drain())
    execution = execute(
        source.factory, config, operations, stop_at_first=False, watchdog=_watchdog(call_seconds), record=True
    )
    if execution.refused is not None:
        raise ConfigRefused(execution.refused)
    write_trace(out, trace_of(source.name, config, execution))
    wrapped(
        console,
        f"{some(len(operations) - 1, 'request')}, {some(execution.steps, 'step')}, "
        f"{some(execution.preemptions, 'preemption')}, {some(execution.prefills, 'prefill')}; trace in {out}",
    )
    for violation in execution.violations:
        print_violation(console, violation)
    raise typer.Exit(VIOLATED if execution.violations else HOLDS)


_REQUESTS = re.compile(r"(?:([1-9][0-9]*)x)?([1-9][0-9]*)\+([1-9][0-9]*)")


def _requests(word: str) -> list[Add]:
    match = _REQUESTS.fullmatch(word)
    if match is None:
        raise ConfigRefused(f"{word}: expected PROMPT+OUTPUTS or COUNTxPROMPT+OUTPUTS, such as 4x10+30")
    count, prompt, outputs = match.groups(default="1")
    return [Add(prompt_len=int(prompt), max_tokens=int(outputs))] * int(count)


@app.command()
def matrix(
    engines: Annotated[
        list[str] | None, typer.Argument(help="ENGINE or 'ENGINE[key=value,...]', one column each")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Columns from a TOML file of [[column]] tables")] = None,
    requirement: Annotated[
        list[str] | None, typer.Option("--requirement", "-r", help="Judge only this requirement; repeatable")
    ] = None,
    fuzz_steps: Annotated[int, typer.Option(min=0, help="Also fuzz each engine for this many steps")] = 0,
    seed: Annotated[int, typer.Option(help="Of the fuzzing")] = 1,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Engines at a time")] = os.cpu_count() or 1,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the event file, traces and logs", callback=_folder)
    ] = Path("kvconform-matrix"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what an earlier matrix in the folder did")] = False,
    call_seconds: TimeoutOption = 10.0,
) -> None:
    """Check many engines, releases and configurations side by side; an interrupted matrix is taken up again."""
    console = make_console()
    entries = entries_of(engines or [], file)
    _judged(requirement, None)
    plan = MatrixPlan(
        folder=out,
        requirements=tuple(requirement or ()),
        fuzz_steps=fuzz_steps,
        seed=seed,
        call_seconds=call_seconds,
    )
    events = out / "events.jsonl"
    run = Matrix(console, plan, fresh=fresh).run(entries, jobs, events)
    written(markdown(run), out / "matrix.md")
    print_reasons(console, run, frozenset({"fail", "stale", "error"}))
    console.print()
    print_run(console, run)
    console.print()
    wrapped(console, f"everything is in {events}; the same as markdown in {out / 'matrix.md'}")
    raise typer.Exit(exit_code(run))


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Event files; several are shown as one run")],
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(get_args(Format))}")] = "terminal",
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file")] = None,
    track_record: Annotated[
        bool, typer.Option("--track-record", help="With the page, one of what was found in released engines")
    ] = False,
) -> None:
    """Show stored runs again, combined, or as a page, markdown, JUnit or a badge."""
    if form not in get_args(Format):
        raise typer.BadParameter(f"{form}: expected one of {', '.join(get_args(Format))}")
    if track_record and form != "html":
        raise typer.BadParameter(f"--track-record is a page beside --format html, got --format {form}")
    run = combine([absolute(read_run(path), path.parent) for path in files])
    if form == "html":
        if out is None:
            raise typer.BadParameter("--format html writes a page and those of its traces: give --out FILE.html")
        write_conformance_page(run, out, track_record=corpus() if track_record else ())
        wrapped(make_console(), f"{out}: open it in a browser")
    elif form == "terminal":
        console = make_console()
        print_reasons(console, run, frozenset({"fail", "stale", "error"}))
        print_run(console, run)
    else:
        written(render(run, cast("Format", form)), out)
    raise typer.Exit(exit_code(run))


@app.command()
def plan(
    engine: EngineArgument = "reference",
    batch: Annotated[
        str, typer.Option("--batch", help="Batch sizes to plan for, such as 1,4,8; max_num_seqs when not given")
    ] = "",
    preset: PresetOption = None,
    settings: SetOption = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the curves to this PNG or SVG file (extra: plots)")
    ] = None,
    call_seconds: TimeoutOption = 10.0,
    validate_wire: ValidateOption = False,
) -> None:
    """Measure how many blocks this engine needs so that a full batch runs at once and nobody is preempted."""
    console = make_console()
    config, pinned = parse_settings(preset, settings or [])
    source = load(engine, validate_wire=validate_wire)
    drawn = None if picture is None else picture_of(picture)
    plans = []
    for one in batches(config, pinned, batch):
        plans.append(plan_engine(console, source, one, _watchdog(call_seconds)))
        console.print()
    if drawn is not None:
        plot(plans, drawn)
        wrapped(console, f"curves in {drawn}")
    raise typer.Exit(VIOLATED if any(one.needed is None for one in plans) else HOLDS)


@app.command()
def engines() -> None:
    """List the engines that kvconform knows, and what each one declares."""
    console = make_console()
    for source in installed():
        if not source.available:
            wrapped(console, f"{source.name}: {source.reason}")
            continue
        try:
            capabilities = probe(source.factory, EngineConfig())
        except Exception as error:  # noqa: BLE001 - one engine that cannot start must not hide the others
            wrapped(console, f"{source.name}: cannot be started: {type(error).__name__}: {error}")
            continue
        wrapped(console, f"{source.name} {capabilities.version}")
        wrapped(console, f"features: {', '.join(sorted(capabilities.features))}", "    ")
        for name, text in sorted(capabilities.options.items()):
            wrapped(console, f"--set engine_options.{name}=…: {text}", "    ")
        for text in capabilities.reimplements:
            wrapped(console, f"done by the adapter: {text}", "    ")


app.command("diff")(diff_command)
app.command("serve")(serve_command)


def _judged(only: list[str] | None, ignored: list[str] | None) -> frozenset[str]:
    levels = load_requirements()
    for name in [*(only or []), *(ignored or [])]:
        if name not in levels:
            raise ConfigRefused(f"{name}: no such requirement; expected one of {', '.join(levels)}")
    return frozenset(only or levels) - frozenset(ignored or [])


def _watchdog(call_seconds: float) -> Watchdog | None:
    return Watchdog(call_seconds_max=call_seconds) if call_seconds else None


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version")] = False,
) -> None:
    """Options that stand before a command."""
    if show:
        typer.echo(f"kvconform {as_built()}")
        raise typer.Exit


def _explain_error(console: Console, text: str, error: Exception, arguments: list[str] | None) -> None:
    """What happened, and what to do next."""
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), "")
    wrapped(console, f"kvconform: {text}")
    wrapped(console, f"next: {next_command(error, command)}", INDENT)


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script: run a command and turn what goes wrong into a sentence and an exit code."""
    console = make_console(stderr=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a sign that the encoding lacks must not end the run
    try:
        app(args=arguments, standalone_mode=True)
    except (ConfigRefused, EngineNotFound, EventsError, ExpectationsError, TraceError, UnknownRequirement) as error:
        _explain_error(console, str(error), error, arguments)
        sys.exit(USAGE)
    except OSError as error:
        what = (
            f"{error.filename}: {error.strerror}; expected a file or folder that can be used here"
            if error.filename
            else str(error)
        )
        _explain_error(console, what, error, arguments)
        sys.exit(USAGE)
    except AdapterError as error:
        _explain_error(console, f"the adapter is at fault, not the engine: {error}", error, arguments)
        sys.exit(BROKEN)
    except Exception:  # noqa: BLE001 - whatever is left is a fault of ours
        traceback.print_exc()
        wrapped(console, f"kvconform {__version__} broke; the above is a fault of kvconform, not of the engine")
        sys.exit(BROKEN)
    sys.exit(HOLDS)
