"""Model runners: what executes the steps. Each is imported, with its libraries, by whoever wants it."""
