"""A user's own data: every form it may have, and every mistake it may hold."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import numpy as np
import pytest

import fedproto
from data_files import image_bytes
from documents import ROOT
from fedproto.cli import main
from fedproto.data.federation import class_counts, statistics
from fedproto.data.own import ClientFolders, ImageFolder
from fedproto.data.segmentation import SegmentationFolder
from fedproto.errors import ConfigError, DataError

pytest.importorskip("PIL", reason="needs Pillow (fedproto[images])")
pytest_plugins = ["data_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def picture(colour, height=6, width=8):
    return image_bytes(np.tile(np.uint8(COLOURS[colour]), (height, width, 1)))


@pytest.fixture
def folder(tmp_path):
    """Twelve pictures of each of three classes, and a file that is none."""
    path = tmp_path / "pictures"
    for colour in COLOURS:
        (path / colour).mkdir(parents=True)
        for number in range(12):
            (path / colour / f"{number}.png").write_bytes(picture(colour))
    (path / "red" / "notes.txt").write_text("not a picture")
    return path


def means(federation):
    """The mean colour of every sample."""
    inputs, targets = federation.samples.batch(np.arange(len(federation.samples)))
    return inputs.mean(dim=(2, 3)), targets


def test_an_image_folder_gives_classes_in_the_order_of_their_names(folder, tmp_path):
    federation = ImageFolder(path=str(folder), clients=4, partition="iid", size=5).load(tmp_path)
    colours, targets = means(federation)
    assert federation.input_shape == (3, 5, 5)
    assert federation.num_classes == 3
    assert statistics(federation)["samples"] == 36
    for label, name in enumerate(sorted(COLOURS)):
        expected = np.array(COLOURS[name]) / 255
        np.testing.assert_allclose(colours[targets == label], np.tile(expected, (12, 1)), atol=1e-6)


@pytest.mark.parametrize("partition", ["classes", "class-sizes", "dirichlet", "iid", "sorted"])
def test_an_image_folder_with_every_partitioner(folder, tmp_path, partition):
    source = ImageFolder(path=str(folder), clients=3, partition=partition, minimum=1, mean_size=9.0)
    counts = class_counts(source.load(tmp_path))
    assert counts.shape == (3, 3)
    assert (counts.sum(axis=1) > 0).all()


def test_a_path_may_be_relative_to_the_data_root(folder):
    federation = ImageFolder(path="pictures", clients=2, partition="iid").load(folder.parent)
    assert len(federation.samples) == 36


def test_grey_pictures_have_one_channel(folder, tmp_path):
    source = ImageFolder(path=str(folder), clients=2, partition="iid", channels=1, size=4)
    assert source.load(tmp_path).samples.batch(np.array([0]))[0].shape == (1, 1, 4, 4)


def test_pictures_are_turned_as_their_camera_says(tmp_path):
    from PIL import Image

    upright = np.zeros((8, 8, 3), dtype=np.uint8)
    upright[:4] = 255
    turned = Image.fromarray(np.rot90(upright).copy())
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° to the right to view
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    (tmp_path / "p" / "one").mkdir(parents=True)
    (tmp_path / "p" / "one" / "a.png").write_bytes(file.getvalue())
    federation = ImageFolder(path=str(tmp_path / "p"), clients=1, partition="iid", size=8).load(
        tmp_path
    )
    np.testing.assert_array_equal(federation.samples.inputs[0].permute(1, 2, 0), upright)


def test_client_folders_keep_their_clients(tmp_path):
    for client, colours in {"anna": ["red", "green"], "ben": ["green"]}.items():
        for colour in colours:
            (tmp_path / "own" / client / colour).mkdir(parents=True)
            for number in range(5):
                (tmp_path / "own" / client / colour / f"{number}.png").write_bytes(picture(colour))
    federation = ClientFolders(path=str(tmp_path / "own")).load(tmp_path)
    assert class_counts(federation).tolist() == [[5, 5], [5, 0]]


@pytest.fixture
def pairs(tmp_path):
    """Eight pictures with masks: a square of class 1 or 2 on background, some void."""
    path = tmp_path / "pairs"
    for name in ("images", "masks"):
        (path / name).mkdir(parents=True)
    for number in range(8):
        mask = np.zeros((16, 32), dtype=np.uint8)
        mask[4:12, 8:24] = 1 + number % 2
        mask[:2] = 255
        image = np.stack([mask * 100] * 3, axis=-1)
        (path / "images" / f"{number}.png").write_bytes(image_bytes(image))
        (path / "masks" / f"{number}.png").write_bytes(image_bytes(mask))
    return path


@pytest.mark.parametrize("size", [16, 32])
def test_masks_stay_aligned_with_their_pictures(pairs, tmp_path, size):
    source = SegmentationFolder(
        path=str(pairs),
        num_classes=3,
        size=size,
        clients=2,
        partition="classes",
        classes_per_client=1,
        minimum=1,
    )
    federation = source.load(tmp_path)
    assert federation.task == "segmentation"
    assert class_counts(federation).tolist() == [[4, 0], [0, 4]]
    images, masks = federation.samples.inputs[:, 0], federation.samples.targets
    half = size // 2
    assert masks.shape == (8, size, size)
    assert (masks[:, half:] == 255).all()
    assert (masks == 255)[:, 0].all()
    for image, mask, label in zip(images, masks, [1, 2] * 4, strict=True):
        # Where a picture is made smaller the square's border blurs: half its colour is the border.
        below_void = slice(size // 8, half)
        assert ((image[below_void] > 50 * label) == (mask[below_void] == label)).all()
        assert (mask == label).sum() == (size // 4) * (size // 2)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda p: (p / "masks" / "3.png").write_bytes(
                image_bytes(np.zeros((8, 8), dtype=np.uint8))
            ),
            r"masks/3\.png is 8×8 pixels but its image images/3\.png is 32×16",
        ),
        (
            lambda p: (p / "masks" / "3.png").write_bytes(
                image_bytes(np.full((16, 32), 7, dtype=np.uint8))
            ),
            r"masks/3\.png: label 7 is outside the classes 0 to 2",
        ),
        (
            lambda p: (p / "masks" / "3.png").write_bytes(picture("red")),
            r"masks/3\.png is not a label map",
        ),
        (lambda p: (p / "masks" / "3.png").unlink(), r"images/3\.png has no counterpart"),
        (lambda p: (p / "images" / "3.png").unlink(), r"masks/3\.png has no counterpart"),
    ],
)
def test_a_wrong_mask_is_named_and_the_cache_stays_empty(pairs, tmp_path, cache, break_it, message):
    break_it(pairs)
    source = SegmentationFolder(path=str(pairs), num_classes=3, clients=2, partition="iid")
    with pytest.raises(DataError, match=message):
        source.load(tmp_path)
    assert not list(cache.glob("segmentation-*[0-9a-f]"))


def break_picture(folder):
    whole = picture("red", 64, 64)
    (folder / "red" / "5.png").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_picture, r"red/5\.png does not decode as an image"),
        (lambda f: (f / "yellow").mkdir(), r"class folder .*yellow contains no images"),
    ],
)
def test_a_wrong_image_folder_ends_the_command_with_one_line(
    folder, cache, capsys, break_it, message
):
    break_it(folder)
    arguments = ["data", "stats", "images", "--set", f"path={folder}", "--set", "clients=2"]
    assert main(arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # progress comes before it
    assert re.search(message, line)
    assert not list(cache.glob("images-*[0-9a-f]"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alpha": 0.0}, ConfigError, "alpha must be above 0"),
        (
            {"partition": "classes", "classes_per_client": 4},
            DataError,
            "classes_per_client must be between 1 and the 3 classes, not 4",
        ),
        ({"path": "nowhere"}, DataError, "path nowhere does not exist"),
        ({"path": ""}, DataError, "path is missing"),
        ({"classes": ("red", "green")}, DataError, "unknown class 'blue'"),
    ],
)
def test_impossible_options_are_named(folder, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        ImageFolder(**{"path": str(folder), "clients": 3, **options}).load(tmp_path)


def test_training_on_an_image_folder_through_the_command_line(folder, tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f"""
        [data]
        name = "images"
        path = "{folder}"
        size = 16
        clients = 4
        partition = "iid"
        [model]
        name = "cnn4"
        channels = 4
        [train]
        epochs = 2
        lr = 0.1
        [schedule]
        rounds = 3
        cohort = 2
        [[variants]]
        strategy = {{ name = "fedavg" }}
        [[variants]]
        strategy = {{ name = "fedproto" }}
        """
    )
    assert main(["sweep", str(recipe), "--out", str(tmp_path / "runs"), "-q"]) == 0
    runs = fedproto.load_all(tmp_path / "runs")
    assert [run.config.title for run in runs] == ["fedavg", "fedproto"]
    assert [len(run.records) for run in runs] == [3, 3]


def test_the_documents_example_of_arrays_runs(tmp_path):
    text = (ROOT / "docs" / "how-to" / "own-arrays.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "fedproto" in result.stdout
