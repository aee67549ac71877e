"""Randomness: streams by purpose, round and client, and many of them at once."""

from fedproto.rng.streams import Indices, Purpose, entropy, seeded, stream, torch_seed

__all__ = ["Indices", "Purpose", "entropy", "seeded", "stream", "torch_seed"]
