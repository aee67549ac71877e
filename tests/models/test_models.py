"""Models give features and scores; the adapter does so for a user's own module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedproto import MODELS, with_features
from fedproto.errors import TrainingError
from fedproto.models import build_model, features_of
from fedproto.models.deeplab import DeepLab


class OwnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"first": nn.Linear(4, 7), "second": nn.Linear(7, 5)})
        self.unused = nn.Linear(1, 1)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.body["second"](self.body["first"](x).relu()).relu())


@pytest.mark.parametrize("name", MODELS.names())
def test_every_model_is_head_after_features(name):
    shape = (1, 28, 28)
    model = build_model(MODELS.get(name)(), shape, 10, seed=0).eval()
    x = torch.rand(3, *shape)
    features = features_of(model)(x)
    if isinstance(model, DeepLab):
        # Its decoder takes low-level features as well, and scores every pixel.
        assert torch.equal(model.encode(x)[0], features)
        assert model(x).shape == (3, 10, 28, 28)
        return
    assert torch.equal(model.head(features), model(x))
    assert model(x).shape == (3, 10)


def test_the_papers_mlp_and_cnn():
    mlp = build_model(MODELS.get("mlp")(), (60,), 10, seed=0)
    assert [tuple(p.shape) for p in mlp.parameters()] == [
        (128, 60), (128,), (256, 128), (256,), (10, 256), (10,),
    ]  # fmt: skip
    cnn = build_model(MODELS.get("cnn")(), (1, 28, 28), 10, seed=0)
    assert [tuple(p.shape) for p in cnn.parameters()] == [
        (32, 1, 5, 5), (32,), (64, 32, 5, 5), (64,), (256, 7 * 7 * 64), (256,), (10, 256), (10,),
    ]  # fmt: skip


def test_initial_weights_depend_on_the_seed_alone():
    options = MODELS.get("mlp")()
    one = build_model(options, (5,), 3, seed=1)
    torch.rand(1)
    before = torch.get_rng_state()
    two = build_model(options, (5,), 3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.dense1.weight, two.dense1.weight)
    assert not torch.equal(one.dense1.weight, build_model(options, (5,), 3, seed=2).dense1.weight)


def test_the_cnn_refuses_what_is_no_image():
    with pytest.raises(TrainingError, match=r"needs images .* use model 'mlp'"):
        build_model(MODELS.get("cnn")(), (60,), 10, seed=0)


def test_a_sequential_model_is_cut_before_its_last_layer():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.rand(3, 4)
    model = with_features(plain)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(features_of(model)(x), plain[:3](x))


def test_the_input_of_a_named_head_is_the_features():
    own, x = OwnNet(), torch.rand(3, 4)
    model = with_features(own, head="out")
    assert torch.equal(model(x), own(x))
    expected = own.body["second"](own.body["first"](x).relu()).relu()
    assert torch.equal(features_of(model)(x), expected)
    assert torch.equal(model(x), own(x))  # no hook is left behind


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: with_features(OwnNet()), r"name the layer of OwnNet .* head='...'"),
        (lambda: with_features(OwnNet(), head="body.secnd"), "did you mean 'body.second'"),
        (lambda: with_features(nn.Sequential(nn.Linear(2, 2))), "name the layer"),
        (lambda: features_of(OwnNet()), "has no features"),
        (
            lambda: features_of(with_features(OwnNet(), head="unused"))(torch.rand(1, 4)),
            "is not used",
        ),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused(call, message):
    with pytest.raises(TrainingError, match=message):
        call()
