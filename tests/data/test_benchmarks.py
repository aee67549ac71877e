"""The field's benchmarks: files in their official layouts, made by hand, and what may be wrong."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given

from data_files import idx_bytes, image_bytes, needs_real, write_tar, write_zip
from fedproto.cli import main
from fedproto.data import DATASETS
from fedproto.data.benchmarks import CIFAR10, CIFAR100, PACS, SVHN, TinyImageNet
from fedproto.data.federation import Federation, cautions, class_counts, statistics
from fedproto.data.mnist import MNIST, FashionMNIST
from fedproto.data.samples import MappedSamples, TensorSamples, moments, shifted
from fedproto.data.synthetic import Synthetic
from fedproto.errors import DataError
from fuzzing import damaged, damages, fuzzed

pytest_plugins = ["data_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")

PIXELS = np.random.RandomState(0).randint(0, 256, (60, 3072)).astype(np.uint8)
LABELS = (np.arange(60) % 10).astype(np.uint8)
FEW = {"allow_missing": True, "clients": 5}


def cifar10_files() -> dict[str, bytes]:
    """Ten images in each of the six files."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    rows = np.concatenate([LABELS[:, None], PIXELS], axis=1)
    return {
        f"cifar-10-batches-bin/{name}.bin": rows[start : start + 10].tobytes()
        for name, start in zip(names, range(0, 60, 10), strict=True)
    }


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def python2_pickle(fields: dict[bytes, object]) -> bytes:
    """A dictionary as Python 2 pickled it under protocol 2, the way CIFAR's authors did."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def integer(number: int) -> bytes:
        return b"J" + struct.pack("<i", number)

    def array(rows: np.ndarray) -> bytes:
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + integer(0) + b"\x85"
        kind = b"cnumpy\ndtype\n" + short(b"u1") + integer(0) + integer(1) + b"\x87R"
        kind += b"(" + integer(3) + short(b"|") + b"NNN" + 2 * integer(-1) + integer(0) + b"tb"
        shape = integer(rows.shape[0]) + integer(rows.shape[1]) + b"\x86"
        content = b"T" + struct.pack("<i", rows.nbytes) + rows.tobytes()
        return (
            made + short(b"b") + b"\x87R(" + integer(1) + shape + kind + b"\x89" + content + b"tb"
        )

    items = b"".join(
        short(key)
        + (
            array(value)
            if isinstance(value, np.ndarray)
            else b"](" + b"".join(map(integer, value)) + b"e"
        )
        for key, value in fields.items()
    )
    return b"\x80\x02}(" + items + b"u."


def pickled_cifar10() -> dict[str, bytes]:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {
        f"cifar-10-batches-py/{name}": python2_pickle(
            {
                b"data": PIXELS[start : start + 10],
                b"labels": LABELS[start : start + 10].tolist(),
            }
        )
        for name, start in zip(names, range(0, 60, 10), strict=True)
    }


@pytest.mark.parametrize("form", ["binary", "archive", "python"])
def test_cifar10_is_read_from_each_layout(tmp_path, form):
    files = pickled_cifar10() if form == "python" else cifar10_files()
    folder = tmp_path / "cifar10"
    if form == "archive":
        folder.mkdir()
        write_tar(folder / "cifar-10-binary.tar.gz", files, "w:gz")
    else:
        write(folder, files)
    federation = CIFAR10(**FEW).load(tmp_path)
    assert federation.test_set == federation.about()["test_set"] == "official"
    assert federation.class_names[3] == "cat"
    assert sorted(federation.test_indices) == list(range(50, 60))
    assert sorted(federation.train_indices(-1)) == list(range(50))
    assert federation.train_sizes.tolist() == [10] * 5
    assert federation.test_sizes.tolist() == [2] * 5
    images, labels = federation.samples.raw(np.arange(60))
    np.testing.assert_array_equal((images * 255).round(), PIXELS.reshape(60, 3, 32, 32))
    np.testing.assert_array_equal(labels, LABELS)


def test_cifar100_has_the_class_after_the_superclass(tmp_path):
    """The superclass is the first byte of an image, the class the second."""
    labels = np.stack([np.arange(120) % 20, np.arange(120) % 100], axis=1).astype(np.uint8)
    rows = np.concatenate([labels, np.resize(PIXELS, (120, 3072))], axis=1)
    write(
        tmp_path / "cifar100/cifar-100-binary",
        {"train.bin": rows[:100].tobytes(), "test.bin": rows[100:].tobytes()},
    )
    federation = CIFAR100(**FEW).load(tmp_path)
    assert federation.num_classes == 100
    assert (federation.class_name(0), federation.class_name(99)) == ("apple", "worm")
    np.testing.assert_array_equal(federation.samples.targets, labels[:, 1])
    images, _ = federation.samples.raw(np.arange(120))
    np.testing.assert_array_equal((images * 255).round().flatten(1), rows[:, 2:])
    assert len(federation.test_indices) == 20


def test_cifar100_in_python_has_its_own_names_for_labels(tmp_path):
    fields = {b"fine_labels": list(range(100)), b"coarse_labels": [n % 20 for n in range(100)]}
    rows = np.resize(PIXELS, (100, 3072))
    write(
        tmp_path / "cifar100/cifar-100-python",
        {name: python2_pickle({b"data": rows, **fields}) for name in ("train", "test")},
    )
    federation = CIFAR100(**FEW).load(tmp_path)
    np.testing.assert_array_equal(federation.samples.targets[:100], np.arange(100))


class Trap:
    def __reduce__(self):
        return (print, ("a pickle was executed",))


def test_nothing_in_a_pickle_is_executed(tmp_path, capsys):
    write(tmp_path / "cifar10", pickled_cifar10())
    trap = pickle.dumps({b"data": Trap(), b"labels": [0]})
    (tmp_path / "cifar10/cifar-10-batches-py/data_batch_1").write_bytes(trap)
    with pytest.raises(DataError, match=r"data_batch_1 does not hold .* asks for builtins.print"):
        CIFAR10(**FEW).load(tmp_path)
    assert "executed" not in capsys.readouterr().out


@fuzzed
@given(changes=damages())
def test_damaged_pickles_end_in_one_line(changes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    files = pickled_cifar10()
    name = "cifar-10-batches-py/data_batch_2"
    write(folder / "cifar10", {**files, name: damaged(files[name], changes)})
    said = ""
    try:
        CIFAR10(**FEW).load(folder)
    except DataError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda files, name: {**files, name: files[name][:-1]}, "is incomplete: 30,729 bytes"),
        (lambda files, name: {**files, name: b""}, "is incomplete: 0 bytes"),
        (
            lambda files, name: {**files, name: b"\x0a" + files[name][1:]},
            "label 10 is outside the classes 0 to 9",
        ),
        (
            lambda files, _: {one: bytes(len(files[one])) for one in files},
            "class 1 has no images",
        ),
        (
            lambda files, name: {one: files[one] for one in files if one != name},
            "data_batch_3.bin is neither in",
        ),
    ],
)
def test_what_is_wrong_with_a_binary_file_is_said(tmp_path, changed, message):
    files = changed(cifar10_files(), "cifar-10-batches-bin/data_batch_3.bin")
    write(tmp_path / "cifar10", files)
    with pytest.raises(DataError, match=message) as caught:
        CIFAR10(**FEW).load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert "cifar10" in str(caught.value)


def test_files_that_end_too_early_are_refused_unless_that_is_accepted(tmp_path):
    """A file cut between two images looks whole; the number of images tells."""
    write(tmp_path / "cifar10", cifar10_files())
    CIFAR10(**FEW).load(tmp_path)
    with pytest.raises(DataError, match=r"50 instead of 50,000 train images.*allow_missing"):
        CIFAR10().load(tmp_path)


def test_the_test_set_may_be_split_off_the_clients_instead(tmp_path):
    write(tmp_path / "cifar10", cifar10_files())
    # The training part of twelve samples is rounded down.
    for test, size in (("split", 3), (0.2, 3), (0.5, 6)):
        federation = CIFAR10(**FEW, test=test).load(tmp_path)
        assert federation.test_set == "split"
        assert federation.test_sizes.tolist() == [size] * 5
        assert class_counts(federation).sum() == 60
        assert not cautions(federation.about())


def test_a_test_set_for_all_is_said_with_the_scores(tmp_path, capsys):
    root = tmp_path / "data"
    write(root / "cifar10", cifar10_files())
    recipe = tmp_path / "few.toml"
    recipe.write_text(
        """strategy = "fedavg"
