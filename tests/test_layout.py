"""The shape of the repository: what is declared in one place and used in another has to agree."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement as Dependency

from conformance import requirements
from conformance.oracles import ORACLES, Oracle

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("conformance", "fuzz", "kvconform", "neuron_tests", "reference_engine")
DEVICE_LIBRARIES = {
    "libneuronxla",
    "neuronx_cc",
    "safetensors",
    "torch",
    "torch_neuronx",
    "transformers",
    "transformers_neuronx",
}

FIRST_EDITION = {
    "ACC": 10,
    "KV": 6,
    "LIM": 4,
    "PRG": 8,
    "PRE": 7,
    "FAIR": 2,
    "CCH": 3,
    "DET": 2,
    "DEV": 5,
    "ENC": 1,
    "ID": 1,
}  # family: its last number


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tox() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    return parser


def imported(path: Path) -> set[str]:
    """The top-level names of what the module at ``path`` imports from outside its own package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


# ----------------------------------------------------------------------------------------------- requirements


def test_the_page_of_requirements_is_what_the_data_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = requirements.main(["--check", str(ROOT / "docs" / "reference" / "requirements.md")])
    assert code == 0, capsys.readouterr().err


def test_no_requirement_of_the_first_edition_is_missing_or_renamed() -> None:
    first = [row.id for row in requirements.load().values() if row.since == "1"]
    assert first == [f"{family}-{n}" for family, last in FIRST_EDITION.items() for n in range(1, last + 1)]


@pytest.mark.parametrize("module", sorted({row.oracle for row in requirements.load().values()}))
def test_the_module_that_judges_a_requirement_exists(module: str) -> None:
    assert importlib.import_module(module).__doc__


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda oracle: oracle.__name__)
def test_an_oracle_judges_what_the_contract_gives_it(oracle: type[Oracle]) -> None:
    given = {row.id for row in requirements.load().values() if row.oracle == oracle.__module__}
    assert set(oracle.requirements) == given


# --------------------------------------------------------------------------------------------------- packages


def test_the_wheel_lists_every_package_and_no_other(project: dict[str, Any]) -> None:
    found = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert tuple(found) == PACKAGES
    assert tuple(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    assert tuple(project["tool"]["importlinter"]["root_packages"]) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed_and_says_what_it_is_for(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()
    undescribed = [path for path in modules(package) if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert undescribed == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_of_tests_hides_a_package(package: str) -> None:
    assert not (ROOT / "tests" / package / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(package: str) -> None:
    folders = {path.parent for path in modules(package)}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_reference_engine_needs_only_the_standard_library() -> None:
    allowed = sys.stdlib_module_names | {"reference_engine"}
    for path in modules("reference_engine"):
        devices = DEVICE_LIBRARIES if "runners" in path.parts else set()
        assert imported(path) <= allowed | devices, path.name


# ----------------------------------------------------------------------------------------------- declarations


def test_the_matrix_of_tox_is_that_of_the_classifiers(project: dict[str, Any], tox: configparser.ConfigParser) -> None:
    prefix = "Programming Language :: Python :: 3."
    declared = [line.removeprefix(prefix) for line in project["project"]["classifiers"] if line.startswith(prefix)]
    listed = re.findall(r"\bpy3(\d+)\b", tox["tox"]["env_list"])
    assert listed == declared
    assert project["project"]["requires-python"] == f">=3.{declared[0]}"
    versions = (ROOT / ".python-version").read_text(encoding="utf-8").split()
    assert sorted(versions) == [f"3.{minor}" for minor in declared]


def test_commits_are_checked_by_the_linters_that_tox_runs(project: dict[str, Any]) -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'"(\S+==\S+)"', hooks)) == set(project["dependency-groups"]["lint"])


def test_the_neuron_packages_are_pinned_so_that_a_placeholder_cannot_stand_in(
    project: dict[str, Any],
) -> None:
    wanted = [Dependency(line) for line in project["project"]["optional-dependencies"]["neuron"]]
    pinned = {dependency.name for dependency in wanted if str(dependency.specifier).startswith("==")}
    assert pinned == {"libneuronxla", "neuronx-cc", "torch-neuronx", "transformers-neuronx"}


def test_every_dependency_of_the_project_is_in_the_lock_beside_the_engines(project: dict[str, Any]) -> None:
    lines = (ROOT / "requirements" / "harness.txt").read_text(encoding="utf-8").splitlines()
    locked = {pin.name.lower(): pin for pin in map(Dependency, lines[1:])}
    for line in project["project"]["dependencies"]:
        wanted = Dependency(line)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"}):
            version = str(locked[wanted.name.lower()].specifier).removeprefix("==")
            assert wanted.specifier.contains(version), line


@pytest.mark.parametrize("engine", ["vllm-0.6.0", "vllm-0.8.5"])
def test_the_lock_of_an_engine_agrees_with_that_of_the_harness(engine: str) -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        return dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))

    harness, locked = pins("harness"), pins(engine)
    assert {name: locked[name] for name in locked.keys() & harness.keys()} == {
        name: harness[name] for name in locked.keys() & harness.keys()
    }
    assert "torch" in locked
