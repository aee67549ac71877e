"""Local training: what a client does with a received model."""

from fedproto.engines.training.options import TrainOptions

__all__ = ["TrainOptions"]
