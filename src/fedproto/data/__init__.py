"""Data sets as federations, one file each; see `federation`."""

from fedproto.data.base import DATASETS as DATASETS
from fedproto.data.base import DataSource as DataSource
from fedproto.data.base import data_root as data_root
from fedproto.data.federation import Client as Client
from fedproto.data.federation import Federation as Federation
from fedproto.data.federation import split_clients as split_clients
from fedproto.data.samples import Samples as Samples
from fedproto.data.samples import TensorSamples as TensorSamples
