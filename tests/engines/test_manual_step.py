"""The manual training step: the same numbers as automatic differentiation gives."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from engine_cases import CLASSES, STRATEGIES, engine_for, jobs_of, small_federation
from fedproto import FedAvg, FedProx
from fedproto.data.tasks import Classification
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.manual import ManualTrainer, can_step_manually, manual_network
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.spectra import SpectralConvolution
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.models.small import CNN, CNN4Options, CNNOptions, MLPOptions
from fedproto.strategies import Strategy
from fedproto.strategies.values import Objective

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SMALL_CNN = CNNOptions(channels1=3, channels2=5, features=7)
MODELS = {"cnn": SMALL_CNN, "mlp": MLPOptions(hidden=8, features=6)}


def manual_for(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype):
    network = manual_network(model, shape, dtype)
    assert network is not None
    return network


def stepped(model: nn.Module, x, targets, received=None, mu: float = 0.0, rate: float = 0.1):
    """The module's parameters after one step of plain gradient descent, and the loss."""
    params = dict(model.named_parameters())
    loss = F.cross_entropy(model(x), targets)
    total = loss
    if received is not None:
        total = loss + mu / 2 * sum((params[name] - received[name]).pow(2).sum() for name in params)
    gradients = torch.autograd.grad(total, list(params.values()))
    after = {
        name: (params[name] - rate * gradient).detach()
        for name, gradient in zip(params, gradients, strict=True)
    }
    return after, loss.item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("image", "taps"), [((14, 14), 5), ((7, 4), 5), ((2, 2), 5), ((1, 3), 5), ((6, 9), 3)]
)
def test_spectral_convolution_is_the_direct_one(image, taps, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, *image, generator=generator, dtype=dtype, requires_grad=True)
    kernel = torch.randn(4, 2, taps, taps, generator=generator, dtype=dtype, requires_grad=True)
    y = F.conv2d(x, kernel, padding=taps // 2)
    dy = torch.randn(y.shape, generator=generator, dtype=dtype)
    y.backward(dy)

    convolution = SpectralConvolution(image, taps, dtype)
    packed = kernel.detach().permute(2, 3, 1, 0).reshape(taps**2, 2, 4).contiguous()
    pixels_first = x.detach().permute(2, 3, 0, 1).contiguous()
    ours, spectra = convolution.forward(pixels_first, packed)
    dx, of_gradient = convolution.backward(dy.permute(2, 3, 0, 1).contiguous(), spectra)
    moved = packed.clone()
    convolution.descend(moved, of_gradient, rate=0.5)

    close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-4}
    torch.testing.assert_close(ours.permute(2, 3, 0, 1), y.detach(), **close)
    torch.testing.assert_close(dx.permute(2, 3, 0, 1), x.grad, **close)
    gradient = ((packed - moved) / 0.5).view(taps, taps, 2, 4).permute(3, 2, 0, 1)
    torch.testing.assert_close(gradient, kernel.grad, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (SMALL_CNN, (1, 8, 9)),
        (SMALL_CNN, (3, 11, 6)),
        (SMALL_CNN, (2, 5, 4)),
        (CNNOptions(), (1, 28, 28)),
        (MLPOptions(hidden=8, features=6), (3, 4)),
    ],
)
def test_a_step_is_that_of_automatic_differentiation(options, shape, batch, dtype):
    model = build_model(options, shape, CLASSES, seed=1).to(dtype)
    generator = torch.Generator().manual_seed(2)
    begun = {name: one.detach().clone() for name, one in model.named_parameters()}
    # A personal model does not begin at the received weights.
    received = {
        name: one + 0.1 * torch.randn(one.shape, generator=generator, dtype=dtype)
        for name, one in begun.items()
    }
    network = manual_for(model, shape, dtype)
    ours = {name: tensor.clone() for name, tensor in begun.items()}
    network.load(ours, received, Objective(proximal=0.7))
    for _ in range(3):
        x = torch.randn(batch, *shape, generator=generator, dtype=dtype)
        targets = torch.randint(0, CLASSES, (batch,), generator=generator)
        expected, loss = stepped(model, x, targets, received, mu=0.7)
        found = network.step(x, targets, Classification().loss_and_slope, rate=0.1)
        assert float(found) == pytest.approx(loss, abs=TOLERANCE[dtype])
        model.load_state_dict(expected)
    network.store(ours)
    for name, tensor in expected.items():
        assert float((tensor - begun[name]).abs().max()) > 1e-4, "nothing was learned"
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=TOLERANCE[dtype])


