"""Sections that combine with every strategy: the head by class, the served model, look-ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto import (
    STRATEGIES,
    ConfigError,
    FedAtt,
    FedAvg,
    FedBABU,
    FedPer,
    FedProto,
    FedProtoTan,
    FedRep,
    Scaffold,
    ServerOptions,
    Steady,
)
from fedproto.config import read_config
from fedproto.errors import TrainingError
from fedproto.rounds.aggregate import aggregate_round, combine_updates
from fedproto.strategies.base import Strategy
from fedproto.strategies.sections import (
    CLASSES,
    HeadOptions,
    Method,
    class_shares,
)
from fedproto.strategies.serve import (
    COUNT,
    PRODUCTS,
    SQUARES,
    SUM,
    ServeOptions,
    estimated_products,
    gaussian_head,
    mean_head,
    ridge_head,
    temperature,
)
from fedproto.strategies.values import Observation, Setting, initial_tensors
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState
from helpers import begin, config_of, job_of, same_tensors, train_runs

DOUBLE = torch.float64


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


PARAMS = {"body": tensor([1.0, 2.0]), "head.weight": tensor([[0.0, 0.0]] * 3)}
SETTING = Setting(PARAMS, 3, 10, (2, 1), head=("head.weight",), buffers={"mean": tensor([0.0])})


def update(client: int, head, body=(1.0, 2.0), samples: int = 10, **payload) -> ClientUpdate:
    return ClientUpdate(
        client,
        samples,
        {"body": tensor(body), "head.weight": tensor(head)},
        {"mean": tensor([float(client)])},
        None,
        1,
        steps=1,
        lr=0.1,
        payload=payload,
    )


def begun(method: Method, round_: int = 0) -> ServerState:
    memory = initial_tensors(method.server_memory(SETTING))
    return ServerState(round_, PARAMS, {"mean": tensor([0.0])}, memory)


def after(method: Method, state: ServerState, updates) -> ServerState:
    found = combine_updates(method, state, updates, SETTING)
    assert found is not None
    return found[0]


def test_rows_are_averaged_among_the_holders_of_a_class():
    method = Method(FedAvg(weights="uniform"), head=HeadOptions(rows="holders"))
    holds = {0: [1, 1, 0], 1: [0, 1, 0]}
    updates = [
        update(client, [[client + 1.0] * 2] * 3, **{CLASSES: torch.tensor(held)})
        for client, held in holds.items()
    ]
    head = after(method, begun(method), updates).params["head.weight"]
    # Class 0 is held by client 0 alone, class 1 by both, class 2 by nobody: its row stays.
    assert head.tolist() == [[1.0, 1.0], [1.5, 1.5], [0.0, 0.0]]


def test_rows_by_counts_weigh_holders_by_their_samples_of_the_class():
    method = Method(FedAvg(), head=HeadOptions(rows="counts"))
    counts = {0: [9, 1, 0], 1: [0, 3, 0]}
    updates = [
        update(client, [[client + 1.0] * 2] * 3, **{CLASSES: torch.tensor(held)})
        for client, held in counts.items()
    ]
    head = after(method, begun(method), updates).params["head.weight"]
    assert head[1].tolist() == pytest.approx([1.75, 1.75])


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=6),
    st.data(),
)
def test_class_shares_sum_to_one_where_a_class_is_held(counts, data):
    count_kc = torch.tensor(counts)
    weight_k = tensor([data.draw(st.floats(0, 1)) for _ in counts])
    share_kc = class_shares(weight_k.unsqueeze(1).expand(count_kc.shape), count_kc > 0)
    held_c = (count_kc > 0).any(dim=0)
    assert torch.allclose(share_kc.sum(dim=0), held_c.double())
    assert bool((share_kc[count_kc == 0] == 0).all())


@pytest.mark.parametrize("name", [one for one in STRATEGIES.names() if one != "centralized"])
def test_sections_go_with_every_strategy_or_are_refused_with_a_reason(name):
    strategy = STRATEGIES.get(name)()
    for section in ({"head": {"rows": "holders"}}, {"serve": {"head": "lda", "add": True}}):
        tables = {"strategy": name, **section}
        if "head" in section and strategy.weighs_tensors:
            with pytest.raises(ConfigError, match="tensor by tensor"):
                read_config(tables)
        else:
            assert len(read_config(tables).method._parts) > 1  # the strategy and the section


STATISTICS_OF_SERVED = {"average": "ema", "head": "lda"}


def test_sections_without_a_meaning_are_refused():
    for tables, words in (
        ({"strategy": "centralized", "head": {"rows": "holders"}}, "one model on all data"),
        ({"strategy": "centralized", "serve": {"head": "lda"}}, "one model on all data"),
        (
            {"strategy": "fedavg", "serve": {"head": "lda", "average": "window"}},
            "a model that clients get, which the average 'window' is not",
        ),
        (
            {"strategy": "fedproto", "serve": STATISTICS_OF_SERVED},
            "needs statistics under the received model",
        ),
        (
            {"strategy": "fedavg", "serve": {**STATISTICS_OF_SERVED, "also": ["head=lda"]}},
            "give heads in also the average",
        ),
        (
            {"strategy": "fedavg", "serve": {"also": ["average=ema head=lda"]}},
            "the received one or the average of the served head",
        ),
        (
            {"strategy": "fedavg", "server": {"optimizer": "adam", "lookahead": 0.8}},
            "a momentum of its own",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(tables)
    with pytest.raises(TrainingError, match=r"head.rows = 'holders' needs a model"):
        Method(FedAvg(), head=HeadOptions(rows="holders")).check(replace(SETTING, head=()))
    for strategy in (FedPer(), FedRep(), FedBABU(), FedProtoTan(weights="personal")):
        with pytest.raises(TrainingError, match="averages no last layer"):
            Method(strategy, head=HeadOptions(rows="holders")).check(SETTING)
        Method(strategy).check(SETTING)
    with pytest.raises(TrainingError, match="one dense layer of its features"):
        Method(FedAvg(), serve=ServeOptions(head="lda")).check(replace(SETTING, linear=False))


def test_defaults_of_a_strategy_yield_to_the_section():
    assert read_config({"strategy": "fedproto"}).partial_work
    assert not read_config({"strategy": "fedavg"}).partial_work
    given = {"strategy": "fedproto", "schedule": {"partial_work": False}}
    assert not read_config(given).partial_work


def test_look_ahead_by_hand():
    """FedACG: m ← λm + Δ, θ ← sent + Δ, next sent = θ + λm; θ is served."""
    method = Method(FedAvg(weights="uniform"), server=ServerOptions(lookahead=0.5))
    state, mean, sent = begun(method), 0.0, PARAMS["body"]
    for moved in (1.0, -0.5, 2.0):
        updates = [update(one, [[0.0] * 2] * 3, body=(sent + moved).tolist()) for one in range(2)]
        state = after(method, state, updates)
        mean = 0.5 * mean + moved
        theta = sent + moved
        assert torch.allclose(state.served.params["body"], theta)
        sent = theta + 0.5 * mean
        assert torch.allclose(state.params["body"], sent)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        # Rounds 1, 2, 3 with models 1, 2, 4: shares of the newest are 1, 1/2, 1/3.
        (ServeOptions(average="all", growth=0.0), [1 / 3, 1 / 3, 1 / 3]),
        (ServeOptions(average="ema", decay=0.9), [1 / 3, 1 / 3, 1 / 3]),
        (ServeOptions(average="ema", decay=0.5), [0.25, 0.25, 0.5]),
        (ServeOptions(average="window", window=2), [0.0, 0.5, 0.5]),
        (ServeOptions(average="all", growth=1.0), [1 / 6, 2 / 6, 3 / 6]),
    ],
)
def test_averages_over_rounds_by_hand(options, weights):
    method, plain = Method(FedAvg(), serve=options), Method(FedAvg())
    state, trained = begun(method), begun(plain)
    models = (1.0, 2.0, 4.0)
    for value in models:
        updates = [update(one, [[value] * 2] * 3) for one in range(2)]
        state, trained = after(method, state, updates), after(plain, trained, updates)
        assert torch.equal(state.params["head.weight"], trained.params["head.weight"])
    expected = sum(weight * value for weight, value in zip(weights, models, strict=True))
    assert float(state.served.params["head.weight"][0, 0]) == pytest.approx(expected)
    assert float(state.served.buffers["mean"]) == pytest.approx(0.5)
    assert trained.served is trained


def labelled(seed: int, number: int = 200, classes: int = 3, channels: int = 2):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, number)
    means = rng.normal(size=(classes, channels)) * 3
    return means[labels] + rng.normal(size=(number, channels)) @ rng.normal(
        size=(channels, channels)
    ), labels


def statistics(features, labels) -> Observation:
    return Observation.of(
        frozenset({"features", "products"}),
        torch.from_numpy(features),
        torch.from_numpy(labels),
        3,
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_gaussian_head_predicts_as_discriminant_analysis_does(seed):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    features, labels = labelled(seed)
    seen = statistics(features, labels)
    weight, bias = gaussian_head(seen.count.double(), seen.sum, seen.products)
    ours = (torch.from_numpy(features) @ weight.t() + bias).argmax(dim=1).numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(features, labels).predict(features)
    assert (ours == theirs).mean() > 0.98


@pytest.mark.parametrize("seed", range(3))
def test_the_ridge_head_is_ridge_regression(seed):
    from sklearn.linear_model import Ridge

    features, labels = labelled(seed)
    seen = statistics(features, labels)
    weight, _ = ridge_head(seen.count.double(), seen.sum, seen.products, 0.01)
    penalty = 0.01 * float(seen.products.diagonal().mean())
    fitted = Ridge(alpha=penalty, fit_intercept=False).fit(features, np.eye(3)[labels]).coef_
    norm = np.linalg.norm(fitted, axis=1, keepdims=True)
    assert np.allclose(weight.numpy(), fitted / norm, atol=1e-10), "rows have norm one"


def test_products_estimated_from_class_means_by_hand():
    """Class 0: means 1 and 3 of two samples each; class 1: one client; class 2: nobody."""
    clients = Prototypes(
        torch.tensor([[[2.0], [8.0], [0.0]], [[6.0], [0.0], [0.0]]], dtype=torch.float64),
        torch.tensor([[2, 4, 0], [2, 0, 0]]),
    )
    # Σ_0 = (2·1 + 2·1) / (2 − 1) = 4, of one client no spread is known; the overall mean is 2
    found = estimated_products(clients, shrink=0.1)
    assert found.item() == pytest.approx(3 * (4 + 0.1) + 3 * (0 + 0.1) + 8 * 2**2)


def test_products_estimated_from_the_means_of_many_clients_are_those_within_classes():
    rng = np.random.default_rng(0)
    spread = np.array([[1.0, 0.6], [0.0, 0.5]])
    features = rng.normal(size=(2000, 30, 2)) @ spread + 3.0
    clients = Prototypes(
        torch.from_numpy(features.sum(axis=1)).unsqueeze(1), torch.full((2000, 1), 30)
    )
    found = estimated_products(clients, shrink=1e-9) / 60_000
    assert np.allclose(found, spread.T @ spread + 9.0, atol=0.1)


def test_the_gaussian_head_is_what_calibration_with_virtual_features_tends_to():
    """CCVR fits the head on features drawn from Gaussians; with one covariance that is LDA."""
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    means = np.array([[0.0, 0.0], [2.0, 0.5], [0.5, 2.0]])
    labels = np.repeat(np.arange(3), 20_000)
    features = means[labels] + rng.normal(size=(60_000, 2)) @ np.array([[1.0, 0.4], [0.0, 0.7]])
    seen = statistics(features, labels)
    weight, bias = gaussian_head(seen.count.double(), seen.sum, seen.products)
    fitted = LogisticRegression(C=np.inf).fit(features, labels)
    for ours, theirs in ((weight.numpy(), fitted.coef_), (bias.numpy(), fitted.intercept_)):
        # Softmax takes no notice of what is added to all classes.
        assert np.allclose(ours - ours.mean(axis=0), theirs - theirs.mean(axis=0), atol=0.1)


def reported(client: int, seed: int, *, diagonal: bool = False, body=(1.0, 2.0), head=0.0):
    """An update with the statistics of random features, and what they were taken of."""
    features, labels = labelled(seed)
    seen = statistics(features, labels)
    upper = seen.products[torch.triu(torch.ones(2, 2, dtype=torch.bool))]
    payload = {SQUARES: seen.products.diagonal()} if diagonal else {PRODUCTS: upper}
    payload |= {SUM: seen.sum, COUNT: seen.count}
    return update(client, [[head] * 2] * 3, body=body, **payload), features, labels


def test_from_squares_alone_features_do_not_correlate_within_classes():
    options = ServeOptions(head="lda", covariance="diagonal", forget=1.0)
    method = Method(FedAvg(), serve=options)
    (one, features, labels), (other, more, others) = (
        reported(client, client, diagonal=True) for client in range(2)
    )
    served = after(method, begun(method), [one, other]).served.params["head.weight"]
    features, labels = np.concatenate([features, more]), np.concatenate([labels, others])
    means = np.stack([features[labels == c].mean(axis=0) for c in range(3)])
    within = np.diag(((features - means[labels]) ** 2).sum(axis=0))
    product = within + sum((labels == c).sum() * np.outer(means[c], means[c]) for c in range(3))
    seen = statistics(features, labels)
    weight, bias = gaussian_head(seen.count.double(), seen.sum, torch.from_numpy(product))
    factor = temperature(weight, torch.zeros_like(bias), seen.count.double(), seen.sum)
    assert torch.allclose(served, factor * weight, rtol=1e-9)
    declared = method.payload(SETTING, 10)
    assert declared[SQUARES].shape == (2,)
    assert PRODUCTS not in declared


def test_a_head_for_the_average_sits_on_the_average_that_clients_saw():
    options = ServeOptions(average="ema", decay=0.5, head="lda", forget=1.0)
    method = Method(FedAvg(weights="uniform"), serve=options)
    state, bodies = begun(method), []
    for round_, moved in enumerate((3.0, 5.0, 9.0)):
        sent = method.broadcast(state, SETTING)
        seen = options.observed(state, sent)
        updates = [
            reported(client, 2 * round_ + client, body=(moved, moved))[0] for client in range(2)
        ]
        # The received model, as there is no average yet; then 3; then the mean of 3 and 5.
        average = (PARAMS["body"], tensor([3.0, 3.0]), tensor([4.0, 4.0]))[round_]
        assert torch.equal(seen.params["body"], average)
        state = after(method, state, updates)
        assert torch.equal(state.served.params["body"], seen.params["body"])
        assert torch.equal(state.params["body"], tensor([moved, moved]))
        bodies.append(state.served.params["head.weight"])
        own = Method(FedAvg(weights="uniform"), serve=ServeOptions(head="lda", forget=1.0))
        alone = after(own, begun(own), updates).served.params["head.weight"]
        assert torch.allclose(bodies[-1], alone)
    assert not torch.allclose(bodies[0], bodies[1])


def test_the_average_counts_as_bytes_that_clients_receive(small_federation, small_model):
    plain = config_of(FedAvg(), rounds=2)
    sizes = []
    for serve in (
        ServeOptions(head="lda"),
        ServeOptions(average="ema", head="lda"),
    ):
        run = begin(replace(plain, serve=serve), small_model)
        train_runs([run], small_federation, small_model)
        sizes.append([one.bytes_down for one in run.records])
    assert sizes[1] == [2 * one for one in sizes[0]]


def test_the_mean_head_has_rows_of_norm_one():
    features, labels = labelled(1)
    seen = statistics(features, labels)
    count = seen.count.double().index_fill(0, torch.tensor([1]), 0)
    weight, bias = mean_head(count, seen.sum)
    assert weight.norm(dim=1).tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert bias.tolist() == [0.0, 0.0, 0.0]


def test_products_by_class_sum_to_the_pooled_ones():
    features, labels = labelled(2)
    pooled = statistics(features, labels).products
    by_class = Observation.of(
        frozenset({"features", "class_products"}),
        torch.from_numpy(features),
        torch.from_numpy(labels),
        3,
    ).products
    assert by_class.shape == (3, 2, 2)
    assert torch.allclose(by_class.sum(dim=0), pooled)
    own = torch.from_numpy(features[labels == 1])
    assert torch.allclose(by_class[1], own.t() @ own)


def told(features, labels) -> dict[str, torch.Tensor]:
    seen = statistics(features, labels)
    return ServeOptions(head="lda").report(None, {}, seen, None).payload


def served(options: ServeOptions, reports) -> ServerState:
    method = Method(FedAvg(), serve=options)
    updates = [update(one, [[5.0] * 2] * 3, **report) for one, report in enumerate(reports)]
    return after(method, begun(method), updates)


def test_the_served_head_belongs_to_the_received_model_and_training_goes_on():
    features, labels = labelled(3)
    report = told(features, labels)
    state = served(ServeOptions(head="lda"), [report, report])
    assert state.params["head.weight"].tolist() == [[5.0, 5.0]] * 3
    assert torch.equal(state.served.params["body"], PARAMS["body"])
    assert not torch.equal(state.served.params["head.weight"], PARAMS["head.weight"])
    assert state.memory[COUNT].sum() == 400


@pytest.mark.parametrize(
    ("round_", "fade", "share"), [(0, 2.0, 1.0), (2, 2.0, 0.5), (6, 2.0, 0.25), (6, 0.0, 1.0)]
)
def test_a_computed_head_is_added_to_the_trained_one_and_fades(round_, fade, share):
    features, labels = labelled(3)
    trained = tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.0]])
    method = Method(FedAvg(), serve=ServeOptions(head="lda", add=True, fade=fade))
    state = replace(begun(method, round_), params={**PARAMS, "head.weight": trained})
    reports = [update(0, [[5.0] * 2] * 3, **told(features, labels))]
    found = after(method, state, reports).served.params["head.weight"]
    seen = statistics(features, labels)
    count = seen.count.double()
    both = share * gaussian_head(count, seen.sum, seen.products)[0] + trained
    factor = temperature(both, torch.zeros(3, dtype=DOUBLE), count, seen.sum)
    assert torch.allclose(found, factor * both, rtol=1e-9)


@dataclass(frozen=True)
class Weighs(Strategy):
    """Gives weights of any kind."""

    kind: str = "two"

    def weigh(self, state, updates):
        del state
        number = len(updates)
        return {
            "list": [1 / number] * number,
            "short": ClientWeights(torch.ones(1, dtype=DOUBLE)),
            "number": ClientWeights(tensor(1.0)),
            "two": ClientWeights(torch.full((number,), 2 / number, dtype=DOUBLE)),
            "two for a tensor": ClientWeights(
                torch.full((number,), 1 / number, dtype=DOUBLE),
                {"body": torch.full((number,), 2 / number, dtype=DOUBLE)},
            ),
            "two for a row": ClientWeights(
                torch.full((number,), 1 / number, dtype=DOUBLE),
                {"head.weight": tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]])},
            ),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("list", r"Weighs.weigh\(\) must return ClientWeights\(weights\), not a list"),
        ("short", "one weight per update, 2 here"),
        ("number", "one weight per update, 2 here"),
        ("two", "sum to 1; these sum to 2"),
        ("two for a tensor", "sum to 1; these sum to 2"),
        ("two for a row", "sum to 1; these sum to 2"),
    ],
)
def test_weights_that_are_no_weights_are_a_clear_error(kind, words):
    updates = [update(one, [[0.0] * 2] * 3) for one in range(2)]
    method = Method(Weighs(kind))
    with pytest.raises(TrainingError, match=words):
        combine_updates(method, begun(method), updates, SETTING)


def test_the_order_of_updates_does_not_matter():
    method = Method(FedProto())
    state = begun(method)
    results = []
    for client in range(4):
        counts = torch.tensor([client + 1, 0, 2])
        payload = {
            "prototypes/sum": counts.unsqueeze(1) * torch.rand(3, 2, dtype=DOUBLE),
            "prototypes/count": counts,
            "margins/local": torch.where(counts > 0, 0.1 * client, 0.0).double(),
        }
        one = update(client, [[float(client)] * 2] * 3, samples=20, **payload)
        results.append((job_of(method, state, client, 20), one))
    found = aggregate_round(method, state, results, SETTING)
    again = aggregate_round(method, state, results[::-1], SETTING)
    assert found.failures == {}
    assert found.attention == again.attention
    assert torch.equal(found.state.params["head.weight"], again.state.params["head.weight"])


def test_needs_are_values_that_say_which_hooks_a_strategy_has():
    assert FedAvg().needs.hooks == frozenset()
    assert Scaffold().needs.hooks == {"objective", "report"}
    assert FedAtt().needs.hooks == frozenset()
    assert FedProto().needs.before == {"features"}
    method = Method(FedAvg(), head=HeadOptions(rows="holders"), serve=ServeOptions(head="lda"))
    assert method.needs.classes
    assert method.needs.before == {"features", "products"}


def test_steady_is_made_of_sections_and_yields_to_them(small_federation, small_model):
    short = config_of(Steady(), rounds=3, seed=3)
    written = replace(
        config_of(FedAvg(weights="uniform"), rounds=3, seed=3, partial_work=True),
        server=ServerOptions(lookahead=0.7),
        serve=ServeOptions(average="ema"),
    )
    plain = replace(short, serve=ServeOptions(average="none"))
    runs = [begin(one, small_model) for one in (short, written, plain)]
    train_runs(runs, small_federation, small_model)
    assert same_tensors(runs[0].state.params, runs[1].state.params)
    assert same_tensors(runs[0].state.served.params, runs[1].state.served.params)
    assert same_tensors(runs[0].state.params, runs[2].state.params)
    assert not same_tensors(runs[0].state.served.params, runs[2].state.served.params)
    head = replace(short, serve=ServeOptions(head="lda"))
    assert head.method.serve.average is None
    assert short.method.serve.text == "average=ema"
