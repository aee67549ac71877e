"""Data as people have it: own test splits, rows with named columns, bytes of pictures."""

from __future__ import annotations

import re
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

import fedproto
from fedproto import Federation
from fedproto.data.samples import MappedSamples
from fedproto.errors import DataError


def arrays(size: int, first: int = 0, dtype=np.float32):
    """Inputs that are numbered, so that each can be told."""
    numbers = np.arange(first, first + size)
    inputs = np.broadcast_to(numbers[:, None, None, None], (size, 1, 4, 4)) % 251
    kept = inputs.astype(dtype)
    return kept if dtype == np.uint8 else kept / 1000, numbers % 3


def numbers_of(federation: Federation, indices) -> list[int]:
    return [round(1000 * float(x)) for x in federation.samples.batch(indices)[0][:, 0, 0, 0]]


@pytest.mark.parametrize("form", ["list", "mapping", "data sets"])
def test_every_client_brings_its_own_test_split(form):
    clients, tests = [arrays(5), arrays(6, 10)], [arrays(2, 50), arrays(3, 60)]
    if form == "data sets":
        clients, tests = (
            [TensorDataset(*map(torch.as_tensor, part)) for part in parts]
            for parts in (clients, tests)
        )
    if form == "mapping":
        both = [{"train": a, "test": b} for a, b in zip(clients, tests, strict=True)]
        federation = Federation.from_clients(both, num_classes=3)
    else:
        federation = Federation.from_clients(clients, test=tests, num_classes=3)
    one, two = federation.clients
    assert numbers_of(federation, one.train) == [0, 1, 2, 3, 4]
    assert numbers_of(federation, one.test) == [50, 51]
    assert numbers_of(federation, two.train) == [10, 11, 12, 13, 14, 15]
    assert numbers_of(federation, two.test) == [60, 61, 62]


def test_one_test_split_for_all_is_dealt_out():
    federation = Federation.from_clients([arrays(5), arrays(6, 10)], test=arrays(7, 50))
    assert [len(client.train) for client in federation.clients] == [5, 6]
    assert sorted(len(client.test) for client in federation.clients) == [3, 4]
    assert sorted(numbers_of(federation, federation.test_indices)) == list(range(50, 57))
    with pytest.raises(DataError, match="test data of 1 clients for 2 clients"):
        Federation.from_clients([arrays(5), arrays(6)], test=[arrays(2)])


class Rows:
    """What `datasets.Dataset` and a partition of Flower Datasets look like from outside."""

    def __init__(self, size: int, image: str = "image", label: str = "label") -> None:
        self.features = {
            image: types.SimpleNamespace(),
            label: types.SimpleNamespace(names=["ant", "bee", "cat"]),
        }
        self._names, self._size = (image, label), size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place):
        if isinstance(place, str):
            return [self[each][place] for each in range(self._size)]
        grey = self._names[0] == "image"
        picture = Image.new("L" if grey else "RGB", (6, 4), place if grey else (place,) * 3)
        return {self._names[0]: picture, self._names[1]: place % 3, "id": f"no. {place}"}


@pytest.mark.parametrize(
    ("image", "label", "shape"), [("image", "label", (1, 4, 6)), ("img", "fine_label", (3, 4, 6))]
)
def test_rows_of_hugging_face_and_flower_data_sets(image, label, shape):
    federation = Federation.from_clients([Rows(9, image, label) for _ in range(3)], scale=True)
    assert federation.input_shape == shape
    assert federation.class_names == ("ant", "bee", "cat")
    inputs, labels = federation.samples.batch(np.array([7]))
    assert torch.allclose(inputs, torch.full((1, *shape), 7 / 255))
    assert labels.tolist() == [1]
    model = {"name": "mlp", "hidden": 4, "features": 4}
    result = fedproto.run(federation, model, "fedavg", rounds=1, cohort=2, epochs=1)
    assert 0 <= result.metrics["accuracy"] <= 1


def test_rows_may_be_a_plain_list():
    rows = [Rows(9)[place] for place in range(9)]
    federation = Federation.from_clients([rows, rows], test=rows[:4], scale=True)
    assert federation.train_sizes.tolist() == [9, 9]
    assert federation.test_sizes.tolist() == [2, 2]
    with pytest.raises(DataError, match=r"client 0: expected \(inputs, labels\) as arrays"):
        Federation.from_clients([([object()], [1])])


def test_columns_can_be_named_and_are_asked_for():
    class Odd(Rows):
        def __getitem__(self, place):
            return {"photo": super().__getitem__(place)["image"], "kind": place % 3}

    federation = Federation.from_clients([Odd(4)], columns=("photo", "kind"), scale=True)
    assert federation.num_classes == 3
    for columns, message in (
        (None, "which column holds the inputs? There are photo, kind"),
        (("photo", "kid"), "there is no column 'kid'; there are photo, kind"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            Federation.from_clients([Odd(4)], columns=columns)


def test_torch_data_sets_of_rows_with_channels_last():
    class Torch(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, place):
            return {"x": np.full((8, 9, 3), place, dtype=np.uint8), "y": place % 2}

    federation = Federation.from_clients([Torch(), Torch()], scale=True)
    assert federation.input_shape == (3, 8, 9)


def test_bytes_of_pictures_are_scaled_with_a_word():
    data = [arrays(5, dtype=np.uint8)]
    with pytest.warns(UserWarning, match="divided by 255") as caught:
        federation = Federation.from_clients(data)
    assert caught[0].filename == __file__
    assert float(federation.samples.batch(np.array([4]))[0].max()) == pytest.approx(4 / 255)
    asked = Federation.from_clients(data, scale=True)
    assert isinstance(asked.samples, MappedSamples)
    plain = Federation.from_clients(data, scale=False)
    assert float(plain.samples.batch(np.array([4]))[0].max()) == 4
    dataset = TensorDataset(torch.full((5, 1, 2, 2), 51, dtype=torch.uint8), torch.arange(5))
    with pytest.warns(UserWarning, match="divided by 255"):
        read = Federation.from_clients([dataset])
    assert float(read.samples.batch(np.array([4]))[0].max()) == pytest.approx(0.2)


def test_pixels_as_floats_are_noticed_and_left():
    inputs, labels = arrays(9)
    with pytest.warns(UserWarning, match="look like pixels from 0 to 255"):
        federation = Federation.from_clients([(np.round(inputs * 1000), labels)])
    assert float(federation.samples.inputs.max()) == 8
    scaled = Federation.from_clients([(np.round(inputs * 1000), labels)], scale=True)
    assert float(scaled.samples.inputs.max()) == pytest.approx(8 / 255)


def test_normalisation_is_stated():
    inputs = np.full((4, 3, 2, 2), 255, dtype=np.uint8)
    federation = Federation.from_clients(
        [(inputs, np.arange(4))], scale=True, mean=(0.5, 0.5, 0), std=(0.5, 0.25, 1)
    )
    (x,), _ = federation.samples.batch(np.array([0]))
    assert x[:, 0, 0].tolist() == [1, 2, 1]
    dataset = TensorDataset(torch.ones(4, 1, 2, 2), torch.arange(4))
    (x,), _ = Federation.from_clients([dataset], mean=(0.5,)).samples.batch(np.array([0]))
    assert x[:, 0, 0].tolist() == [0.5]


def test_pictures_of_different_sizes_are_refused():
    class Mixed(Rows):
        def __getitem__(self, place):
            return {"image": Image.new("L", (4 + place, 4)), "label": 0}

    with pytest.raises(DataError, match="have different shapes"):
        Federation.from_clients([Mixed(3)])
