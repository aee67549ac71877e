"""The stacked engine's own promises: any module, any batch term, any amount of memory."""

import copy
import itertools
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from engine_cases import (
    CLASSES,
    MODELS,
    Everything,
    check_same,
    conv_step,
    dense_step,
    engine_for,
    jobs_of,
    small_federation,
    sweep,
)
from fedproto import Centralized, FedAvg, FedProto, FedProx
from fedproto.engines import stacked
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.stacking.layers import Pass, computed
from fedproto.engines.stacking.lockstep import NONE, Lockstep, _sizes, stack_orders
from fedproto.engines.stacking.network import Network, RowLayout
from fedproto.engines.tracing import DenseStep, trace
from fedproto.engines.training import TrainOptions
from fedproto.errors import TrainingError
from fedproto.models import with_features
from fedproto.models.base import build_model
from fedproto.models.resnet import ResNet20Options
from fedproto.models.small import CNN4Options, LeNetOptions
from fedproto.strategies import Declared, Report, Strategy


def own_module(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return with_features(
        nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), *extra,
            nn.Linear(3 * 6 * 7, 9), nn.ReLU(), nn.Linear(9, CLASSES),
        )
    )  # fmt: skip


def test_a_users_module_is_stacked():
    strategies = [FedAvg(), FedProx(mu=0.5), FedProto(), Centralized()]
    truth = sweep("reference", own_module(), strategies=strategies)
    found = sweep("stacked", own_module(), strategies=strategies)
    assert found.notices == []
    check_same(found, truth, 1e-9)


