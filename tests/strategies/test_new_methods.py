"""Methods with batch terms, personal parameters and momentum: by hand, and alike in every engine.

The computations by hand know nothing of strategies: weights are lists ``[W1, b1, W2, b2]`` of a
small network in float64, gradients PyTorch's own. Cohorts and batches are taken from the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedproto import (
    GHBM,
    STRATEGIES,
    Ditto,
    FedACG,
    FedBABU,
    FedDecorr,
    FedDisco,
    FedNTD,
    FedPer,
    FedProtoTan,
    FedRep,
    FedRoD,
    Moon,
    Scaffold,
    with_features,
)
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.base import ENGINES, EngineOptions, Workload
from fedproto.engines.setting import read_state
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError, TrainingError
from fedproto.models.base import build_model
from fedproto.models.small import CNN4Options
from fedproto.rounds import Run, run_rounds
from fedproto.rounds.jobs import participants
from fedproto.strategies import Strategy
from fedproto.types import ClientUpdate, ServerState, part
from helpers import Notices, run_from

CLASSES, CHANNELS, ROUNDS, LR, EPOCHS = 4, 6, 4, 0.3, 3
Weights = list[Tensor]
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
BODY, HEAD = (0, 1), (2, 3)


def three_clients() -> Federation:
    """Of unequal sizes, so that they make unequal numbers of steps; two lack classes."""
    generator = torch.Generator().manual_seed(8)
    held = ((0, 1), (1, 2, 3), (0, 1, 2, 3))
    return Federation.from_clients(
        [
            (
                torch.randn(size, 3, generator=generator),
                torch.tensor(classes)[torch.randint(len(classes), (size,), generator=generator)],
            )
            for size, classes in zip((7, 11, 18), held, strict=True)
        ],
        num_classes=CLASSES,
    )


def small_model() -> nn.Module:
    torch.manual_seed(4)
    layers = nn.Sequential(nn.Linear(3, CHANNELS), nn.Tanh(), nn.Linear(CHANNELS, CLASSES))
    return with_features(layers).double()


def config_of(strategy: Strategy, rounds: int = ROUNDS, **train: object) -> RunConfig:
    options = {"epochs": EPOCHS, "batch_size": 5, "lr": LR, **train}
    schedule = ScheduleOptions(rounds=rounds, cohort=2, sampling="uniform")
    return RunConfig(strategy=strategy, train=TrainOptions(**options), schedule=schedule, seed=3)


@dataclass
class Sweep:
    """States by strategy and round, runs by strategy, and notices."""

    states: list[list[ServerState]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def train(
    strategies: list[Strategy],
    engine: str = "reference",
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    rounds: int = ROUNDS,
    **options: object,
) -> Sweep:
    federation, model = federation or three_clients(), model or small_model()
    found = Sweep()
    chosen = EngineOptions(name=engine, device="cpu", dtype="float64")
    task = task_named("classification")
    running = ENGINES.get(engine)(Workload(federation, model, task, chosen, Notices(found.notices)))
    params, buffers = read_state(model)
    start = ServerState(0, params, TrainOptions(**options).shared_buffers(model, buffers))
    found.runs = [run_from(config_of(one, rounds, **options), start) for one in strategies]
    found.states = [[] for _ in strategies]
    try:
        for run, record in run_rounds(found.runs, running):
            assert not record.failures
            assert record.note is None
            found.states[[run is one for one in found.runs].index(True)].append(run.state)
    finally:
        running.close()
    return found


def memory_of(run: Run, client: int) -> dict[str, Tensor]:
    return dict(run.memory.load(client, run.last_round[client]) or {})


# By hand.


@dataclass
class Data:
    """A client's part of a round: epochs of batches, and all its samples."""

    epochs: list[list[tuple[Tensor, Tensor]]]
    x: Tensor
    y: Tensor

    @property
    def steps(self) -> int:
        return sum(map(len, self.epochs))


Loss = Callable[[Weights, Tensor, Tensor], Tensor]


def rounds_of(strategy: Strategy) -> Iterator[dict[int, Data]]:
    federation = three_clients()
    for number in range(ROUNDS):
        clients = {}
        for order in participants(config_of(strategy), number, federation).orders:
            x, y = federation.samples.batch(federation.train_indices(order.client))
            x = x.double()
            epochs = [[(x[batch], y[batch]) for batch in batches] for batches in order]
            clients[order.client] = Data(epochs, x, y)
        yield clients


def begun() -> Weights:
    return [one.detach().clone() for one in small_model().parameters()]


