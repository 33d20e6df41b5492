"""How a command ends, for scripts and CI."""

from __future__ import annotations

from typing import Final

HOLDS: Final = 0
"""The contract holds."""
VIOLATED: Final = 1
USAGE: Final = 2
"""Usage or configuration."""
BROKEN: Final = 3
"""The suite or an adapter broke."""
INTERRUPTED: Final = 130
"""By the user, with nothing found so far."""
