"""The paper's data sets: its federations, and real items the right way up with the right label."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pytest
import torch

import fedproto
from data_files import idx_bytes, image_bytes, needs_real, write_tar, write_zip
from fedproto.cli import main
from fedproto.data import DATASETS
from fedproto.data.celeba import CelebA, read_identities
from fedproto.data.federation import class_counts, statistics
from fedproto.data.files import open_tree
from fedproto.data.mnist import FEMNIST, MNIST
from fedproto.data.partition import by_classes_and_sizes
from fedproto.data.segmentation import CLASSES, MACRO_CLASSES, FPascal, FPascalMacro, palette
from fedproto.data.synthetic import Synthetic
from fedproto.errors import DataError
from fedproto.rng import Purpose, stream
from paper.experiments.data import listed
from paper.printed import paper

pytest.importorskip("PIL", reason="needs Pillow (fedproto[images])")
pytest_plugins = ["data_fixtures"]

MACRO_OF = {
    name: place for place, names in enumerate(MACRO_CLASSES.values()) for name in names.split()
}


def assert_like_paper(row, name, rel=0.1):
    """Clients and classes exactly, samples and spread within a tenth."""
    printed = paper()["data"][name]
    assert (row["classes"], row["clients"]) == (printed["classes"], printed["clients"])
    assert row["samples"] == pytest.approx(printed["samples"], rel=rel)
    assert row["std"] == pytest.approx(printed["std"], rel=rel)


def test_synthetic_is_the_papers_federation(tmp_path):
    assert_like_paper(statistics(Synthetic().load(tmp_path)), "synthetic")


def test_mnist_is_the_papers_federation(real_root):
    needs_real("MNIST")
    federation = MNIST().load(real_root)
    row = statistics(federation)
    assert_like_paper(row, "mnist")
    assert (row["fewest_classes"], row["most_classes"]) == (2, 2)
    assert row["samples"] + row["validation"] == 70_000
    counts = class_counts(federation)
    for client in (0, 7, 19, 999):
        assert set(np.flatnonzero(counts[client])) == {client % 10, (client + 1) % 10}


def test_fpascal_is_the_papers_federation_whatever_the_concentration(real_root):
    needs_real("VOC")
    for alpha in (0.01, 0.1, 1000.0):
        row = statistics(FPascal(alpha=alpha).load(real_root))
        assert_like_paper(row, "fpascal")
        assert (row["samples"], row["validation"]) == (6746, 927)
    assert_like_paper(statistics(FPascalMacro().load(real_root)), "fpascal-macro")


def test_celeba_is_the_papers_federation_by_the_official_lists(real_root):
    needs_real("celeba")
    row = statistics(listed(CelebA(), real_root))
    assert_like_paper(row, "celeba")
    assert row["samples"] == paper()["data"]["celeba"]["samples"]
    assert row["smallest"] == 4


def test_celeba_with_the_images_that_are_there(real_root):
    folder = needs_real("celeba")
    if (folder / "img_align_celeba.zip").exists() or (folder / "img_align_celeba").exists():
        pytest.skip("needs a celeba folder in which images are missing")
    with pytest.raises(DataError, match=r"images of the lists are not in .* data\.allow_missing"):
        CelebA().load(real_root)
    row = statistics(CelebA(allow_missing=True).load(real_root))
    assert row["clients"] == 278
    assert row["samples"] + row["validation"] == 6181


def test_femnist_would_be_the_papers_federation_with_seven_times_the_test_letters():
    """The official test file is one seventh of all letters; the subset may have less training."""
    folder = needs_real("EMNIST")
    labels = open_tree(folder).read(
        open_tree(folder).require("emnist-byclass-test-labels-idx1-ubyte.gz")
    )
    letters = np.frombuffer(labels, dtype=np.uint8, offset=8).astype(np.int64) - 36
    counts = np.bincount(letters[(letters >= 0) & (letters < 10)], minlength=10)
    options = FEMNIST()
    parts = by_classes_and_sizes(
        np.repeat(np.arange(10), 7 * counts),
        stream(options.seed, Purpose.PARTITION),
        clients=options.clients,
        classes_per_client=options.classes_per_client,
        mean_size=options.mean_size,
        sigma=options.sigma,
        minimum=options.minimum,
    )
    sizes = np.array([len(part) * 9 // 10 for part in parts])
    assert sizes.sum() == pytest.approx(paper()["data"]["femnist"]["samples"], rel=0.1)
    assert sizes.std() == pytest.approx(paper()["data"]["femnist"]["std"], rel=0.1)


def test_femnist_gives_every_client_five_letters_in_a_row(real_root):
    needs_real("EMNIST")
    federation = FEMNIST().load(real_root)
    counts = class_counts(federation)
    assert counts.shape == (200, 10)
    for client, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == {(client + step) % 10 for step in range(5)}


def test_real_digits_are_upright(real_root):
    """The first training image of MNIST is a five, the first test image a seven."""
    needs_real("MNIST")
    samples = MNIST().load(real_root).samples
    inputs, targets = samples.batch(np.array([0, 60_000]))
    assert targets.tolist() == [5, 7]
    seven = inputs[1, 0]
    # A seven has its bar above and one stroke below; upside down or transposed it would not.
    bar = seven[7:10].sum(dim=1).max()
    assert bar > 2 * seven[20:25].sum(dim=1).max()
    assert inputs.min() == 0
    assert inputs.max() == 1


def test_real_letters_are_upright(real_root):
    """In the mean d the stem is at the right and reaches up; in the mean b it is at the left."""
    needs_real("EMNIST")
    samples = FEMNIST().load(real_root).samples
    images, labels = samples.inputs[:, 0].float(), samples.targets
    for letter, stem_at_left in (("b", True), ("d", False), ("h", True)):
        above = images[labels == ord(letter) - ord("a")].mean(dim=0)[3:10]
        assert (above[:, :14].sum() > 1.5 * above[:, 14:].sum()) == stem_at_left
        assert (above[:, 14:].sum() > 1.5 * above[:, :14].sum()) == (not stem_at_left)
    tail = images[labels == ord("g") - ord("a")].mean(dim=0)
    assert tail[20:, 14:].sum() > tail[20:, :8].sum()


def test_a_real_face_has_its_label_and_its_pixels(real_root):
    folder = needs_real("celeba")
    tree = open_tree(folder)
    name = tree.find("img_align_celeba/000093.jpg")
    if name is None:
        pytest.skip("needs img_align_celeba/000093.jpg")
    from PIL import Image

    source = CelebA(allow_missing=True)
    arrays = source.prepare(real_root)
    names, _ = read_identities(tree)
    place = sum(tree.find(f"img_align_celeba/{one}") is not None for one in names[:92])
    picture = Image.open(io.BytesIO(tree.read(name)))
    if picture.size == (84, 84):
        np.testing.assert_array_equal(
            arrays["images"][place].transpose(1, 2, 0), np.asarray(picture.convert("RGB"))
        )
    line = next(
        line
        for line in tree.read(tree.require("list_attr_celeba.txt")).decode().splitlines()
        if line.startswith("000093.jpg")
    )
    header = tree.read(tree.require("list_attr_celeba.txt")).decode().splitlines()[1].split()
    assert arrays["labels"][place] == (line.split()[1 + header.index("Smiling")] == "1")


def test_a_real_mask_lies_on_its_image(real_root):
    """2007_000033 shows an aeroplane; image and mask are kept pixel by pixel."""
    folder = needs_real("VOC")
    from PIL import Image

    tree = open_tree(folder)
    arrays = FPascal().prepare(real_root)

    def mask_of(stem):
        file = tree.require(f"SegmentationClassAug/{stem}.png")
        return np.asarray(Image.open(io.BytesIO(tree.read(file))))

    listed = tree.read(tree.require("ImageSets/Segmentation/val.txt")).decode().split()
    before = [mask_of(stem) for stem in listed[: listed.index("2007_000033")]]
    # Images of several classes are left out; those for validation come last.
    kept = sum(len(set(np.unique(one).tolist()) - {0, 255}) == 1 for one in before)
    place = int(arrays["for_clients"].sum()) + kept
    mask = mask_of("2007_000033")
    height, width = mask.shape
    if max(mask.shape) == 224:
        image = Image.open(io.BytesIO(tree.read(tree.require("JPEGImages/2007_000033.jpg"))))
        np.testing.assert_array_equal(arrays["masks"][place][:height, :width], mask)
        np.testing.assert_array_equal(
            arrays["images"][place].transpose(1, 2, 0)[:height, :width], np.asarray(image)
        )
    assert CLASSES[arrays["classes"][place]] == "aeroplane"
    assert (arrays["masks"][place][height:] == 255).all()
    federation = FPascalMacro().load(real_root)
    _, targets = federation.samples.batch(np.array([place]))
    assert set(targets.unique().tolist()) == {0, MACRO_OF["aeroplane"], 255}


def test_the_macro_classes_hold_every_class_once():
    assert sorted(MACRO_OF) == sorted(CLASSES)
    assert list(MACRO_CLASSES) == ["background", "person", "vehicles", "household", "animals"]


def test_the_palette_is_that_of_voc():
    colours = palette()
    assert colours[0].tolist() == [0, 0, 0]
    assert colours[CLASSES.index("aeroplane")].tolist() == [128, 0, 0]
    assert colours[CLASSES.index("person")].tolist() == [192, 128, 128]
    assert colours[CLASSES.index("tvmonitor")].tolist() == [0, 64, 128]
    assert colours[255].tolist() == [224, 224, 192]


@pytest.mark.usefixtures("cache")
def test_letters_are_stored_transposed_and_others_are_left_out(tmp_path):
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    upright = np.zeros((28, 28), dtype=np.uint8)
    upright[2:6, :] = 200
    labels = np.array([*range(36, 46), 5, 46, 10] * 4)
    images = np.tile(upright.T, (len(labels), 1, 1))
    members = {}
    for part in ("train", "test"):
        prefix = f"gzip/emnist-byclass-{part}"
        members[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(images))
        members[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(labels))
    write_zip(raw / "gzip.zip", members)
    federation = FEMNIST(clients=2, classes_per_client=2).load(tmp_path)
    inputs, targets = federation.samples.batch(np.arange(len(federation.samples)))
    assert targets.tolist() == list(range(10)) * 8
    assert ((inputs[:, 0] > 0) == torch.from_numpy(upright > 0)).all()


@pytest.fixture
def faces(tmp_path):
    """Two people with six and two images, in CelebA's layout."""
    names = [f"{number:06}.jpg" for number in range(1, 9)]
    people = [7, 7, 7, 7, 7, 7, 3, 3]
    smiles = [1, -1, 1, 1, -1, -1, 1, 1]
    rows = [f"{name} -1 {smile:2d}" for name, smile in zip(names, smiles, strict=True)]
    members = {
        "celeba/identity_CelebA.txt": "\n".join(
            f"{name} {person}" for name, person in zip(names, people, strict=True)
        ).encode(),
        "celeba/list_attr_celeba.txt": "\n".join(["8", "Bald Smiling ", *rows]).encode(),
    }
    for number, name in enumerate(names):
        grey = np.full((20, 16, 3), 20 * number, dtype=np.uint8)
        members[f"celeba/img_align_celeba/{name}"] = image_bytes(grey, "JPEG")
    (tmp_path / "celeba").mkdir()
    write_tar(tmp_path / "celeba" / "all.tar.gz", members, "w:gz")
    return members


