"""The processes engine's parts: memory that processes share, and the pool of workers."""
