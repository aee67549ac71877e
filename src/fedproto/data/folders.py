"""A user's own pictures in folders: one per class, or one per client and in each one per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedproto.data.base import DATASETS
from fedproto.data.files import FileTree, open_tree
from fedproto.data.own import Listing, OwnPictures, checked_classes, is_picture
from fedproto.errors import DataError


@DATASETS.register("images")
@dataclass(frozen=True)
class ImageFolder(OwnPictures):
    """Your own pictures as ``class/picture``, shared out among clients."""

    levels: ClassVar[tuple[str, ...]] = ("class",)

    def listing(self, path: Path) -> Listing:
        """A folder per class, in one per client where there are such; only pictures count."""
        tree, form = open_tree(path), "/".join((*self.levels, "picture"))
        deep = [name for name in tree.sources if name.count("/") >= len(self.levels)]
        pictures = [name for name in deep if is_picture(name)]
        if not pictures:
            raise DataError(f"{path} holds no folders of pictures; expected {form}")
        top, last = ([name.split("/")[level] for name in pictures] for level in (0, self._class()))
        for folder in sorted(path.iterdir()):
            if folder.is_dir() and folder.name[0] != "." and folder.name not in top:
                raise DataError(
                    f"{self.levels[0]} folder {folder} holds no pictures; expected {form}"
                )
        classes = checked_classes(last, self.classes, path)
        sources = {name: tree.sources[name] for name in pictures}
        clients = top if self._class() else None
        return Listing(FileTree(path, sources), pictures, last, clients, classes)

    def _class(self) -> int:
        """At which level classes are."""
        return self.levels.index("class")


@DATASETS.register("client-folders")
@dataclass(frozen=True)
class ClientFolders(ImageFolder):
    """Your own pictures as ``client/class/picture``; the options of the partition do not matter."""

    levels = ("client", "class")
