"""The prepared form: built once, never half there, shared by processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from data_files import idx_bytes, write_mnist, write_tar, write_zip
from fedproto.data import samples
from fedproto.data.base import prepared
from fedproto.data.digits import Digits
from fedproto.data.files import open_tree
from fedproto.data.mnist import MNIST, read_idx
from fedproto.data.samples import resident
from fedproto.data.tasks import Classification
from fedproto.engines import ENGINES, EngineOptions, Workload
from fedproto.errors import DataError
from fedproto.models.small import CNNOptions
from helpers import Notices

pytest_plugins = ["data_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.bin"
    path.write_bytes(b"abc")
    return path


class Counting:
    """A build that counts how often it is asked for."""

    def __init__(self):
        self.calls = 0

    def __call__(self, builder):
        self.calls += 1
        builder.put("values", np.arange(3))


def test_built_once_then_read_from_the_cache(source):
    build = Counting()
    for _ in range(2):
        arrays = prepared("thing", {"source": source}, {}, build)
    assert build.calls == 1
    assert arrays["values"].tolist() == [0, 1, 2]
    assert isinstance(arrays["values"], np.memmap)


def test_a_source_of_another_size_or_time_is_built_again(source):
    build = Counting()
    prepared("thing", {"source": source}, {}, build)
    os.utime(source, ns=(1, 1))
    prepared("thing", {"source": source}, {}, build)
    assert build.calls == 2
    source.write_bytes(b"abcd")
    os.utime(source, ns=(1, 1))
    prepared("thing", {"source": source}, {}, build)
    assert build.calls == 3


def test_other_options_build_another_entry(source):
    build = Counting()
    prepared("thing", {"source": source}, {"size": 1}, build)
    prepared("thing", {"source": source}, {"size": 2}, build)
    assert build.calls == 2


@pytest.mark.parametrize("raised", [KeyboardInterrupt, DataError])
def test_an_interrupted_build_leaves_nothing(source, cache, raised):
    def build(builder):
        builder.array("values", (1000,), np.uint8)[:] = 1
        raise raised("stop")

    with pytest.raises(raised):
        prepared("thing", {"source": source}, {}, build)
    assert not [path.name for path in cache.iterdir() if path.is_dir()]
    arrays = prepared("thing", {"source": source}, {}, Counting())
    assert arrays["values"].tolist() == [0, 1, 2]


def test_a_killed_build_does_not_look_finished(source, cache):
    def die(builder):
        builder.array("values", (1000,), np.uint8)[:] = 1
        os._exit(9)

    context = multiprocessing.get_context("fork")
    process = context.Process(target=prepared, args=("thing", {"source": source}, {}, die))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert list(cache.glob("*.partial"))
    build = Counting()
    assert prepared("thing", {"source": source}, {}, build)["values"].tolist() == [0, 1, 2]
    assert build.calls == 1
    assert not list(cache.glob("*.partial"))


def test_processes_that_start_together_build_it_once(source, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()

    def build(builder):
        (marks / str(os.getpid())).touch()
        builder.put("values", np.arange(1_000_000))

    def work():
        assert prepared("thing", {"source": source}, {}, build)["values"].sum() == 499999500000

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(marks.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(source, monkeypatch):
    monkeypatch.setenv("FEDPROTO_CACHE", str(source / "below-a-file"))
    with pytest.raises(DataError, match="FEDPROTO_CACHE"):
        prepared("thing", {"source": source}, {}, Counting())


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve space")
def test_a_full_disk_is_an_error_before_anything_is_decoded(source, monkeypatch):
    """Written later, memory of a file for which there is no space ends the whole process."""

    def full(*place):
        assert place[1:] == (0, 2**16 + 128)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"No space left on device; .* FEDPROTO_CACHE"):
        prepared("thing", {"it": source}, {}, lambda builder: builder.array("a", (2**16,), "u1"))


def test_mnist_from_gz_files_from_plain_ones_and_from_an_archive_is_the_same(tmp_path):
    labels = np.arange(200) % 10
    options = {"clients": 5, "minimum": 2}
    images = write_mnist(tmp_path / "packed", labels)
    raw = tmp_path / "packed" / "MNIST" / "raw"
    (tmp_path / "plain" / "MNIST").mkdir(parents=True)
    (tmp_path / "archive" / "MNIST").mkdir(parents=True)
    tree = open_tree(raw)
    for name in tree.locations:
        (tmp_path / "plain" / "MNIST" / name.removesuffix(".gz")).write_bytes(tree.read(name))
    write_zip(
        tmp_path / "archive" / "MNIST" / "all.zip",
        {f"gzip/{path.name}": path.read_bytes() for path in raw.iterdir()},
    )
    federations = [
        MNIST(**options).load(tmp_path / kind) for kind in ("packed", "plain", "archive")
    ]
    for federation in federations:
        inputs, targets = federation.samples.batch(np.arange(200))
        np.testing.assert_array_equal(targets.numpy(), labels)
        np.testing.assert_allclose(inputs[:, 0].numpy(), images / np.float32(255), rtol=1e-6)
        assert federation.train_sizes.tolist() == federations[0].train_sizes.tolist()


def test_normalisation_subtracts_and_divides(tmp_path):
    write_mnist(tmp_path, np.arange(100) % 10)
    plain = MNIST(clients=5, minimum=2).load(tmp_path)
    standard = MNIST(clients=5, minimum=2, mean=(0.25,), std=(0.5,)).load(tmp_path)
    which = np.array([3, 50])
    expected = (plain.samples.batch(which)[0] - 0.25) / 0.5
    np.testing.assert_allclose(standard.samples.batch(which)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.1, 0.2, 0.3)}, r"mean has 3 values for inputs of shape \(1, 8, 8\)"),
        ({"std": (0.1, 0.2)}, "give one per channel"),
        ({"std": (0.0,)}, "std must be above 0, not 0"),
    ],
)
def test_a_normalisation_that_does_not_fit_is_named(options, message):
    with pytest.raises(DataError, match=message):
        Digits(**options).load(Path())


def test_all_samples_gathered_equal_those_read_in_batches(tmp_path):
    write_mnist(tmp_path, np.arange(100) % 10)
    samples = MNIST(clients=5, minimum=2, mean=(0.25,), std=(0.5,)).load(tmp_path).samples
    inputs, targets = samples.batch(np.arange(100))
    together = samples.gathered(step=33)
    assert together.inputs.equal(inputs)
    assert together.targets.equal(targets)


def test_samples_are_held_at_once_only_where_they_take_little_memory(tmp_path, monkeypatch):
    write_mnist(tmp_path, np.arange(100) % 10)
    mapped = MNIST(clients=5, minimum=2).load(tmp_path).samples
    device = torch.device("cpu")
    together = resident(mapped, device, torch.float64)
    assert together.inputs.dtype == torch.float64
    assert together.inputs.equal(mapped.to(device, torch.float64).batch(np.arange(100))[0])
    monkeypatch.setattr(samples, "RESIDENT_SHARE", 0.0)
    assert resident(mapped, device, torch.float64) is None


def test_the_stacked_engine_trains_on_prepared_samples(tmp_path):
    write_mnist(tmp_path, np.arange(200) % 10)
    federation = MNIST(clients=5, minimum=2).load(tmp_path)
    model = CNNOptions(channels1=2, channels2=2, features=4).build((1, 28, 28), 10)
    said = []
    engine = ENGINES.get("stacked")(
        Workload(
            federation, model, Classification(), EngineOptions(device="cpu"), callback=Notices(said)
        )
    )
    assert engine._obstacle is None, said
    engine.close()


def test_a_truncated_gz_file_is_named_and_the_cache_stays_empty(tmp_path, cache):
    write_mnist(tmp_path, np.arange(100) % 10)
    broken = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged or incomplete"):
        MNIST(clients=5, minimum=2).load(tmp_path)
    assert not list(cache.glob("mnist-*[0-9a-f]"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.arange(100) % 11, "label 10 is outside the classes 0 to 9"),
        (np.arange(100) % 9, "class 9 has no images"),
    ],
)
def test_labels_that_are_no_digits_and_missing_digits_are_named(tmp_path, cache, labels, message):
    write_mnist(tmp_path, labels)
    with pytest.raises(DataError, match=f"MNIST: {message}"):
        MNIST(clients=5, minimum=2).load(tmp_path)
    assert not list(cache.glob("mnist-*[0-9a-f]"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not idx at all, no", "not an idx file"),
        (idx_bytes(np.zeros((2, 3, 3)))[:-1], "incomplete"),
        (idx_bytes(np.zeros(4)), "not an idx file with 3 dimensions"),
    ],
)
def test_a_wrong_idx_file_is_named(tmp_path, content, message):
    (tmp_path / "images").write_bytes(content)
    with pytest.raises(DataError, match=f"images is {message}"):
        read_idx(open_tree(tmp_path), "images", 3)


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/outside.txt", "a/../../outside.txt"])
@pytest.mark.parametrize(("write", "file"), [(write_zip, "a.zip"), (write_tar, "a.tar")])
def test_an_archive_with_names_outside_it_is_refused(tmp_path, write, file, name):
    inside = tmp_path / "inside"
    inside.mkdir()
    write(inside / file, {name: b"x"})
    with pytest.raises(DataError, match=f"{file} contains .* outside the archive"):
        open_tree(inside).find("outside.txt")
    assert not (tmp_path / "outside.txt").exists()


@pytest.mark.parametrize(
    ("write", "file"), [(write_zip, "a.zip"), (write_tar, "a.tar"), (write_tar, "a.tar.gz")]
)
def test_a_truncated_archive_is_named(tmp_path, write, file):
    path = tmp_path / file
    content = {"folder/one.bin": os.urandom(40_000), "folder/two.bin": os.urandom(40_000)}
    if file.endswith("gz"):
        write(path, content, "w:gz")
    else:
        write(path, content)
    assert open_tree(tmp_path).read("folder/two.bin") == content["folder/two.bin"]
    path.write_bytes(path.read_bytes()[:60_000])
    with pytest.raises(DataError, match=f"{file} is damaged or incomplete"):
        open_tree(tmp_path).read("folder/two.bin")


def test_an_unpacked_file_comes_before_one_in_an_archive(tmp_path):
    write_zip(tmp_path / "a.zip", {"deep/list.txt": b"packed"})
    (tmp_path / "list.txt").write_bytes(b"plain")
    tree = open_tree(tmp_path)
    assert tree.read(tree.require("list.txt")) == b"plain"
    assert tree.read(tree.require("deep/list.txt")) == b"packed"
    assert tree.find("other.txt") is None
