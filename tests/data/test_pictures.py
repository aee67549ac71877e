"""Which pictures are read, how depths are scaled, and what is refused before it costs much."""

from __future__ import annotations

import io
import os
import resource
import struct
import subprocess
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from data_files import image_bytes
from fedproto.api.predictor import Predictor
from fedproto.data.base import DATASETS
from fedproto.data.images import FORMATS, SUFFIXES, open_image, pixels
from fedproto.data.segmentation import read_mask
from fedproto.errors import DataError

RAMP = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)


def saved(array, kind, **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_listed_formats_are_read(kind):
    options = {"quality": 100} if kind in ("JPEG", "WEBP") else {}
    grey = pixels(open_image(saved(RAMP, kind, **options), "x"), 1)
    assert np.abs(grey[0].astype(int) - RAMP).max() <= 6


def test_a_suffix_is_that_of_a_format_that_is_read():
    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in SUFFIXES} == set(FORMATS)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("kind", ["EPS", "TGA", "ICO", "PCX"])
def test_other_formats_are_not_tried_whatever_a_file_is_called(kind, monkeypatch):
    content = EPS if kind == "EPS" else saved(RAMP, kind)
    monkeypatch.setattr(subprocess, "check_call", pytest.fail)
    with pytest.raises(DataError, match=r"mine\.png .* unknown format; supported are JPEG, PNG"):
        open_image(content, "mine.png")


def test_the_first_picture_of_a_moving_one_is_taken():
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (10, 200)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert pixels(open_image(file.getvalue(), "x"), 1).max() == 10


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_pictures_of_16_bits_are_scaled(kind):
    deep = (RAMP.astype(np.uint16) * 257) + np.uint16(40)
    deep[-1, -1] = 65535
    grey = pixels(open_image(saved(deep, kind), "x"), 1)
    assert np.abs(grey[0].astype(int) - RAMP).max() <= 1
    colour = pixels(open_image(saved(deep, kind), "x"), 3)
    assert (colour == grey).all()


def test_the_byte_order_of_16_bits_does_not_matter():
    deep = RAMP.astype(">u2") * 257
    file = io.BytesIO()
    Image.frombytes("I;16B", (8, 8), deep.tobytes()).save(file, "TIFF")
    assert (pixels(open_image(file.getvalue(), "x"), 1)[0] == RAMP).all()


def tiff(bits: int, photometric: int, data: bytes) -> bytes:
    """A grey TIFF of 4×4 pixels as some cameras write it."""
    entries = [
        (256, 3, 4), (257, 3, 4), (258, 3, bits), (259, 3, 1), (262, 3, photometric),
        (273, 4, 8 + 2 + 12 * 9 + 4), (277, 3, 1), (278, 3, 4), (279, 4, len(data)),
    ]  # fmt: skip
    packed = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4) + data


@pytest.mark.parametrize(
    "content",
    [
        saved(np.full((4, 4), 70000, np.int32), "TIFF"),
        saved(np.full((4, 4), 0.5, np.float32), "TIFF"),
        tiff(16, 0, bytes(32)),
        tiff(12, 1, bytes(24)),
    ],
    ids=["32 bits", "float", "white is 0", "12 bits"],
)
def test_depths_without_a_known_white_are_refused(content):
    with pytest.raises(
        DataError, match=r"x has an unsupported pixel format .* save it with 8 bits"
    ):
        open_image(content, "x")


def test_label_maps_of_16_bits_are_not_scaled_into_other_labels():
    labels = np.arange(16, dtype=np.uint16).reshape(4, 4)
    with pytest.raises(DataError, match="unsupported pixel format"):
        read_mask(saved(labels, "PNG"), "x", 21)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_that_is_read_becomes_bytes(mode, channels):
    picture = Image.fromarray(RAMP).convert("RGB").convert(mode if mode != "PA" else "P")
    found = pixels(picture.convert(mode), channels)
    assert found.dtype == np.uint8
    assert found.shape == (channels, 8, 8)


def bomb(side: int) -> bytes:
    """A PNG of a few kilobytes that is very large once it is unpacked."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(side + 1)) for _ in range(side)) + rows.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def test_a_picture_that_unpacks_to_very_much_is_refused_before_it_is_unpacked():
    content = bomb(12_000)
    assert len(content) < 300_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"over the limit of 64,000,000 for 'pixels'"):
        open_image(content, "bomb.png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def folder_of(tmp_path, plant):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(6):
            (tmp_path / name / f"{number}.png").write_bytes(image_bytes(RAMP))
    plant(tmp_path / "cat")
    return DATASETS.get("images")(path=str(tmp_path), clients=2, size=8)


def pipe(folder):
    os.mkfifo(folder / "pipe.png")


def endless(folder):
    (folder / "endless.png").symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [pipe, endless], ids=lambda plant: plant.__name__)
@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused_and_does_not_hang(tmp_path, monkeypatch, plant):
    monkeypatch.setenv("FEDPROTO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    source = folder_of(tmp_path / "data", plant)
    with pytest.raises(DataError, match=r"\.png cannot be read: not a regular file"):
        source.load(tmp_path)
    (found,) = (tmp_path / "data" / "cat").glob(f"{plant.__name__}.png")
    with pytest.raises(DataError, match="not a regular file"):
        Predictor.picture(SimpleNamespace(_about={"input_shape": (3, 8, 8)}), found)


def test_links_to_pictures_are_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "real.png").write_bytes(image_bytes(RAMP))
    (tmp_path / "data").mkdir()
    source = folder_of(
        tmp_path / "data", lambda cats: (cats / "link.png").symlink_to(tmp_path / "real.png")
    )
    assert len(source.load(tmp_path).samples) == 13


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems have no such names")
def test_a_name_that_is_not_utf_8_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()

    def plant(cats):
        with open(os.fsencode(cats) + b"/\xff.png", "wb") as file:  # noqa: PTH123
            file.write(image_bytes(RAMP))

    with pytest.raises(DataError, match=r"the name of cat/\\udcff.png is not UTF-8; rename it"):
        folder_of(tmp_path / "data", plant).load(tmp_path)
