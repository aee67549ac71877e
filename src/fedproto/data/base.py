"""What a data set is: options, and a way to load a federation from them."""

from __future__ import annotations

import abc
import os
from dataclasses import dataclass
from pathlib import Path

from fedproto.data.federation import Federation
from fedproto.options import Options, option
from fedproto.registry import Registry


@dataclass(frozen=True)
class DataSource(Options, abc.ABC):
    """A data set and how it is shared out among clients."""

    seed: int = option(0, "seed of generation, partition and 80/20 split", at_least=0)

    @abc.abstractmethod
    def load(self, root: Path) -> Federation:
        """Builds the federation.

        Args:
            root: The folder that holds downloaded data sets.
        """

    @classmethod
    def status(cls, root: Path) -> str:
        """Whether it can be loaded here, in a few words."""
        del root
        return "ready (nothing to download)"


DATASETS: Registry[DataSource] = Registry("data set", "fedproto.data")


def data_root() -> Path:
    """The folder of downloaded data sets: ``FEDPROTO_DATA``, or a per-user cache."""
    given = os.environ.get("FEDPROTO_DATA")
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else (Path(cache) if cache else Path.home() / ".cache") / "fedproto"
