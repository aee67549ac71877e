"""DeepLab-V3+: shapes, small batches, and weights trained elsewhere."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from fedproto.engines.layers import tolerate_single_values
from fedproto.errors import ConfigError, TrainingError
from fedproto.models.base import build_model
from fedproto.models.deeplab import DeepLabOptions, SmallDeepLabOptions
from fedproto.models.mobilenet import MobileNetV2


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """What torchvision's file holds for the encoder, with other numbers."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(value.shape, generator=generator).half()
        if value.is_floating_point()
        else value
        for name, value in MobileNetV2().state_dict().items()
    } | {"classifier.1.bias": torch.zeros(1000), "features.18.1.weight": torch.zeros(1280)}


def built_with(weights: dict[str, torch.Tensor], path) -> torch.nn.Module:
    if path.suffix == ".pth":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    return build_model(DeepLabOptions(pretrained=str(path)), (3, 32, 32), 5, seed=0)


def test_the_encoder_is_mobilenet_v2():
    encoder = MobileNetV2()
    # 3.50 million weights of the classifying model, less the last convolution and classifier.
    classifying = 320 * 1280 + 2 * 1280 + 1280 * 1000 + 1000
    assert sum(value.numel() for value in encoder.parameters()) == 3_504_872 - classifying
    assert (encoder.low_level_channels, encoder.out_channels) == (24, 320)


@pytest.mark.parametrize(("stride", "side"), [(8, 8), (16, 4), (32, 2)])
def test_features_and_scores_have_their_sizes(stride, side):
    model = build_model(DeepLabOptions(width=0.25, output_stride=stride), (3, 64, 64), 5, seed=0)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert model.eval()(x).shape == (2, 5, 64, 64)
        assert model.features(x).shape == (2, 256, side, side)
        assert (model.features(x) >= 0).all()


def test_a_smaller_stride_sees_the_same_with_dilation():
    """At every second position the dilated encoder gives what the other gives everywhere."""
    coarse, fine = (MobileNetV2(width=0.25, output_stride=stride).eval() for stride in (32, 16))
    fine.load_state_dict(coarse.state_dict())
    x = torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        assert torch.allclose(fine(x)[0][..., ::2, ::2], coarse(x)[0], atol=1e-6)


def test_a_batch_of_one_trains_even_where_its_map_is_one_pixel():
    model = build_model(SmallDeepLabOptions(output_stride=16), (3, 16, 16), 3, seed=0).train()
    tolerate_single_values(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(1, 3, 16, 16)).sum().backward()
    assert all(torch.isfinite(value.grad).all() for value in model.parameters())
    name = "aspp.pooling.1.running_var"
    assert torch.equal(dict(model.named_buffers())[name], before[name])
    model(torch.randn(2, 3, 16, 16))
    assert not torch.equal(dict(model.named_buffers())[name], before[name])


def test_too_small_an_image_is_refused():
    with pytest.raises(TrainingError, match="at least 16×16"):
        DeepLabOptions().build((3, 8, 8), 3)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_pretrained_weights_are_taken_and_what_classifies_is_left(weights, tmp_path, suffix):
    model = built_with(weights, tmp_path / f"weights{suffix}")
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, weights[name].to(value.dtype)), name


def test_the_data_root_is_searched(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    save_file(weights, tmp_path / "own.safetensors")
    build_model(DeepLabOptions(pretrained="own.safetensors"), (3, 32, 32), 5, seed=0)


def test_weights_that_do_not_fit_are_named(weights, tmp_path):
    wrong = dict(weights)
    del wrong["features.3.conv.2.weight"]
    wrong["head.bias"] = torch.zeros(1)
    wrong["features.0.0.weight"] = torch.zeros(32, 1, 3, 3)
    with pytest.raises(ConfigError) as raised:
        built_with(wrong, tmp_path / "wrong.safetensors")
    message = str(raised.value)
    assert "lack features.3.conv.2.weight" in message
    assert "have extra head.bias" in message
    assert "features.0.0.weight [32, 1, 3, 3] instead of [32, 3, 3, 3]" in message


def test_another_width_is_misshapen(weights, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(weights, path)
    with pytest.raises(ConfigError, match=r"have misshapen .* more"):
        build_model(DeepLabOptions(pretrained=str(path), width=0.5), (3, 32, 32), 5, seed=0)


@pytest.mark.parametrize("name", ["missing.safetensors", "broken.safetensors", "broken.pth"])
def test_files_that_are_no_weights_are_refused(name, tmp_path):
    path = tmp_path / name
    if "broken" in name:
        path.write_bytes(b"not weights at all")
    with pytest.raises(ConfigError, match=name):
        build_model(DeepLabOptions(pretrained=str(path)), (3, 32, 32), 5, seed=0)


def test_something_else_than_named_tensors_is_refused(tmp_path):
    path = tmp_path / "list.pth"
    torch.save([1, 2], path)
    with pytest.raises(ConfigError, match="no named tensors"):
        build_model(DeepLabOptions(pretrained=str(path)), (3, 32, 32), 5, seed=0)
