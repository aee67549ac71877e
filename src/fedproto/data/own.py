"""A user's own data on disk: pictures in folders or listed in an index file, and LEAF's JSON."""

from __future__ import annotations

import abc
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, DataSource
from fedproto.data.federation import Client, Federation, checked_num_classes
from fedproto.data.files import FileTree, open_tree
from fedproto.data.images import is_picture
from fedproto.data.official import Images, Picture, put_pictures
from fedproto.data.partition import by_key
from fedproto.data.prepared import Builder, Prepared
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import HeldOut
from fedproto.disk.files import open_regular, read_limited, user_path
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import DataError
from fedproto.options import option
from fedproto.rng import Indices


@dataclass(frozen=True)
class OwnPictures(Images):
    """Pictures of one size with a class each; clients of their own, or shared out."""

    prepared_by = ("size", "channels", "classes")

    path: str = option("", "path of the data")
    size: int = option(
        32, "width and height to which images are resized, in pixels", at_least=1, at_most=4096
    )
    channels: Literal[1, 3] = option(3, "channels of the images: 1 for grey, 3 for colour")
    classes: tuple[str, ...] = option((), "names of the classes, in order; default: as found")

    @abc.abstractmethod
    def listing(self, tree: FileTree) -> list[Picture]:
        """The pictures; those of one natural group are a client's."""

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Decodes the pictures."""
        pictures = self.listing(tree)
        classes = self.classes or self.in_order({picture.label for picture in pictures})
        builder.put("names", np.array([name.encode() for name in classes]))
        put_pictures(builder, tree, pictures, classes, (self.channels, self.size), callback)

    def in_order(self, classes: set[str]) -> list[str]:
        """The classes that were found, in the order of their labels."""
        return sorted(classes)

    def title(self) -> str:
        """The folder's or the file's own name."""
        return Path(self.path).stem

    def share(self, labels: Indices, groups: NDArray[np.generic] | None = None) -> list[Indices]:
        """Each client's samples: those of its own where the files name clients."""
        return super().share(labels) if groups is None else by_key(groups)


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
class ImageFolder(OwnPictures):
    """Your own pictures as ``class/picture``, shared out among clients."""

    levels: ClassVar[tuple[str, ...]] = ("class",)

    def tree(self, root: Path) -> FileTree:
        """A folder per class, in one per client where there are such; only pictures count."""
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

    def listing(self, tree: FileTree) -> list[Picture]:
        """The folders' names are classes and clients."""
        deep = len(self.levels) - 1
        folders = {name: name.split("/") for name in tree.sources}
        return [
            Picture(name, parts[deep], group=parts[0] if deep else "")
            for name, parts in folders.items()
        ]


@DATASETS.register("client-folders")
@dataclass(frozen=True)
class ClientFolders(ImageFolder):
    """Your own pictures as ``client/class/picture``; the options of the partition do not matter."""

    levels = ("client", "class")


@DATASETS.register("index")
@dataclass(frozen=True)
class IndexFile(OwnPictures):
    """Your own pictures in a CSV file: path, label and, unless shared out, client."""

    def tree(self, root: Path) -> FileTree:
        """The files of the index, whose paths are relative to it, and the index itself."""
        path = own_path(self.path, root)
        sources: dict[str, Path] = {}
        for number, row in enumerate(_read_csv(path), start=2):
            name = row["path"]
            if name in sources:
                raise DataError(f"{path} row {number}: {name} is listed twice")
            sources[name] = path.parent / name
            try:
                found = sources[name].is_file()
            except (OSError, ValueError) as error:  # too long, or not a name at all
                raise DataError(f"{path} row {number}: {name[:80]!r}: {error}") from None
            if not found:
                raise DataError(f"{path} row {number}: there is no file {sources[name]}")
        # The index is a source too: other labels make other data.
        return FileTree(path.parent, {**sources, path.name: path})

    def listing(self, tree: FileTree) -> list[Picture]:
        """The rows of the index; without a column client the pictures are shared out."""
        rows = _read_csv(tree.sources[Path(self.path).name])
        return [Picture(row["path"], row["label"], group=row.get("client", "")) for row in rows]

    def in_order(self, classes: set[str]) -> list[str]:
        """Numbers in their order: 2 before 10."""
        numbers = all(name.lstrip("-").isdigit() for name in classes)
        return sorted(classes, key=int if numbers else str)


