"""Adapters: each makes one engine speak `conformance.protocol`, and declares what the engine can do."""
