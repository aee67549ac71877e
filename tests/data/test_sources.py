"""The data and models as the scripts behind the paper made them, against figures of their rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_files import needs_real
from engine_cases import check_same, engine_for, small_federation, sweep
from fedproto import FedAvg, FedProto
from fedproto.cli import main
from fedproto.config.recipe import read_recipe
from fedproto.data.digits import Digits
from fedproto.data.federation import statistics
from fedproto.data.mnist import FEMNIST, MNIST
from fedproto.data.partition import by_first_samples
from fedproto.data.samples import MappedSamples, TensorSamples, normalized
from fedproto.data.synthetic import Synthetic
from fedproto.engines.reference import read_state
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError
from fedproto.models.base import build_model
from fedproto.models.deeplab import DeepLabOptions
from fedproto.models.small import CNN4Options, CNNOptions, MLPOptions
from fedproto.types import ServerState
from paper.printed import paper
from paper.published import TEST_SIZES, candidates, most_alike

pytest_plugins = ["data_fixtures"]

LEAF = CNN4Options(batch_norm=True, statistics="batch", pooling="same", init="glorot")


def in_recipe(name):
    return next(iter(read_recipe(name).values()))


def assert_like_table_1(row, name, rel):
    printed = paper()["data"][name]
    assert row["clients"] == printed["clients"]
    assert (row["samples"], row["std"]) == pytest.approx(
        (printed["samples"], printed["std"]), rel=rel
    )


def test_the_synthetic_recipe_keeps_nine_tenths_of_each_client(tmp_path):
    """The source cuts at ⌊0.9 n⌋; Table 1 counts what is before the cut."""
    source = in_recipe("synthetic").data
    federation = source.load(tmp_path)
    whole = Synthetic(seed=source.seed).load(tmp_path)
    kept = federation.train_sizes + federation.test_sizes
    assert (kept == (whole.train_sizes + whole.test_sizes) * 9 // 10).all()
    assert len(federation.validation) == len(whole.samples) - kept.sum()
    assert_like_table_1(statistics(federation), "synthetic", 0.02)


def test_the_synthetic_seed_is_the_one_that_the_rule_chooses():
    """The rule looks at sizes and labels alone; what is known of the file adds up to its total."""
    assert TEST_SIZES.sum() == 1_084
    ((seed, distance),) = most_alike(1, seeds=30_000)
    assert in_recipe("synthetic").data.seed == seed
    assert distance < most_alike(2, seeds=30_000)[1][1]
    assert candidates([686]) == [], "its nine tenths are too few"


def test_pixels_are_standardised_as_the_script_does_it():
    """(x − mean) / (std + 0.001) of every pixel over all images, on the scale from 0 to 255."""
    pixels = np.random.RandomState(0).randint(256, size=(20, 1, 3, 2)).astype(np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 2, 1] = 0, 0
    pixels[7, 0, 2, 1] = 1  # a border pixel that hardly ever is anything but 0
    samples = MappedSamples(torch.from_numpy(pixels), torch.zeros(20))
    found = normalized(samples, "pixel").batch(np.arange(20))[0].numpy()
    expected = (pixels - pixels.mean(axis=0)) / (pixels.std(axis=0) + 0.001)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert (found[:, 0, 0, 0] == 0).all()
    assert found[7, 0, 2, 1] == pytest.approx(0.95 / (np.sqrt(0.05 * 0.95) + 0.001), rel=1e-4)


def test_channels_are_standardised_and_nothing_is_where_nothing_is_asked():
    numbers = torch.randn(30, 2, 4, 4, generator=torch.Generator().manual_seed(1)) * 3 + 1
    samples = TensorSamples(numbers, torch.zeros(30))
    assert normalized(samples, "none") is samples
    assert normalized(samples, "given") is samples
    found, _ = normalized(samples, "channel").batch(np.arange(30))
    spread = numbers.transpose(0, 1).flatten(1).std(dim=1, correction=0)
    expected = (numbers - numbers.mean(dim=(0, 2, 3), keepdim=True)) / (
        spread[:, None, None] + 1e-3
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    given, _ = normalized(samples, "given", (1.0, 2.0), (4.0, 5.0)).batch(np.arange(30))
    torch.testing.assert_close(given[:, 1], (numbers[:, 1] - 2) / 5)


def test_any_data_set_can_be_standardised(tmp_path):
    """Of vectors every number is its own pixel."""
    plain, standard = (
        Synthetic(normalize=how).load(tmp_path).samples for how in ("given", "pixel")
    )
    found, _ = standard.batch(np.arange(len(standard)))
    assert found.mean(dim=0).abs().max() < 1e-4
    assert found.std(dim=0, correction=0).max() < 1
    assert plain.inputs.std(dim=0).max() > 1


def test_the_mnist_recipe_standardises_the_real_digits(real_root):
    needs_real("MNIST")
    config = in_recipe("mnist")
    assert (config.data.normalize, config.model.init) == ("pixel", "glorot")
    samples = config.data.load(real_root).samples
    images = MNIST().load(real_root).samples.inputs.numpy().astype(np.float32)
    some = np.arange(0, 70_000, 700)
    expected = (images[some] - images.mean(axis=0)) / (images.std(axis=0) + 0.001)
    np.testing.assert_allclose(samples.batch(some)[0].numpy(), expected, rtol=1e-2, atol=1e-3)
    every = torch.cat([samples.batch(part)[0] for part in np.array_split(np.arange(70_000), 20)])
    assert every.max() > 200, "rare pixels become very large"


@pytest.mark.parametrize(("in_class", "same"), [(13, True), (12, False)])
def test_clients_share_a_classes_first_samples(in_class, same):
    """By hand: ⌊13 / 2⌋ = 6 of each of two classes, from the beginning where 6 more would fit."""
    first, second = by_first_samples(
        np.repeat([0, 1], in_class),
        np.random.RandomState(0),
        clients=2,
        classes_per_client=2,
        mean_size=13.0,
        sigma=0.0,
    )
    assert len(first) == len(second) == 12
    assert set(first) == set(second) if same else not set(first) & set(second)


def test_the_femnist_recipe_is_shared_out_as_the_script_does_it(real_root):
    needs_real("EMNIST")
    source = in_recipe("femnist").data
    federation = source.load(real_root)
    assert_like_table_1(statistics(federation), "femnist", 0.02)
    train = [set(client.train.tolist()) for client in federation.clients]
    everyone = set().union(*train)
    assert len(everyone) < 3_000, "of some 13,000 training samples few are distinct"
    tested = federation.test_indices
    seen_elsewhere = np.mean([index in everyone for index in tested])
    assert seen_elsewhere > 0.8, "most test images are in other clients' training parts"
    for client in (0, 7, 199):
        kept = len(federation.clients[client].train) + len(federation.clients[client].test)
        taken = len(federation.validation_of(client))
        assert kept == (kept + taken) * 9 // 10, "what was taken is known by client"


def test_nist_like_letters_are_dark_small_and_in_the_middle(real_root):
    needs_real("EMNIST")
    stored = FEMNIST().load(real_root).samples.inputs
    samples = FEMNIST(images="nist-like").load(real_root).samples
    like, _ = samples.batch(np.arange(50))
    assert (like[:, 0, :7] == 1).all(), "the page is white"
    assert (like[:, 0, :, 21:] == 1).all()
    cell = 1 - stored[:50, 0, 10:12, 14:16].float().mean(dim=(1, 2)) / 255
    torch.testing.assert_close(like[:, 0, 12, 14], cell, rtol=0, atol=0.6 / 255)


@pytest.mark.parametrize(
    ("options", "shape", "layers"),
    [
        (MLPOptions(), (60,), {"dense1": (60, 128), "dense2": (128, 256), "classifier": (256, 10)}),
        (CNNOptions(), (1, 28, 28), {"conv1": (25, 800), "dense": (3136, 256)}),
        (LEAF, (3, 84, 84), {"convolutions.0": (27, 288), "classifier": (1152, 10)}),
    ],
)
def test_glorot_draws_uniformly_between_the_limits(options, shape, layers):
    """±√(6 / (fan in + fan out)), of a convolution with its taps; biases are zero."""
    options = type(options)(**{**vars(options), "init": "glorot"})
    model = build_model(options, shape, 10, seed=0)
    for name, fans in layers.items():
        layer, limit = model.get_submodule(name).requires_grad_(False), np.sqrt(6 / sum(fans))
        assert layer.weight.abs().max() <= limit
        assert layer.weight.abs().max() > 0.95 * limit
        assert float(layer.weight.std()) == pytest.approx(limit / np.sqrt(3), rel=0.1)
        assert (layer.bias == 0).all()
    other = build_model(options, shape, 10, seed=1)
    assert not torch.equal(layer.weight, other.get_submodule(name).weight)


def test_pretrained_weights_are_not_drawn_anew():
    with pytest.raises(ConfigError, match="init = 'glorot' would replace"):
        DeepLabOptions(init="glorot", pretrained="own.safetensors")


def test_leafs_model_has_its_sizes_and_ignores_the_scale_of_pixels():
    model = build_model(LEAF, (3, 84, 84), 2, seed=0)
    x = torch.rand(4, 3, 84, 84, generator=torch.Generator().manual_seed(0))
    assert model.features(x).shape == (4, 1_152)
    assert dict(model.named_buffers()) == {}, "statistics are never sent"
    # LEAF's pixels go from 0 to 255: all the same to the first normalisation, but for its ε.
    torch.testing.assert_close(model(255 * x), model.eval()(255 * x))
    torch.testing.assert_close(model(255 * x), model(2550 * x), rtol=1e-3, atol=1e-3)
    config = in_recipe("celeba")
    assert config.model == LEAF


@pytest.mark.parametrize("engine", ["reference", "stacked", "processes"])
def test_models_by_batch_statistics_are_tested_client_by_client(engine):
    """A client's scores do not depend on whose samples are tested beside its own."""
    federation = small_federation(shape=(3, 17, 16))
    model = build_model(
        CNN4Options(channels=3, batch_norm=True, statistics="batch", pooling="same"),
        federation.input_shape,
        federation.num_classes,
        seed=3,
    ).double()
    state = ServerState(0, *read_state(model))
    running = engine_for(engine, federation, model, [])
    right = 0
    for client in federation.clients:
        if len(client.test):
            inputs, targets = federation.samples.batch(client.test)
            with torch.no_grad():
                right += int((model.eval()(inputs.double()).argmax(1) == targets).sum())
    (found,) = running.evaluate([state], federation.test_indices)
    assert found["accuracy"] == pytest.approx(right / len(federation.test_indices))


