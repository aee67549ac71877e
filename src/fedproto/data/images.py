"""Decoding pictures, many at a time."""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedproto.data.files import FileTree
from fedproto.disk.limits import check_limit
from fedproto.errors import DataError, install

if TYPE_CHECKING:
    from PIL.Image import Image

    from fedproto.data.base import OnProgress
    from fedproto.data.prepared import Builder

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def open_image(content: bytes, where: object) -> Image:
    """A decoded picture, turned as its camera says."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise DataError(f"pictures need Pillow: {install('images')}") from None
    try:
        with warnings.catch_warnings():
            # Sizes are limited below, by a limit that the owner of this machine can set.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content))
            check_limit("pixels", picture.width * picture.height, where)
            picture.load()
        return ImageOps.exif_transpose(picture)
    except UnidentifiedImageError:  # which names the bytes, not the file
        raise DataError(f"{where} does not decode as a picture: its kind is unknown") from None
    except _decoding_errors() as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{where} does not decode as a picture: {reason}") from None


def _decoding_errors() -> tuple[type[Exception], ...]:
    """What Pillow's decoders raise for damaged files."""
    from PIL import Image

    plain = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError)
    more = (struct.error, OverflowError, MemoryError, AttributeError, NotImplementedError)
    return (*plain, *more, Image.DecompressionBombError)


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
    on_progress: OnProgress | None = None,
) -> None:
    """Decodes pictures and keeps them as the array ``images``, ``[N, channels, size, size]``."""
    images = builder.array("images", (len(names), channels, size, size), np.uint8)

    def decode(index: int, where: object, content: bytes) -> None:
        images[index] = pixels(open_image(content, where), channels, (size, size))

    work = {name: partial(decode, index, tree.locations[name]) for index, name in enumerate(names)}
    for_each_file(tree, work, on_progress)


def for_each_file(
    tree: FileTree,
    work: Mapping[str, Callable[[bytes], None]],
    on_progress: OnProgress | None = None,
) -> None:
    """Reads files one after another and works on their content in parallel.

    Threads are enough: Pillow decodes and resizes without holding the interpreter's lock.
    """
    waiting: deque[Future[None]] = deque()
    done = 0

    def finish_oldest() -> None:
        nonlocal done
        waiting.popleft().result()
        done += 1
        if on_progress is not None:
            on_progress(done, len(work))

    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        try:
            for name, content in tree.read_all(work):
                waiting.append(pool.submit(work[name], content))
                # Few at a time, so that files do not pile up in memory.
                if len(waiting) >= 8 * threads:
                    finish_oldest()
            while waiting:
                finish_oldest()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
