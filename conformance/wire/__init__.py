"""Engines in another process: JSON lines on its standard input and output, one request, one response.

`messages` says what is on the wire, `schema` publishes it, `peer` is the harness's end and `server` the engine's.
docs/reference/wire-protocol.md is the page for who writes an engine in another language.
"""
