"""What all sources of a user's own pictures share: from a list of files to a federation."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedproto.data.base import DATASETS, DataSource, OnProgress
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.images import SUFFIXES, put_images
from fedproto.data.partition import by_key
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import SharedOut
from fedproto.disk.files import user_path
from fedproto.errors import DataError, unknown_name
from fedproto.options import option


@dataclass(frozen=True)
class Listing:
    """Which pictures there are, with the name of each one's class, and of its client if known."""

    tree: FileTree
    names: Sequence[str]
    labels: Sequence[str]
    clients: Sequence[str] | None
    classes: Sequence[str]


@dataclass(frozen=True)
class OwnPictures(SharedOut):
    """Pictures of one size with a class each; clients of their own, or shared out."""

    path: str = option("", "where the data is")
    size: int = option(
        32, "width and height that all pictures are brought to", at_least=1, at_most=4096
    )
    channels: int = option(3, "1 for grey, 3 for colour", at_least=1, at_most=3)
    classes: tuple[str, ...] = option((), "the classes in order; those that are found by default")

    @abc.abstractmethod
    def listing(self, path: Path) -> Listing:
        """Finds the pictures."""

    def load(self, root: Path) -> Federation:
        """Decodes the pictures if that was not done before, and makes clients."""
        listing, arrays = self.arrays(root)
        labels = np.array(arrays["labels"])
        parts = self.share(labels) if listing.clients is None else by_key(np.array(listing.clients))
        return self.federation(
            Path(self.path).stem,
            MappedSamples(torch.from_numpy(arrays["images"]), torch.from_numpy(labels)),
            parts,
            num_classes=len(listing.classes),
            input_shape=(self.channels, self.size, self.size),
            class_names=listing.classes,
        )

    def arrays(self, root: Path, on_progress: OnProgress | None = None) -> tuple[Listing, Arrays]:
        """Decodes the pictures, and says which there are."""
        if self.channels == 2:
            raise DataError("channels must be 1 for grey or 3 for colour, not 2")
        listing = self.listing(own_path(self.path, root))
        options = {"size": self.size, "channels": self.channels, "classes": list(listing.classes)}

        def build(builder: Builder) -> None:
            put_images(builder, listing.tree, listing.names, self.channels, self.size, on_progress)
            label_of = {name: label for label, name in enumerate(listing.classes)}
            builder.put("labels", np.array([label_of[name] for name in listing.labels]))

        name = DATASETS.name_of(type(self))
        return listing, prepared(name, listing.tree.sources, options, build)


def own_path(path: str, root: Path) -> Path:
    """A user's path: from the current folder, or else from the data root."""
    if not path:
        raise DataError("path is missing: set data.path to where your data is")
    found = user_path(path, root)
    if found is None:
        raise DataError(f"path {path} does not exist")
    return found


def located(source: DataSource) -> DataSource:
    """The same data, wherever a program is started from later.

    A path that leads from the current folder to something becomes absolute. One below the data root
    stays as it is, so that a run can move to where that root is another.
    """
    path = getattr(source, "path", "")
    if not isinstance(path, str) or not path:
        return source
    found = user_path(path)
    if found is None or str(found.absolute()) == path:
        return source
    return replace(source, path=str(found.absolute()))  # type: ignore[call-arg]


def is_picture(name: str) -> bool:
    """Whether a file's name ends like a picture's."""
    return name.lower().endswith(SUFFIXES)


def checked_classes(found: Sequence[str], given: Sequence[str], where: object) -> list[str]:
    """The classes in order: those given, or those found."""
    if not given:
        return sorted(set(found))
    for name in found:
        if name not in given:
            raise DataError(f"{where}: {unknown_name('class', name, given)}")
    return list(given)