model = { name = "mlp", hidden = 4, features = 4 }
data = { name = "cifar10", clients = 5, partition = "iid", allow_missing = true }
schedule = { rounds = 1, cohort = 2 }
train = { epochs = 1 }
engine = "reference"
"""
    )
    out = tmp_path / "run"
    assert main(["run", str(recipe), f"--out={out}", f"--data-root={root}", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["compare", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cifar10 is tested on one set for all clients (official)" in said


def test_what_has_no_official_test_set_says_so(tmp_path):
    with pytest.raises(DataError, match=r"has no official test set; set data.test to a share"):
        Synthetic(test="official").load(tmp_path)


def test_classes_are_counted_without_a_test_set_for_all(tmp_path):
    write(tmp_path / "cifar10", cifar10_files())
    found = statistics(CIFAR10(**FEW).load(tmp_path))
    assert found["samples"] == found["train"] == 50
    assert (found["test"], found["test_set"]) == (10, "official")
    parts = [(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1]))] * 2
    given = Federation.from_clients(parts, test=(torch.zeros(6, 2), torch.ones(6).long()))
    assert given.test_set == "given"
    assert class_counts(given).tolist() == [[2, 2], [2, 2]]


def test_mnist_can_be_tested_on_its_official_test_set(tmp_path):
    for source in (MNIST, FashionMNIST):
        for part, number in (("train", 40), ("t10k", 20)):
            images = PIXELS[:number, :784].reshape(number, 28, 28)
            write(
                tmp_path / source.folder / "raw",
                {
                    f"{part}-images-idx3-ubyte": idx_bytes(images),
                    f"{part}-labels-idx1-ubyte": idx_bytes(LABELS[:number]),
                },
            )
    options = {"clients": 4, "partition": "iid", "validation": 0.0}
    pooled = MNIST(**options).load(tmp_path)
    official = MNIST(**options, test="official").load(tmp_path)
    fashion = FashionMNIST(**options).load(tmp_path)
    assert (pooled.test_set, pooled.train_sizes.sum()) == ("split", 48)
    for federation in (official, fashion):
        assert federation.test_set == "official"
        assert sorted(federation.test_indices) == list(range(40, 60))
    assert fashion.class_names[9] == "ankle boot"


def test_svhn_reads_mat_files_in_which_ten_is_zero(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    (tmp_path / "svhn").mkdir()
    pixels = PIXELS.reshape(60, 3, 32, 32)
    for part, where in (("train", slice(0, 40)), ("test", slice(40, 60))):
        numbers = np.where(LABELS[where] == 0, 10, LABELS[where])[:, None]
        images = pixels[where].transpose(2, 3, 1, 0)
        path = tmp_path / f"svhn/{part}_32x32.mat"
        savemat(path, {"X": images, "y": numbers}, do_compression=True)
    federation = SVHN(**FEW).load(tmp_path)
    images, labels = federation.samples.raw(np.arange(60))
    np.testing.assert_array_equal(labels, LABELS)
    np.testing.assert_array_equal((images * 255).round(), pixels)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"test_32x32.mat is not a complete MAT file"):
        SVHN(**FEW).load(tmp_path)


def picture(color: int, size: int = 8, format: str = "PNG") -> bytes:
    return image_bytes(np.full((size, size, 3), color, dtype=np.uint8), format)


def test_tiny_imagenet_is_tested_on_its_validation_part(tmp_path):
    ids = [f"n0000000{number}" for number in range(3)]
    lines = [f"val_{number}.JPEG\t{ids[number % 3]}\t0\t0\t9\t9" for number in range(6)]
    files = {
        "wnids.txt": "\n".join(reversed(ids)).encode(),
        "words.txt": f"{ids[0]}\tgoldfish, Carassius auratus\n{ids[1]}\tfrog".encode(),
        "val/val_annotations.txt": "\n".join(lines).encode(),
        **{f"val/images/val_{number}.JPEG": picture(200) for number in range(6)},
        **{
            f"train/{name}/images/{name}_{number}.JPEG": picture(20 * label)
            for label, name in enumerate(ids)
            for number in range(4)
        },
        "test/images/test_0.JPEG": picture(0),
    }
    (tmp_path / "tiny-imagenet").mkdir()
    path = tmp_path / "tiny-imagenet/tiny-imagenet-200.zip"
    write_zip(path, {f"tiny-imagenet-200/{name}": one for name, one in files.items()})
    federation = TinyImageNet(**FEW, size=8).load(tmp_path)
    assert federation.class_names == (ids[2], "frog", "goldfish")
    assert (len(federation.samples), len(federation.test_indices)) == (18, 6)
    images, labels = federation.samples.raw(np.arange(18))
    assert labels.tolist() == [2] * 4 + [1] * 4 + [0] * 4 + [2, 1, 0, 2, 1, 0]
    np.testing.assert_array_equal(
        (images[:, 0, 0, 0] * 255).round(), [0] * 4 + [20] * 4 + [40] * 4 + [200] * 6
    )
    del files["val/val_annotations.txt"]
    write_zip(path, files)
    with pytest.raises(DataError, match=r"val_annotations.txt is neither in"):
        TinyImageNet(**FEW).load(tmp_path)


def write_pacs(root) -> None:
    domains = ("art_painting", "cartoon", "photo", "sketch")
    for place, domain in enumerate(domains):
        for name in PACS.class_names:
            files = {f"pic_{number}.png": picture(60 * place) for number in range(2 + place)}
            write(root / "pacs/PACS" / domain / name, files)


def test_the_domains_of_pacs_are_its_clients(tmp_path):
    write_pacs(tmp_path)
    federation = PACS(allow_missing=True, size=8).load(tmp_path)
    assert (federation.train_sizes + federation.test_sizes).tolist() == [14, 21, 28, 35]
    for place, client in enumerate(federation.clients):
        images, _ = federation.samples.raw(client.train)
        assert (images * 255).round().unique().tolist() == [60 * place]


def test_an_unseen_domain_is_the_test_set(tmp_path):
    write_pacs(tmp_path)
    source = PACS(allow_missing=True, size=8, unseen="photo", clients=6)
    federation = source.load(tmp_path)
    assert federation.about()["test_set"] == "unseen domain photo"
    images, _ = federation.samples.raw(federation.test_indices)
    assert (images * 255).round().unique().tolist() == [120]
    assert federation.train_sizes.tolist() == [7, 11, 18, 7, 10, 17]
    with pytest.raises(DataError, match="pacs has no official test set"):
        PACS(allow_missing=True, size=8, test="official").load(tmp_path)


NAMED = ("cifar10", "cifar100", "fashion-mnist", "svhn", "tiny-imagenet", "pacs")


@pytest.mark.parametrize("name", NAMED)
def test_absent_files_are_named_with_address_and_place(name, tmp_path, capsys):
    source = DATASETS.get(name)
    assert main(["data", "stats", name, f"--data-root={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"fedproto data fetch {name}" in line
    assert source.downloads[0].url in line
    assert source.downloads[0].path in line
    assert all(one.path.startswith(f"{source.folder}/") for one in source.downloads)
    assert source.licence in source.status(tmp_path)


@pytest.mark.parametrize(("source", "classes"), [(CIFAR10(), 10), (CIFAR100(), 100)])
def test_real_files_have_the_known_counts_and_the_channels_of_the_normalisation(
    source, classes, real_root
):
    needs_real(source.folder)
    federation = source.load(real_root)
    images, labels = federation.samples.inputs, federation.samples.targets
    assert images.shape == (60_000, 3, 32, 32)
    assert np.bincount(labels[:50_000]).tolist() == [50_000 // classes] * classes
    assert np.bincount(labels[50_000:]).tolist() == [10_000 // classes] * classes
    assert federation.train_sizes.tolist() == [500] * 100
    mean, deviation = moments(images[:50_000], per_pixel=False)
    assert [round(float(one) / 255, 4) for one in mean] == list(source.mean)
    assert [round(float(one) / 255, 4) for one in deviation] == list(source.std)
    assert CIFAR10().mean == (0.4914, 0.4822, 0.4465)


def image_samples(number: int = 6) -> TensorSamples:
    images = np.random.RandomState(0).rand(number, 3, 9, 9).astype(np.float32)
    return TensorSamples(torch.from_numpy(images), torch.zeros(number).long())


PARTS = [np.array([0, 2]), np.array([4])]


@pytest.mark.parametrize("kind", ["noise", "rotation", "blur"])
def test_a_shift_moves_every_clients_own_samples_and_no_others(kind):
    samples = image_samples()
    level = 20.0 if kind == "rotation" else 0.5
    one, again = (shifted(samples, PARTS, kind, level, seed=3) for _ in range(2))
    moved = (one.inputs != samples.inputs).flatten(1).any(dim=1)
    assert moved.tolist() == [True, False, True, False, True, False]
    torch.testing.assert_close(one.inputs, again.inputs, rtol=0, atol=0)
    assert shifted(samples, PARTS, "none", level, 3) is samples


def test_noise_grows_from_client_to_client():
    samples = TensorSamples(torch.zeros(40, 3, 16, 16), torch.zeros(40).long())
    parts = np.array_split(np.arange(40), 4)
    noisy = shifted(samples, parts, "noise", 0.4, seed=0).inputs
    found = [float(noisy[part].std()) for part in parts]
    np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4], rtol=0.05)


def test_a_quarter_turn_and_a_blur_by_hand():
    samples = image_samples(2)
    turned = shifted(samples, [np.arange(2)], "rotation", 90.0, seed=0).inputs
    torch.testing.assert_close(turned, torch.rot90(samples.inputs, 1, (2, 3)), rtol=1e-4, atol=1e-4)
    point = torch.zeros(1, 1, 15, 15)
    point[0, 0, 7, 7] = 1
    blurred = shifted(TensorSamples(point, torch.zeros(1)), [np.arange(1)], "blur", 1.0, 0).inputs
    taps = np.exp(-0.5 * np.arange(-3, 4) ** 2)
    taps /= taps.sum()
    np.testing.assert_allclose(blurred[0, 0, 4:11, 4:11], np.outer(taps, taps), atol=1e-6)


def test_a_blur_of_any_width_takes_the_memory_of_a_few_images():
    samples = image_samples(2)
    blurred = shifted(samples, [np.arange(2)], "blur", 1e30, seed=0).inputs
    by_row = samples.inputs[0, 0].numpy()
    padded = np.pad(by_row, 9, mode="edge")
    assert float(blurred[0, 0, 4, 4]) == pytest.approx(padded[4:23, 4:23].mean(), rel=1e-4)


def test_shifted_bytes_stay_bytes():
    samples = MappedSamples(torch.full((4, 3, 8, 8), 250, dtype=torch.uint8), torch.zeros(4))
    moved = shifted(samples, [np.arange(4)], "noise", 0.5, seed=0)
    assert moved.inputs.dtype == torch.uint8
    assert moved.inputs.max() == 255, "clipped, not wrapped around"


def test_a_shift_of_what_is_no_image_is_refused():
    vectors = TensorSamples(torch.zeros(4, 5), torch.zeros(4))
    with pytest.raises(DataError, match="needs images"):
        shifted(vectors, PARTS, "noise", 0.1, 0)
    maps = TensorSamples(torch.zeros(4, 3, 8, 8), torch.zeros(4, 8, 8))
    with pytest.raises(DataError, match="does not rotate label maps"):
        shifted(maps, PARTS, "rotation", 0.1, 0)


def test_natural_groups_are_asked_of_data_that_has_them(tmp_path):
    write(tmp_path / "cifar10", cifar10_files())
    with pytest.raises(DataError, match="has no natural groups"):
        CIFAR10(**FEW, partition="groups").load(tmp_path)