class Mixed(nn.Module):
    def forward(self, x):
        return x - x.flip(0)


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(126, 126), nn.Linear(126, 126))
        self[1].weight = self[0].weight


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, 126))

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.AlphaDropout(0.5), "PyTorch's generator"),
        (lambda: nn.LayerNorm(126), "not all of its layers"),
        (lambda: nn.BatchNorm1d(126, momentum=None), "not all of its layers"),
        (Shifted, "not all of its layers"),
        (Tied, "not all of its layers"),
        (Mixed, "influence each other"),
    ],
)
def test_a_module_that_cannot_be_stacked_is_trained_one_by_one(layer, reason):
    module = own_module(layer())
    truth = sweep("reference", copy.deepcopy(module), strategies=[FedProto()])
    found = sweep("stacked", module, strategies=[FedProto()])
    assert len(found.notices) == 1
    assert reason in found.notices[0]
    check_same(found, truth, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_on_cuda_training_is_that_of_the_reference(model):
    truth = sweep("reference", MODELS[model], device="cuda")
    check_same(sweep("stacked", MODELS[model], device="cuda"), truth, 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "train",
    [
        TrainOptions(epochs=2, batch_size=5, lr=0.05, momentum=0.5, clip_norm=1.0),
        TrainOptions(epochs=2, batch_size=5, lr=0.05, optimizer="sam", centralize=True),
    ],
)
def test_on_cuda_captured_steps_are_those_of_the_reference(train):
    options = {"strategies": [FedAvg(), FedProx(mu=0.5)], "train": train, "device": "cuda"}
    options |= {"dtype": "float32", "federation": small_federation(shape=(3, 9, 8))}
    options |= {"sections": {"augment": AugmentOptions(flip=True, pad=2)}}
    truth = sweep("reference", MODELS["cnn"], **options)
    found = sweep("captured", MODELS["cnn"], **options)
    assert not found.notices
    check_same(found, truth, 1e-4)


def test_without_cuda_captured_steps_are_those_of_the_reference():
    strategies = [FedProx(mu=0.5), FedProto()]
    truth = sweep("reference", MODELS["cnn"], strategies=strategies)
    check_same(sweep("captured", MODELS["cnn"], strategies=strategies), truth, 0.0)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_kernels_that_give_wrong_gradients_are_dropped(monkeypatch, factor):
    """A network with "kernels" that are off by a factor is compared with its portable twin."""
    step, exact = Lockstep._step, Network.gradients

    class Portable(Network):
        pass

    def with_kernels(self, *args):
        loss, gradients = exact(self, *args)
        own = 1.0 if isinstance(self, Portable) else factor
        return loss, {name: own * computed(one) for name, one in gradients.items()}

    used = []

    def checked(self, size):
        if not self._checked:
            self._check_kernels(size)
            used.append(type(self._network))
        step(self, size)

    monkeypatch.setattr(Lockstep, "_step", checked)
    monkeypatch.setattr(Network, "gradients", with_kernels)
    monkeypatch.setattr(Network, "portable", lambda self: Portable(self.steps, self._shapes))
    options = {"strategies": [FedAvg()], "dtype": "float32"}
    with pytest.warns(UserWarning, match="wrong gradients") if factor > 1 else nullcontext():
        found = sweep("stacked", MODELS["cnn"], **options)
    assert set(used) == {Portable if factor > 1 else Network}
    check_same(found, sweep("reference", MODELS["cnn"], **options), 1e-4)


def on_images(layer: nn.Module) -> tuple[nn.Module, ...]:
    return nn.Unflatten(1, (3, 6, 7)), layer, nn.Flatten()


LAYERS = {
    "batch norm": lambda: (nn.BatchNorm1d(126),),
    "batch norm without weights": lambda: (nn.BatchNorm1d(126, affine=False),),
    "batch norm without statistics": lambda: on_images(
        nn.BatchNorm2d(3, track_running_stats=False)
    ),
    "dropout": lambda: (nn.Dropout(0.3),),
    "dropout of channels": lambda: on_images(nn.Dropout2d(0.4)),
    "several": lambda: (nn.BatchNorm1d(126), nn.Dropout(0.3), *on_images(nn.Dropout2d(0.2))),
}


@pytest.mark.parametrize("policy", ["average", "frozen", "local"])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_users_batch_norm_and_dropout_are_stacked(layers, policy):
    strategies = [FedProx(mu=0.5), FedProto(), *([] if policy == "local" else [Everything()])]
    train = TrainOptions(epochs=2, batch_size=5, lr=0.02, batch_norm=policy)
    # Clients whose last batch is one sample, which has no variance.
    options = {"federation": small_federation(sizes=(4, 9, 31, 16, 11)), "eval_batch_size": 6}
    options |= {"strategies": strategies, "train": train}
    truth = sweep("reference", own_module(*LAYERS[layers]()), **options)
    found = sweep("stacked", own_module(*LAYERS[layers]()), **options)
    assert all(policy == "local" and "local batch norm" in text for text in found.notices)
    check_same(found, truth, 1e-9)
    for ours, theirs in zip(found.states, truth.states, strict=True):
        assert ours.buffers.keys() == theirs.buffers.keys()
        for name, tensor in theirs.buffers.items():
            assert ours.buffers[name].dtype == tensor.dtype
            assert torch.allclose(ours.buffers[name].double(), tensor.double(), atol=1e-9), name


class Residual(nn.Module):
    """Different build: functional ReLU, an average pool, a sum without normalisation, no bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 6)
        self.second = nn.Conv2d(6, 6, (3, 1), stride=2, padding=(1, 0))
        self.narrow = nn.Conv2d(6, 6, 1, stride=2)
        self.out = nn.Linear(6 * 2 * 2, CLASSES)

    def forward(self, x):
        x = nn.functional.relu(self.norm(self.first(x)))
        y = torch.tanh(self.second(x)) + self.narrow(x)
        return self.out(nn.functional.avg_pool2d(y, 2).view(y.size(0), -1))


class InPlace(nn.Module):
    """Functions that change their input, apart from any layer that they could join."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        y = self.second(x)
        y += x
        x = nn.functional.relu_(self.relu(y).neg().add_(x))
        return self.out(nn.functional.relu(x.mean((2, 3)), inplace=True))


TRACED = {
    "lenet": LeNetOptions(channels=6, hidden=8, features=7),
    "group norm": ResNet20Options(groups=2, standardize=True),
    "batch norm": ResNet20Options(norm="batch"),
    "no norm, large stem": ResNet20Options(norm="none", stem=7),
    "of one's own": with_features(Residual(), head="out"),
    "in place": with_features(InPlace(), head="out"),
}


@pytest.mark.parametrize("model", TRACED)
def test_residual_networks_are_traced_and_trained_as_by_the_reference(model):
    side = 16 if model == "lenet" else 8
    options = {
        "federation": small_federation(shape=(3, side, side), sizes=(4, 9, 7)),
        "strategies": [FedProx(mu=0.5), FedProto(), Everything()],
        "train": TrainOptions(epochs=2, batch_size=4, lr=0.02, clip_norm=1.0, weight_decay=0.01),
    }
    found = sweep("stacked", copy.deepcopy(TRACED[model]), **options)
    assert not found.notices
    check_same(found, sweep("reference", copy.deepcopy(TRACED[model]), **options), 1e-9)


def test_models_of_the_box_are_traced():
    for options in (*MODELS.values(), CNN4Options(batch_norm=True), *TRACED.values()):
        shape = (3, 16, 16)
        model = options if isinstance(options, nn.Module) else options.build(shape, CLASSES)
        found = trace(
            model, torch.randn(2, 3, 8, 8) if model is options else torch.randn(2, *shape)
        )
        assert found is not None
        assert isinstance(found.steps[-1], DenseStep)


@pytest.mark.parametrize("augment", [AugmentOptions(flip=True), AugmentOptions(flip=True, pad=2)])
def test_moved_and_mirrored_images_are_those_of_the_reference(augment):
    options = {
        "federation": small_federation(shape=(3, 9, 8), sizes=(4, 9, 7)),
        "strategies": [FedAvg(), FedProto()],
        "sections": {"augment": augment},
    }
    found = sweep("stacked", MODELS["cnn"], **options)
    assert not found.notices
    check_same(found, sweep("reference", MODELS["cnn"], **options), 1e-9)


def test_resized_images_are_left_to_another_engine():
    options = {
        "federation": small_federation(shape=(3, 9, 8), sizes=(4, 9, 7)),
        "sections": {"augment": AugmentOptions(scale=(0.8, 1.2))},
        "strategies": [FedAvg()],
    }
    found = sweep("stacked", MODELS["cnn"], **options)
    assert "augmentation but for flips" in found.notices[0]
    check_same(found, sweep("reference", MODELS["cnn"], **options), 0.0)


@pytest.mark.parametrize("policy", ["average", "frozen", "local"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_batch_norm_is_stacked(policy, momentum):
    model = CNN4Options(channels=3, batch_norm=True)
    federation = small_federation(shape=(3, 16, 18))
    train = TrainOptions(epochs=2, batch_size=5, lr=0.01, batch_norm=policy, momentum=momentum)
    strategies = [FedAvg(), FedProx(mu=0.5), FedProto()]
    options = {"federation": federation, "strategies": strategies, "train": train}
    truth = sweep("reference", model, **options, eval_batch_size=7)
    found = sweep("stacked", model, **options, eval_batch_size=7)
    # Prototypes need the client's own statistics, which the reference engine estimates.
    assert len(found.notices) == (policy == "local")
    assert all("local batch norm" in text for text in found.notices)
    check_same(found, truth, 1e-9)
    for ours, theirs in zip(found.states, truth.states, strict=True):
        assert ours.buffers.keys() == theirs.buffers.keys()
        for name, tensor in theirs.buffers.items():
            assert torch.allclose(ours.buffers[name].double(), tensor.double(), atol=1e-9), name


@dataclass(frozen=True)
class SmallLogits(Strategy):
    def batch_term(self, local, batch):
        return 0.1 * batch.mean(batch.logits.abs().sum(dim=1))


@dataclass(frozen=True)
class NearLastBias(Strategy):
    """Sees memory that a client has from its second round on."""

    def client_memory(self, setting):
        return {"own/bias": Declared((CLASSES,), setting.float_type, initial=None)}

    def batch_term(self, local, batch):
        kept = local.memory.get("own/bias")
        return None if kept is None else batch.mean((batch.logits - kept).square().sum(dim=1))

    def report(self, local, trained, before, after):
        return Report(memory={"own/bias": 1 + trained[local.head[-1]]})


@dataclass(frozen=True)
class CarefulTerm(Strategy):
    def batch_term(self, local, batch):
        size = batch.mean(batch.logits.square().sum(dim=1))
        return size if float(size.detach()) < 1e3 else None


@pytest.mark.parametrize("model", MODELS)
def test_a_users_batch_term_is_stacked(model):
    strategies = [SmallLogits(), NearLastBias(), FedAvg()]
    momentum = TrainOptions(epochs=2, batch_size=5, lr=0.05, momentum=0.5)
    for train in (None, momentum):
        truth = sweep("reference", MODELS[model], strategies=strategies, train=train)
        found = sweep("stacked", MODELS[model], strategies=strategies, train=train)
        assert found.notices == []
        check_same(found, truth, 1e-9)


def test_a_batch_term_that_cannot_be_stacked_is_trained_one_by_one():
    truth = sweep("reference", MODELS["mlp"], strategies=[CarefulTerm(), FedAvg()])
    found = sweep("stacked", MODELS["mlp"], strategies=[CarefulTerm(), FedAvg()])
    assert len(found.notices) == 1
    assert "CarefulTerm" in found.notices[0]
    check_same(found, truth, 1e-9)


def test_a_stack_that_does_not_fit_is_split(monkeypatch):
    truth = sweep("stacked", MODELS["cnn"])
    sizes: list[int] = []
    train = Lockstep.train

    def watched(self, packed, members):
        sizes.append(len(members))
        return train(self, packed, members)

    monkeypatch.setattr(Lockstep, "train", watched)
    monkeypatch.setattr(stacked, "free_bytes", lambda _: 1_000_000)
    found = sweep("stacked", MODELS["cnn"])
    assert max(sizes) > 1
    assert max(sizes) < 14 * 3
    assert all("cannot run some jobs" in text for text in found.notices)
    check_same(found, truth, 1e-9)


@pytest.mark.parametrize("hidden", [False, True])
def test_running_out_of_memory_halves_the_stack_and_goes_on(monkeypatch, hidden):
    truth = sweep("stacked", MODELS["mlp"])
    train = Lockstep.train

    def cramped(self, packed, members):
        if len(members) > 6:
            # As on a device: some of the work is done when the memory runs out.
            self.params["classifier.bias"].add_(1)
            try:
                raise torch.cuda.OutOfMemoryError("no room")
            finally:
                if hidden:
                    raise RuntimeError("capturing failed")
        return train(self, packed, members)

    monkeypatch.setattr(Lockstep, "train", cramped)
    found = sweep("stacked", MODELS["mlp"])
    notices = [text for text in found.notices if "cannot run some jobs" not in text]
    assert notices
    assert all("out of memory" in text for text in notices)
    check_same(found, truth, 1e-9)


def test_one_client_that_does_not_fit_is_an_error(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(Lockstep, "train", full)
    with pytest.raises(TrainingError, match="smaller batches"):
        sweep("stacked", MODELS["mlp"])


def test_a_failing_stack_names_the_round():
    federation = small_federation()
    model = build_model(MODELS["mlp"], (5,), CLASSES, seed=0).double()
    with pytest.raises(TrainingError, match="in round 0 failed"):
        engine_for("stacked", federation, model, []).train(jobs_of(federation, model, FedAvg()))


def test_orders_are_those_of_the_schedule():
    federation = small_federation()
    model = build_model(MODELS["mlp"], federation.input_shape, CLASSES, seed=0)
    jobs = jobs_of(federation, model, FedAvg()) + jobs_of(federation, model, Centralized())
    orders = stack_orders(jobs, federation)
    for place, job in enumerate(jobs):
        indices = federation.train_indices(job.client)
        batches = [batch for epoch in job.batches for batch in epoch]
        assert orders.steps[place] == len(batches)
        for step, batch in enumerate(batches):
            start = orders.start[place] + step * job.batches.batch_size
            found = orders.samples[start : start + job.batches.batch_size]
            assert np.array_equal(found[found != NONE], indices[batch])
        last = list(job.batches)[-1]
        assert orders.last_epoch[place] == len(batches) - len(last)
        assert orders.last_samples[place] == sum(len(batch) for batch in last)


@pytest.mark.parametrize("channels", [(1, 3), (3, 2), (8, 2)])
def test_a_convolution_agrees_with_pytorch(channels):
    """Gradients of input, weight and bias, with equal values in a cell as over a background."""
    torch.manual_seed(1)
    ins, outs = channels
    block = conv_step(channels, (7, 6), 5)
    x = torch.randn(2, 3, ins, 7, 6, dtype=torch.float64)
    x[:, :, :, :4, :] = 0
    weight = torch.randn(2, outs, ins, 5, 5, dtype=torch.float64)
    bias = torch.rand(2, outs, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.stack(
        [
            nn.functional.max_pool2d(nn.functional.conv2d(*each, padding=2).relu(), 2)
            for each in zip(*leaves, strict=True)
        ]
    )
    dy = torch.randn_like(expected)
    expected.backward(dy)

    params = {"conv.weight": block.pack(weight), "conv.bias": bias}
    live = torch.ones(x.shape[:2], dtype=torch.bool)
    y, saved = block.forward(Pass(params, live), [x.movedim(2, -1).contiguous()])
    (dx,), gradients = block.backward(Pass(params, live), saved, dy.movedim(2, -1), first=False)
    assert torch.allclose(y.movedim(-1, 2), expected)
    assert torch.allclose(dx.movedim(-1, 2), leaves[0].grad)
    assert torch.allclose(block.unpack(computed(gradients["conv.weight"])), leaves[1].grad)
    assert torch.allclose(gradients["conv.bias"], leaves[2].grad)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (conv_step((1, 4), (8, 8), 5), (4, 1, 5, 5)),
        (conv_step((6, 4), (8, 8), 3), (4, 6, 3, 3)),
        (dense_step(24, 5, image=(2, 3, 4)), (5, 24)),
    ],
)
def test_packing_and_back_changes_nothing(block, shape):
    weight = torch.randn(3, *shape)
    assert torch.equal(block.unpack(block.pack(weight)), weight)


def test_rows_hold_all_tensors_apart():
    example = {"a": torch.zeros(3), "big": torch.zeros(70, 70), "b": torch.zeros(2, 2)}
    layout = RowLayout(example)
    stacked = {name: torch.randn(4, *tensor.shape) for name, tensor in example.items()}
    flat = torch.zeros(4, layout.size)
    for name, view in layout.views(flat).items():
        view.copy_(stacked[name])
    for name, view in layout.views(flat).items():
        assert torch.equal(view, stacked[name])
    assert layout.small == ["a", "b"]
    assert torch.equal(layout.gather_small(stacked), flat[:, : layout.small_size])
    assert flat.shape == (4, layout.size)
    assert layout.views(flat)["big"].data_ptr() % 128 == flat.data_ptr() % 128


def test_graph_sizes_waste_little():
    sizes = _sizes(120)
    assert sizes[0] == 2
    assert sizes[-1] == 120
    assert all(larger <= 1.5 * smaller for smaller, larger in itertools.pairwise(sizes))
    assert len(sizes) < 30


@pytest.mark.parametrize("steps", [3, 8, 21, 50])
def test_graphs_of_several_steps_end_with_the_last_job(monkeypatch, steps):
    """Jobs of one length make no step after their last, but for those that capture a graph."""
    made = []

    class Graph:
        def replay(self):
            made.extend(self.steps)

    @contextmanager
    def capture(graph, **_):
        before = len(made)
        yield
        graph.steps = made[before:]
        del made[before:]

    for name, value in {
        "CUDAGraph": Graph,
        "graph": capture,
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    loop = object.__new__(Lockstep)
    loop._sizes, loop._pool, loop._device = [4], None, torch.device("cpu")
    loop._check_kernels, loop._step = lambda _: None, made.append
    graphs, before = {}, 0
    for _ in range(3):
        done = 0
        while done < steps:
            done += loop._replay(3, steps - done, graphs)
        assert (done, len(made) - before) == (steps, steps)
        before = len(made)
    assert graphs.keys() <= {(4, 1), (4, 8)}
