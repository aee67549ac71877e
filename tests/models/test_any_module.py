"""Modules of any build train as they are, or are refused in a sentence before the first round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

import fedproto
from fedproto import Federation, with_features
from fedproto.engines.reference import read_state
from fedproto.errors import TrainingError
from fedproto.models.adapter import HeadInput, adapted, class_rows

CLASSES, SIDE = 3, 8


def federation(clients: int = 4) -> Federation:
    """Pictures whose class is their brightness."""
    torch.manual_seed(0)
    parts = []
    for _ in range(clients):
        labels = torch.arange(12) % CLASSES
        pictures = torch.rand(12, 1, SIDE, SIDE) * 0.2 + labels[:, None, None, None] * 0.4
        parts.append((pictures, labels))
    return Federation.from_clients(parts, num_classes=CLASSES)


class FunctionalReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(SIDE * SIDE, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {
                "body": nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 10), nn.Tanh()),
                "top": nn.Sequential(nn.Sequential(nn.Linear(10, CLASSES))),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net["top"](self.net["body"](x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.stem(x)).relu()
        x = (x + self.bn2(self.conv(x))).relu()
        return self.out(x.mean(dim=(2, 3)))


class TwoHeads(nn.Module):
    """The auxiliary head is called last, and its logits go nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(SIDE * SIDE, 10)
        self.main, self.aux = nn.Linear(10, CLASSES), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x.flatten(1)).relu()
        logits = self.main(x)
        self.aux(x)
        return logits


class Tied(nn.Module):
    """An autoencoder's weight, used in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIDE * SIDE, 16), nn.Linear(16, 16)
        self.third, self.out = nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.out(self.third(x).relu())


class VGG(nn.Module):
    """As torchvision lays it out: `features` is a layer whose output is not the head's input."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 10), nn.ReLU(), nn.Linear(10, CLASSES)
    )


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(4, CLASSES, 1),
        nn.Flatten(),
    )


def dropout() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 10),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(10, CLASSES),
    )


class DeclaredFeatures(FunctionalReLU):
    """Says what its features are; its last layer has a name of its own."""

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.fc1(x.flatten(1)))


