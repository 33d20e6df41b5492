"""Compiles the modules that run in every step into the wheel, where that was asked for.

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 pip install .

Which ones is said in pyproject.toml. Everything is made in a folder of its own, so that the tree stays as it is: a
compiled module that lay beside its source would be imported in its place, and be stale at the next edit.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface[Any]):
    """Adds a compiled module to the wheel for each of the configured ``modules`` (patterns of files)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # its modules are read from the tree
        from mypyc.build import mypycify  # noqa: PLC0415 - a dependency only where this runs
        from setuptools import Distribution  # noqa: PLC0415 - as above

        root, self._folder = Path(self.root), tempfile.TemporaryDirectory(prefix="kvconform-build-")
        folder = Path(self._folder.name)
        modules = sorted(str(file.relative_to(root)) for one in self.config["modules"] for file in root.glob(one))
        with _inside(root):
            extensions = mypycify(
                modules, target_dir=str(folder / "c"), opt_level="2", debug_level="0", group_name="kvconform"
            )
            build = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
            build.build_lib, build.build_temp = str(folder / "lib"), str(folder / "objects")
            build.ensure_finalized()
            build.run()
        for file in sorted((folder / "lib").rglob("*.*")):
            build_data["force_include"][str(file)] = str(file.relative_to(folder / "lib"))
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Where mypy finds the packages, and its settings."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
