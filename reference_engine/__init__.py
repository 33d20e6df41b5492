"""The executable specification: a block pool, a block manager and a scheduler that keep the contract.

Standard library only, and ignorant of everything above it. It is written to be read first and run second.
"""
