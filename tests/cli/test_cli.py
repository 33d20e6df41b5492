"""The command line, as its user meets it: what it prints, which files it leaves, its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.protocol import EngineConfig
from conformance.settings import PRESETS
from conformance.trace import read_trace
from kvconform.cli import main

TOUCHED = "--set=engine_options.append_check=touched"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


def trace_of_the_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "seed.jsonl"
    code, printed, _ = run(capsys, "record", "reference", "4x10+30", "--preset=neuron", TOUCHED, f"--out={out}")
    assert code == 1
    assert "59 steps, 29 preemptions, 33 prefills" in printed
    return out


def test_check_of_the_reference_engine_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, printed, _ = run(capsys, "check", "reference", f"--out={tmp_path}")
    assert code == 0
    assert "the contract holds" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("check", "blocks", "broken"),
    [("exact", 4, False), ("touched", 4, True), ("per_sequence", 4, True), ("strict", 5, True), ("strict", 6, False)],
)
def test_the_seed(*, check: str, blocks: int, broken: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wanted = [f"--requirement={rid}" for rid in ("PRE-1", "PRE-2", "PRE-7")]
    setting = [f"--set=num_blocks={blocks}", f"--set=engine_options.append_check={check}", f"--out={tmp_path}"]
    code, printed, _ = run(capsys, "check", "reference", "--preset=neuron", *setting, *wanted)
    verdicts = dict(line.split()[1::-1] for line in printed.splitlines() if " PRE-" in line and line.startswith("  "))
    assert verdicts == dict.fromkeys(("PRE-1", "PRE-2", "PRE-7"), "FAIL" if broken else "PASS")
    assert code == (1 if broken else 0)
    assert ("59 steps, 29 preemptions, 33 prefills" in printed) is broken
    assert bool(list(tmp_path.glob("check-*.jsonl"))) is broken


def test_fuzz_prints_its_seed_first_and_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, printed, _ = run(capsys, "fuzz", "reference", "--seed=7", "--steps=500", f"--out={tmp_path}")
    assert code == 0
    assert printed.startswith("seed 7, reference")
    assert "no violation in" in printed


def test_fuzz_finds_shrinks_keeps_and_prints_the_same_each_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("fuzz", "reference", TOUCHED, "--steps=1500", "--requirement=PRE-1", f"--out={tmp_path}")
    code, printed, _ = run(capsys, *words)
    assert code == 1
    assert "1. add prompt" in printed
    assert "2. add prompt" not in printed
    traces = list(tmp_path.glob("*.jsonl"))
    assert len(traces) == 1
    assert list(tmp_path.glob("test_*.py"))
    before = traces[0].read_bytes()
    assert run(capsys, *words)[1] == printed
    assert traces[0].read_bytes() == before


def test_replay_says_failed_fixed_and_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = trace_of_the_seed(tmp_path, capsys)
    code, printed, _ = run(capsys, "replay", str(out))
    assert (code, "FAILED" in printed, "the same plans as recorded" in printed) == (1, True, True)
    mended = tmp_path / "mended.jsonl"
    mended.write_text(out.read_text(encoding="utf-8").replace("touched", "exact"), encoding="utf-8")
    code, printed, _ = run(capsys, "replay", str(mended))
    assert (code, "FIXED" in printed) == (0, True)
    refused = tmp_path / "refused.jsonl"
    refused.write_text(out.read_text(encoding="utf-8").replace("touched", "fuzzy"), encoding="utf-8")
    code, printed, _ = run(capsys, "replay", str(refused))
    assert (code, "ERROR" in printed, "append_check" in printed) == (3, True, True)


def test_shrink_ends_with_one_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = trace_of_the_seed(tmp_path, capsys)
    code, printed, _ = run(capsys, "shrink", str(out), f"--out={tmp_path / 'small'}")
    assert code == 1
    small = read_trace(next((tmp_path / "small").glob("*.jsonl")))
    assert len(small.operations) == 1
    assert "shrunk from" in printed


def test_explain_says_who_asked_what_was_counted_and_what_would_have_avoided_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = trace_of_the_seed(tmp_path, capsys)
    code, printed, _ = run(capsys, "explain", str(out))
    assert code == 0
    assert "Step 1: r3 is preempted by recompute (time 1). It made way for r0." in printed
    assert "The engine counted 1 block as needed and saw 0 free." in printed
    assert "Really needed by the whole running set: 0 blocks; free: 0." in printed
    assert "a pool of 1 block more" in printed
    assert "29 preemptions in 59 steps, 29 of them needless" in printed


def test_engines_lists_what_is_there_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "engines")
    assert code == 0
    for name in ("reference", "vllm-v0", "smol-vllm"):
        assert name in printed
    assert "engine_options.append_check" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "nonesuch"], "nonesuch"),
        (["check", "reference", "--set=num_blocks"], "expected key=value"),
        (["check", "reference", "--set=num_blocks=many"], "num_blocks"),
        (["check", "reference", "--set=num_blocks=0"], "num_blocks"),
        (["check", "reference", "--set=colour=red"], "colour"),
        (["check", "reference", "--preset=tpu"], "tpu"),
        (["check", "reference", "--requirement=XYZ-1"], "XYZ-1"),
        (["fuzz", "reference", "--requirement=XYZ-1"], "XYZ-1"),
        (["fuzz", "reference", "--steps=0"], "steps"),
        (["fuzz", "reference", "--set=engine_options.append_check=fuzzy"], "append_check"),
        (["replay", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["explain", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["record", "reference", "10"], "PROMPT+OUTPUTS"),
        (["record", "reference", "0x1+1"], "PROMPT+OUTPUTS"),
        (["frobnicate"], "frobnicate"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_words_are_said_to_be_bad(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, complained = run(capsys, *words)
    assert code == 2
    assert said in printed + complained
    assert "Traceback" not in printed + complained


@pytest.mark.parametrize(
    "cut", ["", "half", "no footer", "binary", "other version", "no operation", "-4 blocks", "endless"]
)
def test_a_damaged_trace_is_refused(cut: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = trace_of_the_seed(tmp_path, capsys)
    raw = out.read_bytes()
    lines = raw.splitlines(keepends=True)
    damaged = {
        "": b"",
        "half": raw[: len(raw) // 2],
        "no footer": b"".join(lines[:-1]),
        "binary": b"\x80\x04\x95" + raw[:40],
        "no operation": lines[0] + lines[-1],
        "-4 blocks": raw.replace(b'"num_blocks":4', b'"num_blocks":-4', 1),
        "endless": raw.replace(b'"prompt_len":10', b'"prompt_len":1000000000', 1),
        "other version": raw.replace(b'"kind":"header"', b'"kind":"header","format":99', 1),
    }[cut]
    out.write_bytes(damaged)
    code, _, complained = run(capsys, "replay", str(out))
    assert code == 2
    assert str(out) in complained
    assert "Traceback" not in complained


def test_a_requirement_that_is_not_in_the_contract_cannot_be_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = trace_of_the_seed(tmp_path, capsys)
    out.write_text(out.read_text(encoding="utf-8").replace('"PRE-1"', '"PRE-99"'), encoding="utf-8")
    code, printed, _ = run(capsys, "replay", str(out))
    assert (code, "ERROR" in printed, "PRE-99" in printed) == (3, True, True)


@pytest.mark.parametrize("words", [("fuzz", "reference"), ("check", "reference")], ids="-".join)
def test_a_folder_that_cannot_be_one_is_refused_before_the_work(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    code, printed, complained = run(capsys, *words, f"--out={file}")
    assert (code, printed) == (2, "")
    assert "expected a folder" in " ".join(complained.replace("│", " ").split())
    assert file.read_text(encoding="utf-8") == "mine"


def test_record_does_not_replace_what_is_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, complained = run(capsys, "record", "reference", "1+1", f"--out={tmp_path}")
    assert code == 2
    assert "no regular file" in complained


def test_output_without_a_terminal_has_no_escapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, printed, _ = run(capsys, "check", "reference", "--requirement=ACC-1", f"--out={tmp_path}")
    assert "\x1b" not in printed


def test_the_preset_is_one_block_per_sequence() -> None:
    config = EngineConfig(**PRESETS["neuron"].fields)
    assert config.block_size == config.max_model_len
    assert config.num_blocks == config.max_num_seqs


ENDLESS = """
from conformance.adapters.reference import make as clean

