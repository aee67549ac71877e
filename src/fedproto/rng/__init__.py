"""Randomness: streams by purpose, round and client, and the schedule drawn from them."""

from fedproto.rng.streams import Indices, Purpose, seeded, stream, torch_seed

__all__ = ["Indices", "Purpose", "seeded", "stream", "torch_seed"]
