"""The executable specification: a block pool, a block manager and a scheduler that keep the contract.

Standard library only, and ignorant of everything above it. It is written to be read first and run second, in
this order: `config`, `request`, `block_pool`, `prefix_cache`, `block_manager`, `append_check`, `scheduler`, `engine`.
A docstring names the requirements of the contract that a function upholds.
"""
