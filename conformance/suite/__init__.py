"""The conformance suite: ``pytest --pyargs conformance.suite --engine ENGINE``."""