BUILDS = {
    "sequential": (sequential, "3"),
    "functional-relu": (FunctionalReLU, "fc2"),
    "declared-features": (DeclaredFeatures, "fc2"),
    "nested": (Nested, "net.top.0.0"),
    "resnet-batch-norm": (Residual, "out"),
    "two-heads": (TwoHeads, "main"),
    "tied-weights": (Tied, "out"),
    "torchvision-like": (VGG, "classifier.3"),
    "group-norm-conv-head": (group_norm, "4"),
    "dropout": (dropout, "4"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_the_head_is_found_by_running_the_module_once(name):
    build, head = BUILDS[name]
    torch.manual_seed(1)
    model, x = build().eval(), torch.rand(1, 1, SIDE, SIDE)
    found = adapted(model, x)
    assert isinstance(found, HeadInput)
    assert found.name == head
    more = torch.rand(5, 1, SIDE, SIDE)
    assert torch.allclose(found.head(found.features(more)), model(more))
    assert list(found.state_dict()) == list(model.state_dict())
    assert class_rows(model, x, CLASSES) == (f"{head}.weight", f"{head}.bias")


COMPUTED = {"serve": {"head": "lda", "add": True, "fade": 50.0}}
"""A served head that is computed, which needs the features and the head of a model."""


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("name", BUILDS)
def test_modules_of_any_build_train_as_they_are(name, engine):
    build, _ = BUILDS[name]
    for strategy, sections in (
        ("fedavg", {}),
        ("steady", {}),
        ("fedavg", COMPUTED),
        ("fedproto", {}),
    ):
        result = fedproto.run(
            federation(), build, strategy, rounds=2, cohort=4, lr=0.1, batch_size=4, seed=3,
            engine={"name": engine, "device": "cpu"}, **sections,
        )  # fmt: skip
        assert len(result.records) == 2
        assert type(result.model) is type(build())
        assert 0 <= result.metrics["accuracy"] <= 1


@pytest.mark.parametrize("name", ["functional-relu", "torchvision-like", "tied-weights"])
@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_faster_engines_agree_with_the_reference(name, engine):
    build, _ = BUILDS[name]
    states = []
    for chosen in ("reference", engine):
        result = fedproto.run(
            federation(), build, "fedavg", rounds=2, cohort=4, lr=0.1, batch_size=4, **COMPUTED,
            engine={"name": chosen, "device": "cpu", "workers": 1},
        )  # fmt: skip
        states.append(result.state.params)
    for tensor, parameter in states[0].items():
        assert torch.allclose(parameter, states[1][tensor], rtol=1e-4, atol=1e-5), tensor


def test_tied_weights_are_one_tensor_of_a_state():
    params, buffers = read_state(Tied())
    assert "second.weight" in params
    assert "third.weight" not in {**params, **buffers}
    result = fedproto.run(
        federation(), Tied, "fedavg", rounds=2, cohort=2, server={"optimizer": "adam"}
    )
    model = result.model
    assert torch.equal(model.second.weight, result.state.params["second.weight"])
    assert model.second.weight is model.third.weight


class Scaled(nn.Module):
    """Its head is applied to −3f + 1, not to what `features` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(SIDE * SIDE, 10), nn.Linear(10, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1)).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(-3 * self.features(x) + 1)


class LogSoftmax(FunctionalReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(dim=1)


class InPlace(FunctionalReLU):
    """Changes the logits in the tensor that its last layer gave."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(2)


class DeepHead(nn.Module):
    """Its head is not linear, and its last layer is as wide as the features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner = nn.Linear(SIDE * SIDE, 10), nn.Linear(10, 10)
        self.last = nn.Linear(10, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x.flatten(1)).relu()

    def head(self, features: Tensor) -> Tensor:
        return self.last(self.inner(features).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Scaled, r"one dense layer.* head\(features\(x\)\) does not give its logits"),
        (LogSoftmax, "has no features"),
        (InPlace, "has no features"),
        (DeepHead, "one dense layer"),
    ],
)
def test_a_head_that_does_not_give_the_logits_is_refused_where_one_is_needed(
    build, message, tmp_path
):
    with pytest.raises(TrainingError, match=message) as refused:
        fedproto.run(
            federation(), build(), "fedavg", rounds=1, cohort=2, out=tmp_path / "run", **COMPUTED
        )
    assert not (tmp_path / "run").exists()
    assert "\n" not in str(refused.value)
    if build is not DeepHead:  # whose features do give its logits, as its term of the loss needs
        with pytest.raises(TrainingError, match="give its logits"):
            fedproto.run(federation(), build(), "fedntd", rounds=1, cohort=2)
    for engine in ("reference", "stacked"):
        plain = fedproto.run(
            federation(), build(), "fedavg", rounds=1, cohort=2, engine={"name": engine}
        )
        assert len(plain.records) == 1


def test_the_head_can_be_named_and_is_checked():
    named = with_features(TwoHeads(), head="main")
    result = fedproto.run(federation(), named, "fedavg", rounds=1, cohort=2, **COMPUTED)
    assert len(result.records) == 1
    with pytest.raises(TrainingError, match="layer 'aux' does not give the logits of TwoHeads"):
        fedproto.run(federation(), with_features(TwoHeads(), head="aux"), "fedavg", cohort=2)
    with pytest.raises(TrainingError, match="did you mean 'main'"):
        with_features(TwoHeads(), head="mian")


class Pair(FunctionalReLU):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(x)
        return logits, logits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Pair(), "Pair returns tuple, not logits"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), r"logits of shape \[B, 3\].* gives \[1, 2"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(63, 3)),
            r"does not accept the data's inputs.* 1, 8,",
        ),
        (nn.Conv2d(1, 3, 1), r"must give logits of shape \[B, 3\]"),
    ],
)
def test_wrong_shapes_are_found_before_the_first_round(model, message, tmp_path):
    with pytest.raises(TrainingError, match=message):
        fedproto.run(federation(), model, "fedavg", rounds=1, cohort=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lazy_layers_are_made_under_the_seed():
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(CLASSES))

    def run(seed: int) -> fedproto.Result:
        return fedproto.run(federation(), lazy, "fedavg", rounds=1, cohort=2, seed=seed, **COMPUTED)

    one, again, other = (run(seed).build()[1].weight for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
