"""Federations: own data, splits, partitions, and the two data sets that need no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from fedproto.data import DATASETS, Federation, data_root
from fedproto.data.federation import split_clients
from fedproto.data.partition import apportion, by_classes, by_dirichlet
from fedproto.errors import DataError

ROOT = Path("unused")


def load(name: str, **options) -> Federation:
    return DATASETS.get(name)(**options).load(ROOT)


def test_synthetic_matches_the_papers_table():
    federation = load("synthetic")
    sizes = np.array([len(client.train) + len(client.test) for client in federation.clients])
    assert (len(sizes), sizes.sum(), federation.num_classes) == (30, 9608, 10)
    assert abs(sizes.std() - 1051.6) / 1051.6 < 0.1


def test_synthetic_is_a_function_of_its_options():
    one, two, other = load("synthetic"), load("synthetic"), load("synthetic", seed=1)
    assert torch.equal(one.samples.inputs, two.samples.inputs)
    assert one.samples.inputs.shape != other.samples.inputs.shape


def test_synthetic_labels_come_from_one_linear_model_per_client():
    # With a linear model per client, a linear classifier fits a client's own data far better
    # than chance; checked on the largest client.
    federation = load("synthetic", phi1=0.0, phi2=0.0)
    largest = int(np.argmax(federation.train_sizes))
    x, y = federation.samples.batch(federation.clients[largest].train)
    classes = torch.unique(y)
    centers = torch.stack([x[y == label].mean(dim=0) for label in classes])
    nearest = classes[torch.cdist(x, centers).argmin(dim=1)]
    assert float((nearest == y).float().mean()) > 0.5


def test_digits_by_classes():
    federation = load("digits", clients=30, classes_per_client=2)
    labels = federation.samples.targets.numpy()
    for client in federation.clients:
        assert 1 <= len(np.unique(labels[np.concatenate([client.train, client.test])])) <= 2
    assert len(np.concatenate([c.train for c in federation.clients])) + len(
        federation.test_indices
    ) == len(labels)


def test_digits_by_dirichlet_is_skewed_by_alpha():
    def classes_per_client(alpha: float) -> float:
        federation = load("digits", partition="dirichlet", alpha=alpha, clients=20)
        labels = federation.samples.targets.numpy()
        return float(np.mean([len(np.unique(labels[c.train])) for c in federation.clients]))

    assert classes_per_client(0.05) < classes_per_client(0.5) < classes_per_client(100)


def test_digits_are_images_with_their_labels():
    federation = load("digits")
    assert federation.input_shape == (1, 8, 8)
    assert float(federation.samples.inputs.max()) == 1.0
    # The first digit of the set is a zero: bright ring, dark centre.
    first = federation.samples.inputs[0, 0]
    assert int(federation.samples.targets[0]) == 0
    assert float(first[3:5, 3:5].mean()) < 0.2 < float(first[2:6, 2].mean())


labels_and_rng = st.tuples(st.integers(0, 10_000), st.integers(40, 200), st.integers(2, 6))


@given(labels_and_rng, st.integers(1, 12), st.integers(1, 2))
def test_by_classes_shares_out_every_sample_once(case, clients, per_client):
    seed, size, classes = case
    labels = np.arange(size) % classes
    parts = by_classes(
        labels, np.random.RandomState(seed), clients=clients, classes_per_client=per_client
    )
    check_partition(parts, size, clients, covering=clients >= classes)
    for client, part in enumerate(parts):
        held = {(client + step) % classes for step in range(per_client)}
        assert set(labels[part]) <= held


@given(labels_and_rng, st.integers(1, 12), st.floats(0.01, 100))
def test_by_dirichlet_shares_out_every_sample_once(case, clients, alpha):
    seed, size, classes = case
    labels = np.random.RandomState(seed).randint(0, classes, size)
    parts = by_dirichlet(labels, np.random.RandomState(seed), clients=clients, alpha=alpha)
    check_partition(parts, size, clients, covering=True)
    again = by_dirichlet(labels, np.random.RandomState(seed), clients=clients, alpha=alpha)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def check_partition(parts, size, clients, covering):
    together = np.concatenate(parts)
    assert len(parts) == clients
    assert all(len(part) > 0 for part in parts)
    assert len(np.unique(together)) == len(together)
    if covering:
        assert len(together) == size


@given(
    st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 9)
)
def test_apportion_gives_all_away_with_the_minimum_first(total, weights, minimum):
    shares = apportion(total, np.array(weights), minimum)
    assert shares.sum() == total
    assert shares.min() >= min(minimum, total // len(weights))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda y, r: by_classes(y, r, clients=3, classes_per_client=5),
            "between 1 and the 4 class",
        ),
        (lambda y, r: by_classes(y, r, clients=0, classes_per_client=1), "clients must be between"),
        (lambda y, r: by_classes(y, r, clients=39, classes_per_client=1), "use fewer clients"),
        (lambda y, r: by_dirichlet(y, r, clients=99, alpha=1), "between 1 and the 40 samples"),
    ],
)
def test_impossible_partitions_are_refused(call, message):
    labels = np.concatenate([np.zeros(37, dtype=int), [1, 2, 3]])
    with pytest.raises(DataError, match=message):
        call(labels, np.random.RandomState(0))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 99))
def test_the_split_is_eighty_twenty_per_client(sizes, seed):
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    clients = split_clients(parts, seed)
    for client, part in zip(clients, parts, strict=True):
        assert len(client.train) == max(1, int(0.8 * len(part) + 1e-9))
        assert sorted([*client.train, *client.test]) == part.tolist()


def test_own_arrays_and_own_datasets_give_the_same_federation():
    arrays = [(torch.rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])) for _ in range(3)]
    one = Federation.from_clients(arrays)
    two = Federation.from_clients([TensorDataset(x, y) for x, y in arrays])
    assert one.num_classes == two.num_classes == 3
    assert one.input_shape == two.input_shape == (3,)
    for client, (a, b) in enumerate(zip(one.clients, two.clients, strict=True)):
        assert np.array_equal(a.train, b.train)
        ours, theirs = one.samples.batch(a.train), two.samples.batch(b.train)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert set(a.train) <= set(range(6 * client, 6 * client + 6))


class Ragged(Dataset):
    """Samples of different shapes, as pictures are before they are resized."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.zeros(index + 1), 0