@pytest.mark.usefixtures("cache", "faces")
def test_a_person_with_enough_images_is_a_client(tmp_path):
    federation = CelebA(size=8, validation=0.0).load(tmp_path)
    (client,) = federation.clients
    mine = np.sort(np.concatenate([client.train, client.test]))
    inputs, targets = federation.samples.batch(mine)
    assert targets.tolist() == [1, 0, 1, 1, 0, 0]
    np.testing.assert_allclose(inputs.mean(dim=(1, 2, 3)) * 255, [0, 20, 40, 60, 80, 100], atol=1.5)
    assert inputs.shape == (6, 3, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"celeba/img_align_celeba/000003.jpg": None}, "1 images of the lists are not in"),
        ({"celeba/img_align_celeba/000003.jpg": b"no picture"}, r"000003\.jpg does not decode"),
        ({"celeba/list_attr_celeba.txt": None}, r"list_attr_celeba\.txt is neither in"),
        ({"celeba/list_attr_celeba.txt": b"1\nBald\n000001.jpg 1"}, "unknown attribute 'Smiling'"),
        ({"celeba/list_attr_celeba.txt": b"1\nSmiling\n9.jpg 1"}, "list different images"),
        ({"celeba/identity_CelebA.txt": b"000001.jpg x"}, "expected lines 'image person'"),
    ],
)
def test_wrong_files_of_celeba_are_named(tmp_path, cache, faces, change, message):
    kept = {name: content for name, content in (faces | change).items() if content is not None}
    write_tar(tmp_path / "celeba" / "all.tar.gz", kept, "w:gz")
    with pytest.raises(DataError, match=message):
        CelebA(size=8).load(tmp_path)
    assert not [path for path in cache.glob("celeba-*[0-9a-f]") if (path / "images.npy").exists()]


