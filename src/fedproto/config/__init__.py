"""Configuration of runs: typed sections, the same in Python, recipes and run directories."""

from fedproto.config.run import CHOICES as CHOICES
from fedproto.config.run import SECTIONS as SECTIONS
from fedproto.config.run import RunConfig as RunConfig
from fedproto.config.run import Sections as Sections
from fedproto.config.run import differences as differences
from fedproto.config.run import digest_of as digest_of
from fedproto.config.run import flatten as flatten
from fedproto.config.run import read_config as read_config
