"""The models of the field's benchmarks: their sizes, their layers by hand, every engine."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from data_files import needs_real
from engine_cases import check_same, small_federation, sweep
from fedproto import MODELS, FedAvg, FedProto, Scaffold
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError, TrainingError
from fedproto.models.base import build_model
from fedproto.models.mobilenet import MobileNetOptions
from fedproto.models.resnet import ResNet18Options, ResNet20Options, StandardizedConv2d
from fedproto.models.small import LeNetOptions

CIFAR = (3, 32, 32)


@pytest.mark.parametrize(
    ("options", "shape", "classes", "parameters", "features"),
    [
        (LeNetOptions(), CIFAR, 10, 797_962, 192),
        (LeNetOptions(), CIFAR, 100, 815_332, 192),
        (ResNet18Options(), CIFAR, 10, 11_173_962, 512),
        (ResNet18Options(norm="batch"), CIFAR, 10, 11_173_962, 512),
        (ResNet18Options(standardize=True), CIFAR, 100, 11_220_132, 512),
        (ResNet18Options(norm="batch", stem=7), (3, 224, 224), 1000, 11_689_512, 512),
        (ResNet20Options(norm="batch"), CIFAR, 10, 269_722, 64),
        (ResNet20Options(), CIFAR, 10, 269_722, 64),
        (MobileNetOptions(), (3, 224, 224), 1000, 3_504_872, 1280),
    ],
)
def test_models_have_their_usual_number_of_parameters(
    options, shape, classes, parameters, features
):
    model = build_model(options, shape, classes, seed=0)
    assert sum(one.numel() for one in model.parameters()) == parameters
    with torch.no_grad():
        assert model.eval().features(torch.zeros(1, *shape)).shape == (1, features)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_a_resnet_normalises_as_it_is_told(norm):
    model = build_model(ResNet20Options(norm=norm), CIFAR, 10, seed=0)
    found = {type(one) for one in model.modules()} & {nn.GroupNorm, nn.BatchNorm2d}
    assert found == {"group": {nn.GroupNorm}, "batch": {nn.BatchNorm2d}, "none": set()}[norm]
    assert (model.conv1.bias is not None) == (norm == "none")
    x = torch.randn(4, *CIFAR)
    assert torch.isfinite(model(x)).all()
    with torch.no_grad():
        alone = torch.cat([model.eval()(one[None]) for one in x])
    torch.testing.assert_close(alone, model(x), rtol=1e-3, atol=1e-4)


def test_resnets_halve_the_map_twice_or_three_times():
    x = torch.zeros(1, *CIFAR)
    for options, sides in (
        (ResNet18Options(), [32, 16, 8, 4]),
        (ResNet18Options(stem=7), [8, 4, 2, 1]),
        (ResNet20Options(), [32, 16, 8]),
    ):
        model = build_model(options, CIFAR, 10, seed=0)
        y, found = model.maxpool(model.bn1(model.conv1(x))), []
        for stage in range(1, len(sides) + 1):
            y = model.get_submodule(f"layer{stage}")(y)
            found.append(y.shape[-1])
        assert found == sides


def test_the_shortcut_of_resnet20_takes_every_second_pixel_and_adds_empty_channels():
    block = build_model(ResNet20Options(), CIFAR, 10, seed=0).layer2[0]
    x = torch.randn(2, 16, 6, 6)
    short = block.downsample(x)
    assert short.shape == (2, 32, 3, 3)
    assert torch.equal(short[:, :16], x[:, :, ::2, ::2])
    assert not short[:, 16:].any()


def test_weight_standardisation_by_hand():
    """A filter of the numbers 1, 2, 3, 6: mean 3, standard deviation √(14/3)."""
    layer = StandardizedConv2d(1, 1, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 2, 2))
    found = layer(torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 1, 2, 2)).detach()
    expected = (-2.0 + 2 * 3.0) / ((14 / 3) ** 0.5 + 1e-5)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    model = build_model(ResNet20Options(standardize=True), CIFAR, 10, seed=0)
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d)]
    assert {type(one) for one in convolutions} == {StandardizedConv2d}


@pytest.mark.parametrize(
    ("name", "options", "shape", "error", "message"),
    [
        ("lenet", {}, (3, 12, 32), TrainingError, "at least 16×16 pixels"),
        ("resnet18", {}, (60,), TrainingError, "'resnet18' needs images"),
        ("resnet20", {}, (60,), TrainingError, "'resnet20' needs images"),
        ("mobilenetv2", {}, (60,), TrainingError, "'mobilenetv2' needs images"),
        ("resnet20", {"groups": 3}, CIFAR, ConfigError, r"groups must divide 16, not 3"),
    ],
)
def test_what_does_not_fit_is_said(name, options, shape, error, message):
    with pytest.raises(error, match=message):
        build_model(MODELS.get(name)(**options), shape, 10, seed=0)


@pytest.mark.parametrize("engine", ["stacked", "processes"])
@pytest.mark.parametrize(
    "model",
    [
        LeNetOptions(channels=3, hidden=6, features=5),
        ResNet20Options(),
        ResNet20Options(norm="batch"),
        ResNet20Options(standardize=True),
    ],
    ids=["lenet", "group", "batch", "standardized"],
)
def test_they_train_alike_in_every_engine(engine, model):
    options = {
        "federation": small_federation(shape=(3, 16, 16), sizes=(4, 9, 7, 5, 6)),
        "strategies": [FedProto()],
        "train": TrainOptions(epochs=1, batch_size=5, lr=0.01, weight_decay=1e-3),
        "eval_batch_size": 6,
    }
    truth, found = (sweep(name, model, **options) for name in ("reference", engine))
    assert found.notices == []
    check_same(found, truth, 1e-8)


def pretrained_file(path, width=0.25):
    """Weights as torchvision would name them, of an encoder that is smaller than the real one."""
    source = build_model(MobileNetOptions(width=width), CIFAR, 4, seed=7).backbone
    weights = {name: tensor.half() for name, tensor in source.state_dict().items()}
    weights |= {"classifier.1.weight": torch.zeros(1000, 1280).half()}
    save_file(weights, path)
    return weights


def test_pretrained_weights_go_into_the_encoder_alone(tmp_path):
    path = tmp_path / "weights.safetensors"
    weights = pretrained_file(path)
    options = MobileNetOptions(width=0.25, pretrained=str(path))
    model = build_model(options, CIFAR, 4, seed=0)
    for name, tensor in model.backbone.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, weights[name].to(tensor.dtype)), name
    assert model.classifier.out_features == 4
    assert options.untrained().pretrained == "none"
    with pytest.raises(ConfigError, match="would replace 'pretrained' weights"):
        MobileNetOptions(pretrained=str(path), init="glorot")


@pytest.mark.parametrize("engine", ["reference", "processes", "stacked"])
def test_a_frozen_encoder_stays_as_it_is_in_every_engine(engine):
    """Weight decay and SCAFFOLD's corrections leave it alone too."""
    options = MobileNetOptions(width=0.1, frozen=True, resize=40)
    federation = small_federation(shape=(3, 16, 16), sizes=(4, 9, 7, 5, 6))
    model = build_model(options, (3, 16, 16), 4, seed=5)
    before = {name: one.clone().double() for name, one in model.state_dict().items()}
    found = sweep(
        engine,
        model,
        federation=federation,
        strategies=[FedAvg(), Scaffold()],
        train=TrainOptions(epochs=1, batch_size=4, lr=0.1, weight_decay=0.1),
    )
    assert bool(found.notices) == (engine == "stacked")
    for state in found.states:
        for name, tensor in (*state.params.items(), *state.buffers.items()):
            if name.startswith("backbone"):
                torch.testing.assert_close(tensor.double(), before[name], rtol=1e-9, atol=1e-9)
        assert (state.params["classifier.bias"] - before["classifier.bias"]).abs().max() > 1e-3


