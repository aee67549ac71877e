"""A user's own pictures in one folder per client, and in each one folder per class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedproto.data.base import DATASETS
from fedproto.data.files import FileTree, open_tree
from fedproto.data.own import Listing, OwnPictures, checked_classes, is_picture
from fedproto.errors import DataError


@DATASETS.register("client-folders")
@dataclass(frozen=True)
class ClientFolders(OwnPictures):
    """Your own pictures as ``client/class/picture``; the options of the partition do not matter."""

    def listing(self, path: Path) -> Listing:
        """A client per folder and a class per folder in it."""
        tree = open_tree(path)
        pictures = [name for name in tree.sources if is_picture(name) and name.count("/") >= 2]
        clients = [name.split("/")[0] for name in pictures]
        labels = [name.split("/")[1] for name in pictures]
        for folder in sorted(path.iterdir()):
            hidden = folder.name.startswith(".") or not folder.is_dir()
            if not hidden and folder.name not in clients:
                raise DataError(
                    f"client folder {folder} holds no folders of pictures; expected"
                    " client/class/picture"
                )
        if not pictures:
            raise DataError(f"{path} holds no client/class/picture")
        classes = checked_classes(labels, self.classes, path)
        sources = {name: tree.sources[name] for name in pictures}
        return Listing(FileTree(path, sources), pictures, labels, clients, classes)