@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_leafs_model_trains_alike_in_every_engine(engine):
    options = {
        "federation": small_federation(shape=(3, 17, 22)),
        "strategies": [FedAvg(), FedProto()],
        "train": TrainOptions(epochs=2, batch_size=5, lr=0.01),
        "eval_batch_size": 6,
    }
    model = CNN4Options(channels=3, batch_norm=True, statistics="batch", pooling="same")
    truth, found = (sweep(name, model, **options) for name in ("reference", engine))
    assert found.notices == []
    check_same(found, truth, 1e-9)


def test_nine_to_one_is_the_other_reading_of_the_split(tmp_path):
    """The source's own files: ⌊0.9 n⌋ for training, the rest for the test, nothing else."""
    source = Synthetic(validation=0.0, test=0.1)
    federation, whole = source.load(tmp_path), Synthetic().load(tmp_path)
    sizes = whole.train_sizes + whole.test_sizes
    assert (federation.train_sizes == sizes * 9 // 10).all()
    assert (federation.train_sizes + federation.test_sizes == sizes).all()


def test_only_the_sources_rule_tests_on_training_samples(tmp_path, capsys):
    options = {"clients": 20, "mean_size": 40.0, "minimum": 2, "min_size": 2, "alpha": 0.5}
    for partition in ("classes", "class-sizes", "dirichlet-equal", "quantity", "sorted", "iid"):
        federation = Digits(**options, partition=partition).load(tmp_path)
        assert statistics(federation)["test_overlap"] == 0
    federation = Digits(**options, partition="first").load(tmp_path)
    trained = {index for client in federation.clients for index in client.train.tolist()}
    tested = {index for client in federation.clients for index in client.test.tolist()}
    share = len(tested & trained) / len(tested)
    assert share > 0.3
    assert statistics(federation)["test_overlap"] == pytest.approx(share)
    settings = [f"--set={name}={value}" for name, value in options.items()]
    assert main(["data", "stats", "digits", *settings, "--set=partition=first"]) == 0
    assert f"{100 * share:.1f} % of the test samples of " in capsys.readouterr().out
    assert main(["data", "stats", "digits", *settings, "--set=partition=class-sizes"]) == 0
    assert "of the test samples of" not in capsys.readouterr().out
