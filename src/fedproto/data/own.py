"""A user's own pictures on disk: a folder per class, in one per client where there are such."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Builder, DataSource
from fedproto.data.files import FileTree, open_tree
from fedproto.data.images import is_picture
from fedproto.data.official import Images, Picture, put_pictures
from fedproto.data.partition import by_key
from fedproto.disk.files import user_path
from fedproto.errors import DataError
from fedproto.options import option
from fedproto.rng import Indices


def own_path(path: str, root: Path) -> Path:
    """A user's path: from the current folder, or else from the data root."""
    if not path:
        raise DataError("path is missing: set data.path to the path of your data")
    found = user_path(path, root)
    if found is None:
        raise DataError(f"path {path} does not exist")
    return found


def located(source: DataSource) -> DataSource:
    """The same data, independent of the current folder.

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


@DATASETS.register("images")
@dataclass(frozen=True)
class ImageFolder(Images):
    """Your own pictures as ``class/picture``, divided among clients."""

    prepared_by = ("size", "channels", "classes")
    levels: ClassVar[tuple[str, ...]] = ("class",)

    path: str = option("", "path of the data")
    size: int = option(
        32, "width and height to which images are resized, in pixels", at_least=1, at_most=4096
    )
    channels: Literal[1, 3] = option(3, "channels of the images: 1 for grey, 3 for colour")
    classes: tuple[str, ...] = option((), "names of the classes, in order; default: as found")

    def tree(self, root: Path) -> FileTree:
        """The pictures in folders of the right depth; other files do not count."""
        path = own_path(self.path, root)
        form = "/".join((*self.levels, "picture"))
        sources = {
            name: file
            for name, file in open_tree(path).sources.items()
            if name.count("/") >= len(self.levels) and is_picture(name)
        }
        if not sources:
            raise DataError(f"{path} contains no folders of images; expected {form}")
        top = {name.split("/")[0] for name in sources}
        for folder in sorted(path.iterdir()):
            if folder.is_dir() and folder.name[0] != "." and folder.name not in top:
                raise DataError(
                    f"{self.levels[0]} folder {folder} contains no images; expected {form}"
                )
        return FileTree(path, sources)

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Decodes the pictures; their folders are classes, and clients where there are such."""
        deep = len(self.levels) - 1
        folders = {name: name.split("/") for name in tree.sources}
        pictures = [
            Picture(name, parts[deep], group=parts[0] if deep else "")
            for name, parts in folders.items()
        ]
        classes = self.classes or sorted({picture.label for picture in pictures})
        builder.put("names", np.array([name.encode() for name in classes]))
        put_pictures(builder, tree, pictures, classes, (self.channels, self.size), callback)

    def title(self) -> str:
        """The folder's own name."""
        return Path(self.path).stem

    def share(self, labels: Indices, groups: NDArray[np.generic] | None = None) -> list[Indices]:
        """Each client's samples: those of its own folder where clients have one."""
        return super().share(labels) if groups is None else by_key(groups)


@DATASETS.register("client-folders")
@dataclass(frozen=True)
class ClientFolders(ImageFolder):
    """Your own pictures as ``client/class/picture``; the options of the partition do not matter."""

    levels = ("client", "class")
