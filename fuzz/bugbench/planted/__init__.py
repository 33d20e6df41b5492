"""Faults modelled on real reports, a module for each group of families. `fuzz.bugbench.registry.load` reads all."""
