"""``kvconform plan``: the answer, the lines to set, and the curve as a picture."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from kvconform.cli import main

SMALL = ("--set=block_size=8", "--set=max_model_len=8", "--set=engine_options.append_check=touched")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", "reference", *SMALL, *words])
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


def test_it_says_how_many_why_and_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "--batch=1,4")
    assert code == 0
    assert "reference 1: max_num_seqs 1, block_size 8, max_model_len 8: 2 blocks" in printed
    assert "reference 1: max_num_seqs 4, block_size 8, max_model_len 8: 5 blocks" in printed
    assert "+ 1 more: with 4 blocks 6 preemptions, the first without need" in printed
    assert "to set: num_blocks=5 block_size=8 max_num_seqs=4 max_model_len=8" in printed


@pytest.mark.parametrize(("suffix", "beginning"), [("svg", b"<?xml"), ("png", b"\x89PNG\r\n")])
def test_the_curve_is_drawn_the_same_each_time(
    suffix: str, beginning: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    pictures = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for picture in pictures:
        code, printed, _ = run(capsys, "--batch=1,2", f"--plot={picture}")
        assert code == 0
        assert f"curves in {picture}" in printed
    assert pictures[0].read_bytes().startswith(beginning)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_what_is_missing_to_draw_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refusing(name: str, *words: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *words)

    monkeypatch.setattr(builtins, "__import__", refusing)
    code, printed, complained = run(capsys, f"--plot={tmp_path / 'curve.svg'}")
    assert (code, printed) == (2, "")
    assert "--plot needs matplotlib: pip install 'kvconform[plots]'" in complained


def test_a_picture_of_an_unknown_kind_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, printed, complained = run(capsys, f"--plot={tmp_path / 'curve.bmp'}")
    assert (code, printed) == (2, "")
    assert "expected a file that ends in .png or .svg" in complained
