"""An example engine: a scheduler, a pool of KV-cache blocks, and the seat that kvconform takes."""