def encode(w: Weights, x: Tensor) -> Tensor:
    return torch.tanh(x @ w[0].T + w[1])


def logits_of(w: Weights, x: Tensor) -> Tensor:
    return encode(w, x) @ w[2].T + w[3]


def plain(w: Weights, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits_of(w, x), y)


def square(w: Weights, other: Weights) -> Tensor:
    return sum(((a - b) ** 2).sum() for a, b in zip(w, other, strict=True))


def descend(
    start: Weights, data: Data, loss: Loss, trained: Callable[[int], tuple[int, ...]] | None = None
) -> Weights:
    w = [one.clone() for one in start]
    for epoch, batches in enumerate(data.epochs):
        for x, y in batches:
            leaves = [one.clone().requires_grad_() for one in w]
            gradients = torch.autograd.grad(loss(leaves, x, y), leaves, allow_unused=True)
            places = range(4) if trained is None else trained(epoch)
            for place in places:
                w[place] = w[place] - LR * gradients[place]
    return w


def average(ends: dict[int, Weights], clients: dict[int, Data], weight=None) -> Weights:
    weight = weight or {one: len(clients[one].y) for one in clients}
    total = sum(weight.values())
    return [sum(weight[one] * ends[one][place] for one in ends) / total for place in range(4)]


def counts(y: Tensor) -> Tensor:
    return torch.bincount(y, minlength=CLASSES)


Truth = tuple[list[Weights], dict[str, dict[int, Weights]]]
"""The shared model after every round; the clients' last weights by what they are."""


def fedacg_by_hand(strategy: FedACG) -> Truth:
    sent, momentum, tested = begun(), [torch.zeros_like(one) for one in begun()], []
    for clients in rounds_of(strategy):
        ends = {
            one: descend(
                sent, data, lambda w, x, y, s=sent: plain(w, x, y) + 0.05 / 2 * square(w, s)
            )
            for one, data in clients.items()
        }
        mean = average(ends, clients)
        momentum = [0.85 * m + (w - s) for m, w, s in zip(momentum, mean, sent, strict=True)]
        sent = [w + 0.85 * m for w, m in zip(mean, momentum, strict=True)]
        tested.append(mean)
    return tested, {}


def ghbm_by_hand(strategy: GHBM) -> Truth:
    models = [begun()]
    for clients in rounds_of(strategy):
        now, past = models[-1], models[-3] if len(models) > 2 else models[-1]
        ends = {}
        for one, data in clients.items():
            factor = 0.7 / (LR * data.steps) / 2
            push = [factor * (old - new) for old, new in zip(past, now, strict=True)]
            ends[one] = descend(
                now,
                data,
                lambda w, x, y, p=push: (
                    plain(w, x, y) + sum((a * b).sum() for a, b in zip(p, w, strict=True))
                ),
            )
        models.append(average(ends, clients))
    return models[1:], {}


def moon_by_hand(strategy: Moon) -> Truth:
    shared, previous, states = begun(), {}, []
    for clients in rounds_of(strategy):
        for one, data in clients.items():
            last = previous.get(one)

            def loss(w, x, y, old=last, sent=shared):
                if old is None:
                    return plain(w, x, y)
                near = torch.exp(cosine_similarity(encode(w, x), encode(sent, x)) / 0.4)
                far = torch.exp(cosine_similarity(encode(w, x), encode(old, x)) / 0.4)
                return plain(w, x, y) - 2 * torch.log(near / (near + far)).mean()

            previous[one] = descend(shared, data, loss)
        shared = average({one: previous[one] for one in clients}, clients)
        states.append(shared)
    return states, {"previous": previous}


def fedntd_by_hand(strategy: FedNTD) -> Truth:
    def loss(w, x, y, sent):
        total = plain(w, x, y)
        for ours, theirs, label in zip(logits_of(w, x), logits_of(sent, x), y, strict=True):
            others = [c for c in range(CLASSES) if c != label]
            p, q = (torch.softmax(one[others] / 2, dim=0) for one in (ours, theirs))
            total = total + 1.5 * (q * torch.log(q / p)).sum() / len(y)
        return total

    return averaged(strategy, loss)


def feddecorr_by_hand(strategy: FedDecorr) -> Truth:
    def loss(w, x, y, sent):
        del sent
        if len(x) == 1:
            return plain(w, x, y)
        covariance = torch.cov(encode(w, x).T, correction=0)
        deviation = (covariance.diag() + 1e-8).sqrt()
        correlation = covariance / torch.outer(deviation, deviation)
        return plain(w, x, y) + 0.6 * (correlation**2).sum() / CHANNELS**2

    return averaged(strategy, loss)


