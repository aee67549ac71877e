"""A real federation over Flower: the same strategies, round loop and records as a simulation.

Only the modules of this package import ``flwr``, which comes with the extra ``fedproto[flower]``;
this file and `fedproto.config.flower` do not, so that recipes can be read without it.
"""