def test_equal_values_in_a_pooled_cell_pass_the_gradient_once():
    """Over an empty background all pixels are equal, so that every cell is a tie."""
    model = build_model(CNNOptions(), (1, 28, 28), CLASSES, seed=1).double()
    x = torch.zeros(4, 1, 28, 28, dtype=torch.float64)
    x[:, :, 10:17, 12:15] = torch.rand(4, 1, 7, 3, dtype=torch.float64)
    targets = torch.arange(4)
    network = manual_for(model, (1, 28, 28), torch.float64)
    expected, _ = stepped(model, x, targets)
    network.load(dict(model.named_parameters()), {}, Objective())
    network.step(x, targets, Classification().loss_and_slope, rate=0.1)
    network.store(dict(model.named_parameters()))
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.detach(), expected[name], rtol=0, atol=1e-9)


def trainers(options, dtype="float64"):
    federation = small_federation()
    model = build_model(options, federation.input_shape, CLASSES, seed=0)
    workload = engine_for("reference", federation, model, [], dtype=dtype).workload
    return federation, model, ReferenceEngine(workload), ManualTrainer(workload)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("model", MODELS)
def test_jobs_of_every_strategy(model, strategy):
    federation, module, reference, manual = trainers(MODELS[model])
    jobs = jobs_of(federation, module.double(), strategy)
    hooks = jobs[0].method.needs.hooks
    closed = not hooks & {"batch_term", "trainable"}
    assert all(can_step_manually(job) == closed for job in jobs)
    for ours, theirs in zip(manual.train(jobs), reference.train(jobs), strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-6)
        assert ours.epochs_done == theirs.epochs_done
        for name, tensor in theirs.params.items():
            torch.testing.assert_close(ours.params[name], tensor, rtol=0, atol=1e-9)
        for name, tensor in theirs.payload.items():
            torch.testing.assert_close(ours.payload[name], tensor, rtol=0, atol=1e-8)


def test_a_job_without_epochs_gives_the_received_weights():
    federation, module, _, manual = trainers(SMALL_CNN)
    job = jobs_of(federation, module.double(), FedProx())[0]
    (update,) = manual.train([replace(job, batches=replace(job.batches, epochs=0))])
    assert update.train_loss is None
    for name, tensor in job.state.params.items():
        assert torch.equal(update.params[name], tensor)


def test_augmented_jobs_are_the_reference_engines_too():
    federation, module, reference, manual = trainers(SMALL_CNN)
    augment = AugmentOptions(flip=True)
    jobs = [replace(job, augment=augment) for job in jobs_of(federation, module.double(), FedAvg())]
    for ours, theirs in zip(manual.train(jobs), reference.train(jobs), strict=True):
        for name, tensor in theirs.params.items():
            torch.testing.assert_close(ours.params[name], tensor, rtol=0, atol=1e-9)


@dataclass(frozen=True)
class OwnTerm(Strategy):
    def batch_term(self, local, batch):
        return 0.1 * batch.mean(batch.logits.abs().sum(dim=1))


@pytest.mark.parametrize(
    "train",
    [
        TrainOptions(momentum=0.9),
        TrainOptions(weight_decay=0.1),
        TrainOptions(optimizer="adam"),
        TrainOptions(optimizer="sam"),
        TrainOptions(clip_norm=1.0),
        TrainOptions(centralize=True),
    ],
)
def test_other_optimizers_are_left_to_automatic_differentiation(train):
    federation = small_federation()
    model = build_model(SMALL_CNN, federation.input_shape, CLASSES, seed=0)
    assert not any(can_step_manually(job) for job in jobs_of(federation, model, FedAvg(), train))


def test_a_batch_term_is_left_to_automatic_differentiation():
    federation, module, reference, manual = trainers(SMALL_CNN)
    jobs = jobs_of(federation, module.double(), OwnTerm())
    assert not any(can_step_manually(job) for job in jobs)
    for ours, theirs in zip(manual.train(jobs), reference.train(jobs), strict=True):
        for name, tensor in theirs.params.items():
            torch.testing.assert_close(ours.params[name], tensor, rtol=0, atol=1e-9)


class Changed(CNN):
    """A subclass may compute something else."""

    def features(self, x):
        return super().features(x).tanh()


def test_models_without_a_manual_form():
    shape = (3, 32, 32)
    assert (
        manual_network(
            Changed(shape, (3, 5), {"dense": 7}, CLASSES, padding=2), shape, torch.float32
        )
        is None
    )
    narrow = build_model(CNN4Options(channels=4), shape, CLASSES, seed=0)
    assert manual_network(narrow, shape, torch.float32) is None
    normed = build_model(CNN4Options(channels=4, batch_norm=True), shape, CLASSES, seed=0)
    assert manual_network(normed, shape, torch.float32) is None
    large = build_model(SMALL_CNN, (1, 80, 20), CLASSES, seed=0)
    assert manual_network(large, (1, 80, 20), torch.float32) is None
    frozen = build_model(SMALL_CNN, shape, CLASSES, seed=0)
    frozen.conv1.requires_grad_(False)
    assert manual_network(frozen, shape, torch.float32) is None
