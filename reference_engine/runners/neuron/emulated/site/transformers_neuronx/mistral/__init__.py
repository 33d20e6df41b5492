"""Mistral on the device."""