def averaged(strategy: Strategy, loss: Callable[..., Tensor]) -> Truth:
    """Federated averaging with a loss that also sees the received weights."""
    shared, states = begun(), []
    for clients in rounds_of(strategy):
        ends = {
            one: descend(shared, data, lambda w, x, y, s=shared: loss(w, x, y, s))
            for one, data in clients.items()
        }
        shared = average(ends, clients)
        states.append(shared)
    return states, {}


def fedprototan_by_hand(strategy: FedProtoTan) -> Truth:
    apart = strategy.weights == "personal"
    shared, own, prototypes, states = begun(), {}, {}, []
    for clients in rounds_of(strategy):

        def loss(w, x, y, known=prototypes):
            f, total = encode(w, x), plain(w, x, y)
            for features, label in zip(f, y.tolist(), strict=True):
                if label in known:
                    total = total + 3 * ((features - known[label]) ** 2).mean() / len(y)
            return total

        for one, data in clients.items():
            own[one] = descend(own.get(one, shared) if apart else shared, data, loss)
        features = torch.cat([encode(own[one], data.x) for one, data in clients.items()])
        labels = torch.cat([data.y for data in clients.values()])
        prototypes = {int(c): features[labels == c].mean(dim=0) for c in labels.unique()}
        shared = shared if apart else average({one: own[one] for one in clients}, clients)
        states.append(shared)
    return states, {"personal": own} if apart else {}


def personal_head_by_hand(strategy: FedPer, phases=None) -> Truth:
    shared, heads, states = begun(), {}, []
    for clients in rounds_of(strategy):
        ends = {}
        for one, data in clients.items():
            start = [*shared[:2], *heads.get(one, shared[2:])]
            ends[one] = descend(start, data, plain, phases)
            heads[one] = ends[one][2:]
        shared = [*average(ends, clients)[:2], *shared[2:]]
        states.append(shared)
    return states, {"personal": heads}


def fedrep_by_hand(strategy: FedRep) -> Truth:
    return personal_head_by_hand(strategy, lambda epoch: HEAD if epoch < 2 else BODY)


def fedbabu_by_hand(strategy: FedBABU) -> Truth:
    shared, states = begun(), []
    for clients in rounds_of(strategy):
        ends = {one: descend(shared, data, plain, lambda _: BODY) for one, data in clients.items()}
        shared = average(ends, clients)
        states.append(shared)
    return states, {}


def ditto_by_hand(strategy: Ditto) -> Truth:
    own, sent = {}, begun()
    states, _ = averaged(strategy, lambda w, x, y, _: plain(w, x, y))
    for clients, new in zip(rounds_of(strategy), states, strict=True):
        for one, data in clients.items():
            own[one] = descend(
                own.get(one, sent),
                data,
                lambda w, x, y, s=sent: plain(w, x, y) + 0.8 / 2 * square(w, s),
            )
        sent = new
    return states, {"personal": own}


def fedrod_by_hand(strategy: FedRoD) -> Truth:
    """P as a layer of its own, from which the personal model's head is put together at the end."""
    shared, residual, own, states = begun(), {}, {}, []
    for clients in rounds_of(strategy):
        ends = {}
        for one, data in clients.items():
            held = counts(data.y)

            def balanced(w, x, y, held=held):
                kept = held > 0
                place = (kept.cumsum(0) - 1)[y]
                return cross_entropy((logits_of(w, x) + held.double().log())[:, kept], place)

            ends[one] = w = descend(shared, data, balanced)

            def rest(p, x, y, w=w):
                return cross_entropy(logits_of(w, x) + encode(w, x) @ p[2].T + p[3], y)

            zero = [torch.zeros_like(each) for each in w]
            p = descend(residual.get(one, zero), data, rest, lambda _: HEAD)
            residual[one] = p
            own[one] = [*w[:2], w[2] + p[2], w[3] + p[3]]
        shared = average(ends, clients)
        states.append(shared)
    return states, {"personal": own}