def make(config):
    engine = clean(config)
    def schedule():
        while True:
            pass
    engine.schedule = schedule
    return engine
"""


def command(*words: str) -> list[str]:
    program = "import sys; from kvconform.cli import main; main(sys.argv[1:])"
    return [sys.executable, "-c", program, *words]


def environment(tmp_path: Path) -> dict[str, str]:
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return {**os.environ, "PYTHONPATH": path}


def test_an_engine_that_hangs_is_a_finding_with_its_trace(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    done = subprocess.run(
        command("fuzz", "endless:make", "--steps=5", "--call-seconds=0.2", "--requirement=PRG-8"),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "raised EngineHung: no answer within the bound on a call\n" in done.stdout
    assert "        none: it fails before any request is added\n" in done.stdout
    (trace,) = (tmp_path / "kvconform-findings").glob("*prg-8*.jsonl")
    (ready,) = (tmp_path / "kvconform-findings").glob("test_*prg_8*.py")
    ready.write_text(ready.read_text(encoding="utf-8").replace("Watchdog()", "Watchdog(0.2)"), encoding="utf-8")
    named = ("--engine=endless:make", "--call-seconds=0.2")
    for again, said in (
        (command("replay", str(trace), *named), "    stopped  this time at "),
        (command("shrink", str(trace), *named), "none: it fails before any request is added"),
        ([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ready)], "raised EngineHung"),
    ):
        after = subprocess.run(
            again, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
        )
        assert after.returncode == 1, after.stdout + after.stderr
        assert said in after.stdout
    for reader in (["explain"], ["page", f"--out={tmp_path / 'page.html'}"]):
        with pytest.raises(SystemExit) as ended:
            main([*reader, str(trace)])
        assert ended.value.code == 0


NO_DEVICE = """
from conformance.adapters.reference import make as clean

