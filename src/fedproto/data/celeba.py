"""CelebA: faces of celebrities, one client per person, is the person smiling?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.callback import Callback
from fedproto.data.base import DATASETS, Builder, Download, Prepared
from fedproto.data.federation import Federation
from fedproto.data.files import FileTree
from fedproto.data.images import put_images
from fedproto.data.partition import by_key
from fedproto.data.samples import MappedSamples
from fedproto.data.sharing import HeldOut
from fedproto.errors import DataError, unknown_name
from fedproto.options import option

_DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="


@DATASETS.register("celeba")
@dataclass(frozen=True)
class CelebA(Prepared, HeldOut):
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

    prepared_by = ("size", "attribute", "allow_missing")

    validation: float = 0.1
    attribute: str = option("Smiling", "attribute to predict")
    minimum: int = option(5, "minimum number of images of a person to be a client", at_least=1)
    size: int = option(84, "width and height of the images, in pixels", at_least=8, at_most=4096)
    allow_missing: bool = option(False, "accept that images are missing")

    def load(self, root: Path) -> Federation:
        """Decodes the images if that was not done before, and makes a client of each person."""
        arrays = self.prepare(root)
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
        samples = MappedSamples(torch.from_numpy(arrays["images"]), labels)
        parts = by_key(arrays["identities"], minimum=self.minimum)
        return self.federation("celeba", samples, parts, num_classes=2)

    def build(self, tree: FileTree, builder: Builder, callback: Callback | None) -> None:
        """Decodes the images of the lists."""
        names, identities = read_identities(tree)
        labels = read_attribute(tree, names, self.attribute)
        files = [tree.find(f"img_align_celeba/{name}") for name in names]
        rows = [row for row, file in enumerate(files) if file is not None]
        if not rows:
            raise DataError(f"img_align_celeba: no image of the lists is in {tree.folder}")
        if None in files and not self.allow_missing:
            raise DataError(
                f"{files.count(None):,} images of the lists are not in {tree.folder}, the first"
                f" is img_align_celeba/{names[files.index(None)]}; fetch them, or accept that:"
                " data.allow_missing=true"
            )
        put_images(builder, tree, list(filter(None, files)), 3, self.size, callback)
        builder.put("identities", identities[rows])
        builder.put("labels", labels[rows])


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