def scaffold_by_hand(strategy: Scaffold) -> Truth:
    shared, states = begun(), []
    server, own = [torch.zeros_like(one) for one in shared], {}
    for clients in rounds_of(strategy):
        ends, new = {}, {}
        for one, data in clients.items():
            c = own.get(one, [torch.zeros_like(each) for each in shared])
            slope = [a - b for a, b in zip(server, c, strict=True)]
            ends[one] = descend(
                shared,
                data,
                lambda w, x, y, s=slope: (
                    plain(w, x, y) + sum((a * b).sum() for a, b in zip(s, w, strict=True))
                ),
            )
            new[one] = [
                a - m + (old - end) / (data.steps * LR)
                for a, m, old, end in zip(c, server, shared, ends[one], strict=True)
            ]
        own |= new
        server = [
            m + 0.2 * sum(new[one][place] - m for one in new) / len(new)
            for place, m in enumerate(server)
        ]
        shared = average(ends, clients, dict.fromkeys(clients, 1))
        states.append(shared)
    return states, {"control": own}


def feddisco_by_hand(strategy: FedDisco) -> Truth:
    shared, states = begun(), []
    for clients in rounds_of(strategy):
        ends = {one: descend(shared, data, plain) for one, data in clients.items()}
        total = sum(len(data.y) for data in clients.values())
        apart = {}
        for one, data in clients.items():
            share = [float(n) / len(data.y) for n in counts(data.y) if n]
            apart[one] = sum(p * math.log(p * CLASSES) for p in share)
        weight = {
            one: max(0.0, len(data.y) / total - 0.5 * apart[one] / sum(apart.values()) + 0.1)
            for one, data in clients.items()
        }
        shared = average(ends, clients, weight)
        states.append(shared)
    return states, {}


BY_HAND: list[tuple[Strategy, Callable[..., Truth]]] = [
    (FedACG(mu=0.05), fedacg_by_hand),
    (GHBM(beta=0.7, tau=2), ghbm_by_hand),
    (Moon(mu=2.0, temperature=0.4), moon_by_hand),
    (FedNTD(beta=1.5, tau=2.0), fedntd_by_hand),
    (FedDecorr(beta=0.6), feddecorr_by_hand),
    (FedProtoTan(strength=3.0), fedprototan_by_hand),
    (FedProtoTan(strength=3.0, weights="personal"), fedprototan_by_hand),
    (FedPer(), personal_head_by_hand),
    (FedPer(layers="2.*"), personal_head_by_hand),
    (FedRep(head_epochs=2), fedrep_by_hand),
    (FedBABU(), fedbabu_by_hand),
    (Ditto(strength=0.8), ditto_by_hand),
    (FedRoD(), fedrod_by_hand),
    (Scaffold(gamma=0.2), scaffold_by_hand),
    (FedDisco(), feddisco_by_hand),
]


def apart(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).abs().max())


@pytest.mark.parametrize(
    ("strategy", "by_hand"), BY_HAND, ids=[type(one).__name__ for one, _ in BY_HAND]
)
def test_agrees_with_the_computation_by_hand(strategy, by_hand):
    states, kept = by_hand(strategy)
    found = train([strategy])
    cohorts = [record.cohort for record in found.runs[0].records]
    assert {len(one) for one in cohorts} == {2}
    assert len({tuple(one) for one in cohorts}) > 1, "the cohort must change"
    tolerance = 1e-10
    for state, truth in zip(found.states[0], states, strict=True):
        for name, expected in zip(NAMES, truth, strict=True):
            assert apart(state.served.params[name], expected) <= tolerance, name
    for group, clients in kept.items():
        assert clients
        for client, weights in clients.items():
            own = part(group, memory_of(found.runs[0], client))
            for name, expected in zip(NAMES[-len(weights) :], weights, strict=True):
                assert apart(own[name], expected) <= tolerance, (group, client, name)


def test_every_method_changes_the_weights():
    """Or the comparisons above would hold for federated averaging as well."""
    named = [one for one, _ in BY_HAND]
    found = train([STRATEGIES.get("fedavg")(), *named])
    first, *others = (states[-1].served.params for states in found.states)
    same = [
        type(strategy).__name__
        for strategy, params in zip(named, others, strict=True)
        if max(apart(params[name], first[name]) for name in NAMES) < 1e-4
    ]
    assert same == ["Ditto"], "whose shared model is that of federated averaging"


# Engines.


