"""Llama on the device."""
