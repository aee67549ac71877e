"""CelebA: faces of celebrities, one client per person, is the person smiling?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Download
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.images import put_images
from fedproto.data.partition import by_key
from fedproto.data.prepared import Arrays, Builder, prepared
from fedproto.data.samples import MappedSamples, Samples, TensorSamples
from fedproto.data.sharing import HeldOut
from fedproto.errors import DataError, unknown_name
from fedproto.options import option

_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="


@DATASETS.register("celeba")
@dataclass(frozen=True)
class CelebA(HeldOut):
    """Smiling or not in aligned faces of 84×84 pixels; a client is a person with enough images.

    With one tenth of every client left out first, the official lists give exactly the paper's
    177,457 samples.
    """

    folder = "celeba"
    licence = "non-commercial research only"
    downloads = (
        Download(
            _DRIVE + "0B7EVK8r0v71pZjFTYXZWM3FlRnM",
            "celeba/img_align_celeba.zip",
            "00d2c5bc6d35e252742224ab0c1e8fcb",
        ),
        Download(
            _DRIVE + "1_ee_0u7vcNLOfNLegJRHmolfH5ICW-XS",
            "celeba/identity_CelebA.txt",
            "32bd1bd63d3c78cd57e08160ec5ed1e2",
        ),
        Download(
            _DRIVE + "0B7EVK8r0v71pblRyaVFSWGxPY0U",
            "celeba/list_attr_celeba.txt",
            "75e246fa4810816ffd6ee81facbd244c",
        ),
    )

    validation: float = 0.1
    attribute: str = option("Smiling", "the attribute to tell")
    minimum: int = option(5, "images a person must have to be a client", at_least=1)
    size: int = option(84, "width and height of the images", at_least=8, at_most=4096)
    allow_missing: bool = option(False, "do with the images that are there")

    def load(self, root: Path) -> Federation:
        """Decodes the images if that was not done before, and makes a client of each person."""
        tree, index = self._index(root)
        images = self._images(tree, index)
        rows = np.array(images["rows"])
        self._refuse_missing(index, rows, tree)
        labels = torch.from_numpy(index["labels"][rows].astype(np.int64))
        samples = MappedSamples(torch.from_numpy(images["images"]), labels)
        return self._of_people(samples, index["identities"][rows], (3, self.size, self.size))

    def prepare(self, root: Path, callback: Callback | None = None) -> Arrays:
        """Decodes the images."""
        return self._images(*self._index(root), callback)

    def listed(self, root: Path) -> Federation:
        """The clients of the official lists, with labels alone instead of images."""
        _, index = self._index(root)
        labels = torch.from_numpy(index["labels"].astype(np.int64))
        samples = TensorSamples(torch.empty(len(labels), 0), labels)
        return self._of_people(samples, index["identities"], (0,))

    def _of_people(
        self, samples: Samples, identities: NDArray[np.int64], shape: tuple[int, ...]
    ) -> Federation:
        parts = by_key(identities, minimum=self.minimum)
        return self.federation("celeba", samples, parts, num_classes=2, input_shape=shape)

    def _index(self, root: Path) -> tuple[FileTree, Arrays]:
        tree = self.tree(root)

        def build(builder: Builder) -> None:
            names, identities = read_identities(tree)
            builder.put("names", np.array([name.encode() for name in names]))
            builder.put("identities", identities)
            builder.put("labels", read_attribute(tree, names, self.attribute))

        return tree, prepared("celeba-lists", tree.sources, {"attribute": self.attribute}, build)

    def _images(self, tree: FileTree, index: Arrays, callback: Callback | None = None) -> Arrays:
        def build(builder: Builder) -> None:
            found = {
                row: file
                for row, name in enumerate(index["names"])
                if (file := tree.find(f"img_align_celeba/{name.decode()}")) is not None
            }
            rows = np.array(sorted(found), dtype=np.int64)
            self._refuse_missing(index, rows, tree)
            put_images(builder, tree, [found[row] for row in rows], 3, self.size, callback)
            builder.put("rows", rows)

        return prepared("celeba", tree.sources, {"size": self.size}, build)

    def _refuse_missing(self, index: Arrays, rows: NDArray[np.int64], tree: FileTree) -> None:
        if len(rows) == 0:
            raise DataError(f"img_align_celeba: no image of the lists is in {tree.folder}")
        missing = len(index["names"]) - len(rows)
        if missing and not self.allow_missing:
            first = np.setdiff1d(np.arange(len(index["names"])), rows)[0]
            raise DataError(
                f"{missing:,} images of the lists are not in {tree.folder}, the first is"
                f" img_align_celeba/{index['names'][first].decode()}; fetch them, or do without:"
                " data.allow_missing=true"
            )


def read_identities(tree: FileTree) -> tuple[list[str], NDArray[np.int64]]:
    """The images' names and whom they show, in the official order."""
    name = tree.require("identity_CelebA.txt")
    fields = tree.read(name).decode("utf-8", "replace").split()
    try:
        identities = np.array(fields[1::2], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{tree.locations[name]}: {error}; expected lines 'image person'") from None
    if len(fields) != 2 * len(identities) or not fields:
        raise DataError(f"{tree.locations[name]} is incomplete; fetch it again")
    return fields[0::2], identities


def read_attribute(tree: FileTree, names: list[str], attribute: str) -> NDArray[np.bool_]:
    """Whether each image has an attribute."""
    name = tree.require("list_attr_celeba.txt")
    where = tree.locations[name]
    _, _, rest = tree.read(name).decode("utf-8", "replace").partition("\n")
    header, _, body = rest.partition("\n")
    attributes = header.split()
    if attribute not in attributes:
        raise DataError(f"{where}: {unknown_name('attribute', attribute, attributes)}")
    table = body.split()
    width = len(attributes) + 1
    if table[::width] != names:
        raise DataError(f"{where} and identity_CelebA.txt list different images; fetch them again")
    values = table[1 + attributes.index(attribute) :: width]
    return np.array([value == "1" for value in values])
