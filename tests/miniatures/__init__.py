"""Miniature engines: one that keeps the contract, and for each requirement one that breaks it on purpose."""
