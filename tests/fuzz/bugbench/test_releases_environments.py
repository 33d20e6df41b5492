"""What a release runs in: built once, from the lock that serves it, and shared by its neighbours."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fuzz.bugbench.releases.environments import ROOT, CannotBuild, Environments, default_cache
from fuzz.bugbench.releases.records import Book, Lock, PairsError

BOOK = Book(
    lock=(
        Lock(distribution="vllm", releases="<0.24", file="old.txt"),
        Lock(distribution="vllm", releases=">=0.24,<0.40", file="new.txt"),
    ),
    pair=(),
)


class FakePip:
    """Does what venv and pip leave behind, and keeps the commands."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.fails = False

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        if self.fails:
            raise subprocess.CalledProcessError(1, list(command), stderr="no matching distribution")
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
        if "--target" in command:
            package = Path(command[command.index("--target") + 1]) / "vllm"
            package.mkdir(parents=True)
            (package / "scheduler.py").touch()
            (package / "_C.abi3.so").touch()


def quiet(text: str) -> None:
    """Nobody is told."""


@pytest.fixture
def pip() -> FakePip:
    return FakePip()


@pytest.fixture
def environments(tmp_path: Path, pip: FakePip) -> Environments:
    locks = tmp_path / "requirements"
    locks.mkdir()
    (locks / "harness.txt").write_text("# a comment\nmsgspec==0.23.0\n", encoding="utf-8")
    (locks / "old.txt").write_text("torch==2.13.0\nvllm==0.16.0\nvllm-neighbour==1\n", encoding="utf-8")
    (locks / "new.txt").write_text("torch==2.13.0\nvllm-cpu==0.32.0\n", encoding="utf-8")
    return Environments(BOOK, tmp_path / "cache", requirements=locks, python="a-python", say=quiet, run=pip)


def test_a_release_stands_beside_the_dependencies_of_its_lock(environments: Environments, pip: FakePip) -> None:
    place = environments.place("vllm", "0.12.0")
    release, root = place.path
    assert root == ROOT
    assert release.name == "vllm-0.12.0"
    assert (release / "vllm" / "scheduler.py").exists()
    environment = place.python.parents[1]
    assert environment.name.startswith("old-")
    locked = (environment / "locked.txt").read_text(encoding="utf-8")
    assert locked == "msgspec==0.23.0\ntorch==2.13.0\nvllm-neighbour==1\n"
    assert pip.commands[0][:3] == ["a-python", "-m", "venv"]
    assert pip.commands[2][-1] == "vllm==0.12.0"
    assert all("--no-deps" in command for command in pip.commands[1:])


def test_compiled_parts_are_not_kept(environments: Environments) -> None:
    release = environments.place("vllm", "0.12.0").path[0]
    assert sorted(file.name for file in (release / "vllm").iterdir()) == ["scheduler.py"]


def test_what_is_there_is_not_built_again(environments: Environments, pip: FakePip) -> None:
    first = environments.place("vllm", "0.12.0")
    built = len(pip.commands)
    assert environments.place("vllm", "0.12.0") == first
    assert len(pip.commands) == built


def test_neighbours_share_their_dependencies(environments: Environments, pip: FakePip) -> None:
    one, other, later = (environments.place("vllm", release) for release in ("0.12.0", "0.14.0", "0.33.0"))
    assert one.python == other.python
    assert one.path[0] != other.path[0]
    assert later.python != one.python
    assert sum("venv" in command for command in pip.commands) == 2


def test_another_lock_makes_another_environment(environments: Environments, tmp_path: Path) -> None:
    before = environments.place("vllm", "0.12.0").python
    (tmp_path / "requirements" / "old.txt").write_text("torch==2.14.0\n", encoding="utf-8")
    assert environments.place("vllm", "0.12.0").python != before


def test_a_build_that_fails_says_so_and_leaves_nothing_that_looks_whole(
    environments: Environments, pip: FakePip
) -> None:
    pip.fails = True
    with pytest.raises(CannotBuild, match=r"^old-[0-9a-f]{8}: a-python -m venv .* failed: no matching distribution$"):
        environments.place("vllm", "0.12.0")
    pip.fails = False
    assert environments.place("vllm", "0.12.0").path[0].exists()


def test_a_release_without_a_lock_is_refused(environments: Environments) -> None:
    with pytest.raises(PairsError, match=r"no \[\[lock\]\] covers vllm 0\.41\.0"):
        environments.place("vllm", "0.41.0")


def test_without_the_locks_of_the_source_tree_it_is_said_where_they_are(tmp_path: Path, pip: FakePip) -> None:
    environments = Environments(BOOK, tmp_path, requirements=tmp_path, say=quiet, run=pip)
    with pytest.raises(CannotBuild, match="runs from a source tree"):
        environments.place("vllm", "0.12.0")


def test_a_process_there_runs_the_release_and_not_what_is_installed_here(environments: Environments) -> None:
    place = environments.place("vllm", "0.12.0")
    variables = place.environment()
    assert variables["PYTHONPATH"].split(":")[0] == str(place.path[0])
    assert variables["OMP_NUM_THREADS"] == "1"


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "kvconform" / "releases"
