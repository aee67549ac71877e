"""Data sets as federations, one file each; see `federation`."""

from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.data.federation import Client, Federation, split_clients
from fedproto.data.samples import Samples, TensorSamples

__all__ = [
    "DATASETS",
    "Client",
    "DataSource",
    "Federation",
    "Samples",
    "TensorSamples",
    "data_root",
    "split_clients",
]
