"""What `pytest neuron_tests` does where there is no device, no torch, or too many workers: one sentence, no import."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron.sessions import Sessions
from neuron_tests import assertions

ROOT = Path(__file__).resolve().parents[2]
NO_DEVICE = "no Neuron device: the kernel lists no driver `neuron` in /proc/devices"

# A plugin that takes the device away, should the machine have one, and one that makes each import of these an error.
WITHOUT_DEVICE = f"""
from reference_engine.runners.neuron import detect

detect.find = lambda host=None: detect.Presence(reason={NO_DEVICE!r})
"""
WITHOUT_LIBRARIES = """
import sys

NAMES = ("libneuronxla", "neuronxcc", "safetensors", "torch", "torch_neuronx", "transformers", "transformers_neuronx")


class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            print(f"IMPORTED {name}")
            raise ImportError(f"{name} is not to be imported")


sys.meta_path.insert(0, Refusing())
assert not any(name in sys.modules for name in NAMES)
"""
PLUGINS = ["-p", "without_device", "-p", "without_libraries"]
SUITE = ["--pyargs", "neuron_tests"]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    """Sessions on a machine with neither a device nor the libraries."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "without_device.py").write_text(WITHOUT_DEVICE, encoding="utf-8")
    (folder / "without_libraries.py").write_text(WITHOUT_LIBRARIES, encoding="utf-8")
    return Sessions(folder)


def test_without_a_device_the_hardware_suite_is_skipped_with_the_reason(sessions: Sessions) -> None:
    done = sessions.run(*PLUGINS, *SUITE, "-m", "neuron", "-rs")
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SKIPPED"))
    assert line.endswith(NO_DEVICE)
    assert "IMPORTED" not in done.stdout


def test_where_a_device_is_required_the_session_ends_with_one_sentence(sessions: Sessions) -> None:
    done = sessions.run(*PLUGINS, *SUITE, "-m", "neuron", KVCONFORM_REQUIRE_NEURON="1")
    assert done.returncode == 1
    assert done.stdout.count(f"KVCONFORM_REQUIRE_NEURON is set: {NO_DEVICE}") == 1
    assert "Traceback" not in done.stdout
    assert "IMPORTED" not in done.stdout
    assert len(done.stdout.splitlines()) < 15, done.stdout


def test_collecting_imports_nothing_of_the_device(sessions: Sessions) -> None:
    done = sessions.run(*PLUGINS, *SUITE, "--collect-only", "-q", "-m", "neuron or not neuron")
    assert done.returncode == 0, done.stdout
    assert "IMPORTED" not in done.stdout
    for kind in ("emulated", "hardware"):
        assert f"test_tokens_are_those_of_hugging_face_alone_and_in_a_full_batch[{kind}]" in done.stdout


def test_without_the_marker_the_hardware_is_left_out_and_said_to_be(sessions: Sessions) -> None:
    done = sessions.run(*PLUGINS, *SUITE, "-rs")
    assert done.returncode == 0, done.stdout
    assert "tests of the Neuron device are left out; -m neuron runs them" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SKIPPED"))
    assert "the emulated device needs torch, which is not installed" in line


def test_where_the_emulated_device_is_required_the_session_ends_with_one_sentence(sessions: Sessions) -> None:
    done = sessions.run(*PLUGINS, *SUITE, KVCONFORM_REQUIRE_EMULATED="1")
    assert done.returncode == 1
    assert "KVCONFORM_REQUIRE_EMULATED is set: the emulated device needs torch" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_hardware_is_not_shared_among_workers(sessions: Sessions) -> None:
    done = sessions.run(*PLUGINS, *SUITE, "-m", "neuron", "-n", "2")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the cores of a Neuron device belong to one process: run its suite without -n" in done.stdout


def test_from_the_root_of_the_repository_the_marker_finds_the_suite(sessions: Sessions) -> None:
    words = ["--rootdir", str(ROOT), str(ROOT / "neuron_tests"), "-m", "neuron", "-rs"]
    done = sessions.run(*PLUGINS, *words, KVCONFORM_REQUIRE_NEURON="0")
    assert done.returncode == 0, done.stdout
    assert NO_DEVICE in done.stdout


def test_packages_that_are_placeholders_end_the_session_with_one_sentence(sessions: Sessions, tmp_path: Path) -> None:
    (tmp_path / "with_device.py").write_text(WITHOUT_DEVICE.replace(repr(NO_DEVICE), "None"), encoding="utf-8")
    for name in ("libneuronxla", "neuronxcc", "torch_neuronx"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    (tmp_path / "transformers_neuronx.py").write_text("raise ImportError('placeholder')", encoding="utf-8")
    done = sessions.run("-p", "with_device", *SUITE, "-m", "neuron", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "transformers-neuronx cannot be imported" in done.stdout
    assert "install transformers-neuronx==0.13.1216 with PIP_EXTRA_INDEX_URL set to the Neuron index" in done.stdout
    assert "Traceback" not in done.stdout


# ----------------------------------------------------------------------------------------------------- the page

PAGE = ROOT / "docs" / "reference" / "neuron-assertions.md"


def test_the_page_of_assertions_is_what_the_data_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert assertions.main(["--check", str(PAGE)]) == 0, capsys.readouterr().err


def test_a_page_that_is_not_current_is_said_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert assertions.main(["--check", str(page)]) == 1
    assert f"run python -m neuron_tests.assertions --write {page}" in capsys.readouterr().err
    assert assertions.main(["--write", str(page)]) == 0
    assert assertions.main(["--check", str(page)]) == 0


def test_the_assertions_are_numbered_from_1_to_34() -> None:
    assert list(assertions.ASSERTIONS) == list(range(1, 35))
