"""What is right: the contract, the session that drives an engine, the oracles that judge it, the suite."""