def _read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with io.TextIOWrapper(open_regular(path), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows: list[dict[str, Any]] = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise DataError(f"{path} row {number} has more or fewer fields than the first line")
    if not rows:
        raise DataError(f"{path} has no rows")
    for column in ("path", "label"):
        if column not in rows[0]:
            raise DataError(
                f"{path} has no column '{column}'; it has {', '.join(map(str, rows[0]))}"
            )
    return rows


@DATASETS.register("leaf")
@dataclass(frozen=True)
class Leaf(Prepared, HeldOut):
    """LEAF's JSON: ``users``, ``num_samples`` and ``user_data`` with numbers x and labels y.

    Where the files lie in folders ``train`` and ``test``, as LEAF and FedProx publish them, that
    split is kept and nothing is held out for validation; otherwise every client is split 80/20.
    """

    path: str = option("", "the folder of the JSON files")
    shape: tuple[int, ...] = option((), "shape of one input; default: as in the files")
    num_classes: int = option(0, "number of classes; 0 counts them", at_least=0)

    def load(self, root: Path) -> Federation:
        """Reads the files if that was not done before."""
        arrays = self.prepare(root)
        labels, users = np.array(arrays["labels"]), np.array(arrays["users"])
        inputs = torch.from_numpy(arrays["inputs"])
        stored = tuple(inputs.shape[1:])
        shape = self.shape or stored
        if np.prod(shape) != np.prod(stored):
            raise DataError(f"shape {list(shape)} does not fit inputs of shape {list(stored)}")
        federation = self.federation(
            Path(self.path).stem,
            MappedSamples(inputs.view(-1, *shape), torch.from_numpy(labels)),
            by_key(users),
            num_classes=checked_num_classes(labels, self.num_classes or None, f"{self.path}: "),
        )
        if not arrays["test"].any():
            return federation
        # LEAF's own split takes the place of ours; a user without training samples is no client.
        test = np.array(arrays["test"], dtype=bool)
        clients = [Client(part[~test[part]], part[test[part]]) for part in by_key(users)]
        return replace(
            federation,
            clients=tuple(client for client in clients if len(client.train)),
            validation=np.empty(0, dtype=np.int64),
        )

    def tree(self, root: Path) -> FileTree:
        """The JSON files."""
        folder = own_path(self.path, root)
        found = open_tree(folder).sources
        sources = {name: path for name, path in found.items() if path.suffix == ".json"}
        if not sources:
            raise DataError(f"{folder} contains no JSON files")
        return FileTree(folder, sources)

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Reads the files."""
        inputs, labels, users, test = [], [], [], []
        for done, (name, path) in enumerate(tree.sources.items(), start=1):
            for user, x, y in _read_users(path):
                inputs.append(x)
                labels.append(y)
                users += [user] * len(y)
                test += [name.split("/")[0] == "test"] * len(y)
            if callback is not None:
                callback.on_progress(done, len(tree.sources))
        if not inputs:
            raise DataError(f"{tree.folder}: its JSON files name no users")
        if len({part.shape[1:] for part in inputs}) > 1:
            raise DataError(f"{tree.folder}: the users' inputs have different shapes")
        builder.put("inputs", np.concatenate(inputs))
        builder.put("labels", np.concatenate(labels))
        builder.put("users", np.array(users))
        builder.put("test", np.array(test))


def _read_users(path: Path) -> Iterator[tuple[str, Any, Any]]:
    try:
        with open_regular(path) as file:
            content = read_json(read_limited(file, path))
        data = content["user_data"]
        users = {user: (data[user]["x"], data[user]["y"]) for user in content["users"]}
    except (OSError, DamagedError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from None
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is not in LEAF's form: {error} is missing or wrong") from None
    for user, (x, y) in users.items():
        try:
            inputs, labels = np.asarray(x, dtype=np.float32), np.asarray(y)
        except (ValueError, TypeError, OverflowError):
            raise DataError(f"{path}: the inputs of user {user} are not numbers") from None
        if inputs.ndim < 2 or not inputs.size or not np.isfinite(inputs).all():
            raise DataError(f"{path}: the inputs of user {user} are not lists of finite numbers")
        if labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels)):
            labels = labels.astype(np.int64)  # written as 3.0
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or len(labels) != len(inputs):
            raise DataError(
                f"{path}: user {user} has {len(inputs)} inputs, which do not match its labels"
            )
        yield str(user), inputs, labels.astype(np.int64)