@pytest.mark.usefixtures("cache")
def test_voc_keeps_images_with_one_object_class_and_finds_trainaug_itself(tmp_path):
    base = "VOCdevkit/VOC2012"
    members = {f"{base}/ImageSets/Segmentation/val.txt": b"v1\n"}
    for stem, classes in {"a": [1], "b": [1, 2], "c": [20], "d": [], "v1": [3], "e": [15]}.items():
        mask = np.zeros((10, 20), dtype=np.uint8)
        for place, label in enumerate(classes):
            mask[2:5, 2 + 5 * place : 5 + 5 * place] = label
        mask[9] = 255
        members[f"{base}/SegmentationClassAug/{stem}.png"] = image_bytes(mask)
        members[f"{base}/JPEGImages/{stem}.jpg"] = image_bytes(
            np.zeros((10, 20, 3), dtype=np.uint8), "JPEG"
        )
    (tmp_path / "VOC").mkdir()
    write_tar(tmp_path / "VOC" / "voc.tar", members)
    federation = FPascal(clients=3, partition="iid", size=20).load(tmp_path)
    assert federation.task == "segmentation"
    assert federation.labels.tolist() == [0, 19, 14, 2]
    assert federation.validation.tolist() == [3]
    assert federation.num_classes == 21


@pytest.mark.usefixtures("cache")
def test_every_data_set_with_files_says_where_to_put_them(tmp_path):
    for name in DATASETS.names():
        source = DATASETS.get(name)
        if source.folder:
            assert source.downloads
            assert all(each.path.startswith(f"{source.folder}/") for each in source.downloads)
            with pytest.raises(DataError, match=f"{source.folder}; get them with: fedproto data"):
                source().load(tmp_path)


