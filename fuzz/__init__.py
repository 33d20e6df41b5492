"""Finds trouble: operations drawn at random, failures shrunk, findings kept as files."""
