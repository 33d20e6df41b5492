"""Serving on a Neuron device: a fixed batch of cache lines, one request to a line, shapes compiled ahead.

`device` says what a device is to a runner, `lines` which request has which line, `runner` executes the plans of the
reference engine. `driver` drives transformers-neuronx, the real package and the emulated one alike, in the process
it runs in; `worker` has a process of its own for it. `detect` finds out whether there is a device at all, and
`traced` is one decode step without transformers-neuronx. Nothing here imports the SDK, or torch, before it is asked
to build something.
"""