@pytest.mark.parametrize(
    ("name", "folder", "options", "model"),
    [
        ("mnist", "MNIST", "", 'name = "cnn"\nchannels1 = 2\nchannels2 = 2\nfeatures = 8'),
        ("femnist", "EMNIST", "", 'name = "cnn"\nchannels1 = 2\nchannels2 = 2\nfeatures = 8'),
        ("celeba", "celeba", "allow_missing = true", 'name = "cnn4"\nchannels = 2'),
    ],
    ids=["mnist", "femnist", "celeba"],
)
def test_fedavg_and_fedproto_train_on_real_files(real_root, tmp_path, name, folder, options, model):
    needs_real(folder)
    recipe = tmp_path / "few.toml"
    recipe.write_text(
        f"""
[data]
name = "{name}"
{options}
[model]
{model}
[train]
epochs = 1
[schedule]
rounds = 2
cohort = 3
[evaluate]
every = 2
[[variants]]
strategy = {{ name = "fedavg" }}
[[variants]]
strategy = {{ name = "fedproto" }}
"""
    )
    arguments = ["sweep", str(recipe), "--out", str(tmp_path / "runs"), "-q"]
    assert main([*arguments, "--data-root", str(real_root)]) == 0
    last = {run.config.title: run.metrics for run in fedproto.load_all(tmp_path / "runs")}
    assert set(last) == {"fedavg", "fedproto"}
    for metrics in last.values():
        assert {"train_loss", "accuracy", "validation_accuracy"} <= set(metrics)
