"""The version of kvconform; one place for wheel, traces and reports."""

__version__ = "0.1.0"