@pytest.mark.parametrize("engine", [name for name in ENGINES.names() if name != "reference"])
def test_every_engine_gives_the_reference_engines_models(engine):
    strategies = [one for one, _ in BY_HAND]
    truth, found = (train(strategies, name, rounds=2) for name in ("reference", engine))
    check_same(found, truth)
    if engine == "stacked":
        reasons = {"phases of training", "personal models"}
        assert found.notices
        for notice in found.notices:
            assert any(f"({reason})" in notice for reason in reasons), notice
    elif engine == "processes":
        assert not found.notices


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_every_engine_with_batch_norm(engine):
    generator = torch.Generator().manual_seed(2)
    federation = Federation.from_clients(
        [
            (
                torch.randn(size, 3, 35, 16, generator=generator),
                torch.randint(CLASSES, (size,), generator=generator),
            )
            for size in (6, 9, 11)
        ],
        num_classes=CLASSES,
    )
    model = build_model(CNN4Options(channels=4, batch_norm=True), (3, 35, 16), CLASSES, 5).double()
    strategies = [Moon(), FedNTD(), FedDecorr(), FedProtoTan(), FedPer(), Ditto(), FedRoD()]
    truth, found = (
        train(strategies, name, federation=federation, model=model, rounds=2, epochs=2, lr=0.05)
        for name in ("reference", engine)
    )
    check_same(found, truth)


def check_same(found: Sweep, truth: Sweep) -> None:
    for ours, theirs, run, other in zip(
        found.states, truth.states, found.runs, truth.runs, strict=True
    ):
        name = type(run.config.strategy).__name__
        assert [one.attention for one in run.records] == [
            pytest.approx(one.attention, abs=1e-9) for one in other.records
        ]
        for state, wanted in zip(ours, theirs, strict=True):
            check_close(state.params, wanted.params, name)
            check_close(state.served.params, wanted.served.params, name)
            check_close(state.buffers, wanted.buffers, name)
            check_close(state.memory, wanted.memory, name)
        assert run.last_round == other.last_round
        for client in run.last_round:
            check_close(memory_of(run, client), memory_of(other, client), name)


def check_close(found: dict[str, Tensor], truth: dict[str, Tensor], what: str) -> None:
    assert found.keys() == truth.keys(), what
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype, (what, name)
        assert apart(found[name].double(), tensor.double()) <= 1e-9, (what, name)


# What is sent, and what is refused.


def test_personal_parameters_are_never_sent():
    names = {
        FedPer(): {"0.weight", "0.bias"},
        FedRep(): {"0.weight", "0.bias"},
        FedProtoTan(weights="personal"): set(),
        FedPer(layers="0.*"): {"2.weight", "2.bias"},
    }
    found = train(list(names), rounds=2)
    for run, sent in zip(found.runs, names.values(), strict=True):
        numbers = sum(run.state.params[name].numel() for name in sent)
        if isinstance(run.config.strategy, FedProtoTan):
            numbers += CLASSES * (CHANNELS + 1)
        assert run.records[-1].bytes_up == 8 * numbers * 2


class Unknown(nn.Module):
    """Logits that are not the output of a layer with a row per class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2 * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.layer(x).chunk(2, dim=1)
        return one * two


@pytest.mark.parametrize("strategy", [FedPer(), FedRep(), FedBABU(), FedRoD()])
def test_models_with_an_unknown_head_are_refused(strategy):
    torch.manual_seed(0)
    with pytest.raises(TrainingError, match=f"{type(strategy).__name__} needs a model whose last"):
        train([strategy], model=Unknown().double())


def test_a_pattern_can_name_personal_parameters_where_the_head_is_unknown():
    torch.manual_seed(0)
    train([FedPer(layers="layer.bias")], model=Unknown().double(), rounds=2)
    with pytest.raises(TrainingError, match=r"'fc\*' matches no parameter.*layer.weight"):
        train([FedPer(layers="fc*")], model=Unknown().double())


def test_fedrep_needs_an_epoch_for_the_body():
    with pytest.raises(ConfigError, match=r"FedRep needs train\.epochs of at least 4, not 3"):
        train([FedRep(head_epochs=3)])


def test_feddisco_leaves_skewed_clients_a_weight():
    """As the authors' code: discrepancies are divided by their sum, so nine of ten still count."""
    single, balanced = math.log(CLASSES), 0.0
    updates = [
        ClientUpdate(
            client=number,
            num_examples=20,
            params={},
            buffers={},
            train_loss=None,
            epochs_done=1,
            steps=1,
            lr=0.1,
            payload={"classes/discrepancy": torch.tensor(apart, dtype=torch.float64)},
        )
        for number, apart in enumerate([balanced, *[single] * 9])
    ]
    weights = FedDisco().weigh(ServerState(1, {}, {}), updates).client.tolist()
    expected = [0.1 + 0.1, *[0.1 - 0.5 / 9 + 0.1] * 9]
    assert weights == pytest.approx([one / sum(expected) for one in expected], abs=1e-12)