mended = clean

def make(config):
    raise RuntimeError("no device")
"""


def test_an_engine_that_cannot_be_built_is_a_finding_that_is_fixed_once_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_device.py").write_text(NO_DEVICE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, printed, _ = run(capsys, "fuzz", "no_device:make", "--steps=5", f"--out={tmp_path}", "--requirement=PRG-8")
    assert code == 1
    assert "PRG-8 MUST: the constructor raised RuntimeError: no device at " in printed
    assert "seed 1, no_device:make, 5 steps" in printed
    (trace,) = tmp_path.glob("*prg-8*.jsonl")
    code, printed, _ = run(capsys, "replay", str(trace), "--engine=no_device:make")
    assert (code, "FAILED" in printed, "on no_device:make, 0 steps" in printed) == (1, True, True)
    code, printed, _ = run(capsys, "replay", str(trace), "--engine=no_device:mended")
    assert (code, "FIXED" in printed) == (0, True)


def test_where_a_call_was_stopped_is_said_of_that_call_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ENDLESS.replace("while True:\n            pass", "raise KeyError(1)")
    source = source.replace("    return engine", "    engine.close = lambda: endless()\n    return engine")
    source += "\ndef endless():\n    while True:\n        pass\n"
    (tmp_path / "slow_to_close.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "trace.jsonl"
    code, _, _ = run(capsys, "record", "slow_to_close:make", "2+2", f"--out={out}", "--call-seconds=0.2")
    assert code == 1
    code, printed, _ = run(capsys, "replay", str(out), "--engine=slow_to_close:make", "--call-seconds=0.2")
    assert code == 1
    assert "schedule raised KeyError: 1" in printed
    assert "stopped  this time" not in printed


def test_interrupting_keeps_what_was_found(tmp_path: Path) -> None:
    # A shell starts what it puts in the background with interrupts ignored, which its children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command("fuzz", "reference", TOUCHED, "--steps=100000000"),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "kvconform-findings"
    for _ in range(600):
        if list(folder.glob("*.jsonl")):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, complained = process.communicate(timeout=120)
    assert process.returncode == 1, printed + complained
    assert "interrupted" in printed
    for trace in folder.glob("*.jsonl"):
        assert read_trace(trace).footer.verdict == "violated"


def test_an_encoding_without_the_signs_does_not_end_the_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvconform", "engines"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"reference" in done.stdout
