"""The registry: what names mean, what is known, and what is said of a name that means nothing."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from conformance import engines
from conformance.engines import ENTRY_POINTS, EngineNotFound, installed, load
from conformance.protocol import EngineConfig

ADAPTER = """
from conformance.adapters.reference import make
from conformance.adapters import reference

class Nested:
    make = staticmethod(make)

number = 7
"""


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An adapter in the current directory; the name of its module."""
    (tmp_path / "adapter_in_the_making.py").write_text(ADAPTER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("adapter_in_the_making", None)
    return "adapter_in_the_making"


def entry_point(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = importlib.metadata.EntryPoint(name, value, ENTRY_POINTS)
    monkeypatch.setattr(engines, "_entry_points", lambda: [point])


def test_the_reference_engine_is_always_there() -> None:
    source = load("reference")
    assert source.available
    assert source.factory(EngineConfig()).capabilities.engine == "reference"


def test_a_name_does_not_import_its_engine() -> None:
    before = set(sys.modules)
    load("conformance.adapters.nowhere:make")
    assert "conformance.adapters.nowhere" not in set(sys.modules) - before


def test_an_engine_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = engines.BuiltIn("conformance.adapters.none:make", "none", ("kvconform-no-such-engine",))
    monkeypatch.setitem(engines.BUILT_IN, "none-such", missing)
    found = next(source for source in installed() if source.name == "none-such")
    assert not found.available
    assert found.reason == "not installed: pip install kvconform-no-such-engine"
    with pytest.raises(
        EngineNotFound,
        match="and it is not installed: pip install kvconform-no-such-engine",
    ):
        load("none-such")


def test_the_second_distribution_of_an_engine_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    either = engines.BuiltIn("conformance.adapters.none:make", "none", ("kvconform-no-such-engine", "pytest"))
    monkeypatch.setitem(engines.BUILT_IN, "either", either)
    assert load("either").installed_version == importlib.metadata.version("pytest")


def test_an_unknown_name_is_told_the_forms_and_the_known_names() -> None:
    with pytest.raises(EngineNotFound) as caught:
        load("sample-engine")
    said = str(caught.value)
    assert said.startswith("no engine 'sample-engine': expected a built-in name, an entry point")
    known = said.partition("known names: ")[2].partition(".")[0].split(", ")
    assert known == [source.name for source in installed()]
    assert {"reference", "vllm-v0", "smol-vllm"} <= set(known)


@pytest.mark.parametrize("name", ["", ":", "module:", ":make", "a b:make", "module:a-b", "1:2"])
def test_what_is_no_module_and_factory_is_no_engine(name: str) -> None:
    with pytest.raises(EngineNotFound, match="expected a built-in name"):
        load(name)


def test_an_adapter_in_the_current_directory_is_found(adapter: str) -> None:
    assert load(f"{adapter}:make").factory(EngineConfig()).capabilities.engine == "reference"


def test_a_factory_may_be_an_attribute_of_an_attribute(adapter: str) -> None:
    assert load(f"{adapter}:Nested.make").factory(EngineConfig()).capabilities.version == "1"


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(EngineNotFound, match="there is no module 'no_such_module'"):
        load("no_such_module:make").resolve()


def test_a_module_that_an_adapter_lacks_is_named(adapter: str) -> None:
    Path(f"{adapter}.py").write_text("import kvconform_no_such_dependency", encoding="utf-8")
    with pytest.raises(EngineNotFound, match="needs 'kvconform_no_such_dependency', which is not installed"):
        load(f"{adapter}:make").resolve()


def test_a_factory_that_is_not_there_is_told_what_is(adapter: str) -> None:
    with pytest.raises(
        EngineNotFound,
        match="expected a function of an EngineConfig, got make, reference, Nested, number",
    ):
        load(f"{adapter}:build").resolve()


def test_what_cannot_be_called_is_no_factory(adapter: str) -> None:
    with pytest.raises(EngineNotFound, match="has no factory 'number'"):
        load(f"{adapter}:number").resolve()


def test_entry_points_of_other_packages_are_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, "other", "conformance.adapters.reference:make")
    assert load("other").factory(EngineConfig()).capabilities.engine == "reference"
    assert [source.name for source in installed()][-1] == "other"


def test_an_entry_point_does_not_hide_a_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, "reference", "somewhere.else:make")
    assert load("reference").origin == "built-in"
    assert [source.name for source in installed()].count("reference") == 1
