"""``pytest --pyargs fuzz --engine NAME``: the Hypothesis profiles, and which one is used unless another is named."""

from __future__ import annotations

import pytest
from hypothesis import settings

from fuzz.machine import register_profiles

register_profiles()


def pytest_configure(config: pytest.Config) -> None:
    """The gate's profile, unless ``--hypothesis-profile`` names another."""
    if not config.getoption("--hypothesis-profile", default=None):
        settings.load_profile("kvconform-ci")
