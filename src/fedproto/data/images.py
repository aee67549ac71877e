"""Decoding pictures, many at a time.

Which of Pillow's decoders reads a file is decided by its content, among `FORMATS` alone: others are
rarely tested on hostile files, and one of them starts another program.
"""

from __future__ import annotations

import io
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedproto.data.files import FileTree
from fedproto.disk.files import check_limit
from fedproto.errors import DataError, FedprotoError, install, reason_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from fedproto.callback import Callback
    from fedproto.data.base import Builder

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF")
"""Formats that are read; of an animation or of several pages, the first picture."""

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Pillow's modes of 8 bits per channel, or fewer that it scales."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def open_image(content: bytes, where: object, *, scale: bool = True) -> Image:
    """A decoded picture of 8 bits per channel, turned as its camera says.

    Grey pictures of 16 bits are scaled to 8 if `scale` is set. Other depths are refused: the values
    of black and white in them are unknown.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise DataError(f"images need Pillow: {install('images')}") from None
    try:
        with warnings.catch_warnings():
            # Sizes are limited below, by a limit that the owner of this machine can set.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(content), formats=FORMATS)
            # Known from the header alone: nothing is unpacked yet.
            check_limit("pixels", opened.width * opened.height, where)
            opened.load()
        sixteen = _is_grey_of_16_bits(opened)
        picture = ImageOps.exif_transpose(opened)
        if sixteen and scale:
            grey = np.asarray(picture).astype(np.uint32)
            return Image.fromarray(np.rint(grey / 257).astype(np.uint8))
        if picture.mode not in _MODES:
            raise DataError(
                f"{where} has an unsupported pixel format ({picture.mode}); save it with 8 bits per"
                " channel, or as grey with 16"
            )
        return picture
    except UnidentifiedImageError:  # which names the bytes, not the file
        raise DataError(
            f"{where} does not decode as an image: unknown format; supported are"
            f" {', '.join(FORMATS)}"
        ) from None
    except FedprotoError:
        raise
    # What Pillow raises for a damaged file depends on its bytes.
    except Exception as error:  # noqa: BLE001
        raise DataError(f"{where} does not decode as an image: {reason_of(error)}") from None


def _is_grey_of_16_bits(picture: Image) -> bool:
    """Whether it has one channel of 16 bits, from black at 0 to white."""
    if picture.format == "PNG":
        return picture.mode in ("I", "I;16", "I;16B")
    tags = getattr(picture, "tag_v2", {})
    plain = picture.format == "TIFF" and picture.mode.startswith("I;16")
    return plain and tuple(tags.get(258, (1,))) == (16,) and tags.get(262) != 0


def is_picture(name: str) -> bool:
    """Whether a file's name ends like a picture's."""
    return name.lower().endswith(SUFFIXES)


def pixels(picture: Image, channels: int, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """A picture as bytes ``[channels, H, W]``, grey or in colour; in a size if given."""
    from PIL import Image

    picture = picture.convert("L" if channels == 1 else "RGB")
    if size is not None and picture.size != size:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    array = np.asarray(picture, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def put_images(
    builder: Builder,
    tree: FileTree,
    names: Sequence[str],
    channels: int,
    size: int,
    callback: Callback | None = None,
) -> None:
    """Decodes pictures and keeps them as the array ``images``, ``[N, channels, size, size]``."""
    images = builder.array("images", (len(names), channels, size, size), np.uint8)

    def decode(index: int, where: object, content: bytes) -> None:
        images[index] = pixels(open_image(content, where), channels, (size, size))

    for_each_file(tree, names, decode, callback)


def for_each_file(
    tree: FileTree,
    names: Sequence[str],
    work: Callable[[int, object, bytes], None],
    callback: Callback | None = None,
) -> None:
    """Reads files one after another and works on their place, location and content in parallel.

    Threads are enough: Pillow decodes and resizes without holding the interpreter's lock.
    """
    threads, done = os.cpu_count() or 1, 0
    places = {name: place for place, name in enumerate(names)}
    files = tree.read_all(names)
    with ThreadPoolExecutor(threads) as pool:
        # A part at a time, so that files do not pile up in memory.
        while part := list(itertools.islice(files, 8 * threads)):
            for _ in pool.map(
                lambda file: work(places[file[0]], tree.locations[file[0]], file[1]), part
            ):
                done += 1
                if callback is not None:
                    callback.on_progress("preparing", done, len(names))
