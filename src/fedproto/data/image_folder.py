"""A user's own pictures in one folder per class, shared out by any partitioner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedproto.data.base import DATASETS
from fedproto.data.files import FileTree, open_tree
from fedproto.data.own import Listing, OwnPictures, checked_classes, is_picture
from fedproto.errors import DataError


@DATASETS.register("images")
@dataclass(frozen=True)
class ImageFolder(OwnPictures):
    """Your own pictures as ``class/picture``, shared out among clients."""

    def listing(self, path: Path) -> Listing:
        """A class per folder; files that are no pictures are passed over."""
        tree = open_tree(path)
        folders = sorted(each.name for each in path.iterdir() if _is_visible_folder(each))
        pictures = [name for name in tree.sources if is_picture(name) and "/" in name]
        labels = [name.split("/")[0] for name in pictures]
        for folder in folders:
            if folder not in labels:
                raise DataError(f"class folder {path / folder} holds no pictures")
        if not pictures:
            raise DataError(f"{path} holds no folders of pictures; expected class/picture")
        classes = checked_classes(folders, self.classes, path)
        sources = {name: tree.sources[name] for name in pictures}
        return Listing(FileTree(path, sources), pictures, labels, None, classes)


def _is_visible_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")