def test_label_maps_have_the_size_of_their_pictures():
    for labels in (np.zeros(2, dtype=int), np.zeros((2, 4, 3), dtype=int)):
        with pytest.raises(DataError, match="a map of its height and width"):
            Federation.from_clients([(np.zeros((2, 3, 4, 4)), labels)], task="segmentation")


def test_numbers_of_16_bits_become_floating():
    pictures = np.full((5, 1, 2, 2), 40_000, dtype=np.uint16)
    federation = Federation.from_clients([(pictures, np.arange(5))])
    assert federation.samples.batch(np.arange(1))[0].flatten().tolist() == [40_000.0] * 4


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "at least one client"),
        ([(np.zeros((3, 2)), np.zeros(2, dtype=int))], "client 0: 3 inputs but 2 labels"),
        ([(np.zeros((3, 2)), np.zeros(3))], "labels must be integers"),
        ([(np.zeros((0, 2)), np.zeros(0, dtype=int))], "client 0 has no samples"),
        (
            [
                (np.zeros((3, 2)), np.zeros(3, dtype=int)),
                (np.zeros((3, 4)), np.zeros(3, dtype=int)),
            ],
            "different shapes",
        ),
        ([(np.zeros((2, 2)), np.array([0, -1]))], "label -1 is outside"),
        ([TensorDataset(torch.zeros(1))], r"client 0: expected \(inputs, labels\)"),
        ([TensorDataset(torch.zeros(0, 2), torch.zeros(0))], "client 0 has no samples"),
        (["text"], r"expected \(inputs, labels\)"),
        ([(np.zeros((3, 2)), np.eye(3, dtype=int))], r"number of its class, not .* shape \(3,\)"),
        ([Ragged()], r"client 0: expected \(inputs, labels\) as arrays: .* equal size"),
    ],
)
def test_own_data_that_does_not_fit_is_refused(clients, message):
    with pytest.raises(DataError, match=message):
        Federation.from_clients(clients)


def test_a_label_beyond_the_classes_is_refused():
    with pytest.raises(DataError, match="label 7 is outside the classes 0 to 2"):
        Federation.from_clients([(np.zeros((2, 2)), np.array([0, 7]))], num_classes=3)


def test_the_data_root_is_a_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    assert data_root() == tmp_path
    monkeypatch.delenv("FEDPROTO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "fedproto"