def test_a_trained_encoder_changes():
    model = MobileNetOptions(width=0.1)
    federation = small_federation(shape=(3, 32, 32), sizes=(4, 9, 7, 5, 6))
    found = sweep("reference", model, federation=federation, strategies=[FedAvg()])
    first = build_model(model, (3, 32, 32), 4, seed=5).backbone.features[0][0].weight
    name = "backbone.features.0.0.weight"
    assert (found.states[-1].params[name] - first).abs().max() > 1e-4


def test_images_are_brought_to_the_size_first():
    plain, larger = (
        build_model(MobileNetOptions(width=0.1, resize=side), CIFAR, 4, seed=0).eval()
        for side in (0, 64)
    )
    x = torch.randn(2, *CIFAR)
    expected = nn.functional.interpolate(x, (64, 64), mode="bilinear", align_corners=False)
    with torch.no_grad():
        torch.testing.assert_close(larger.features(x), plain.features(expected))


def test_the_real_pretrained_weights_fit():
    path = needs_real("weights") / "mobilenet_v2-imagenet1k-fp16.safetensors"
    options = MobileNetOptions(pretrained=str(path), frozen=True)
    model = build_model(options, (3, 96, 96), 5, seed=0).eval()
    with torch.no_grad():
        features = model.features(torch.randn(2, 3, 96, 96))
    assert features.shape == (2, 1280)
    assert (features > 0).float().mean() > 0.05
