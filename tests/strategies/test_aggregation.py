"""Rules of aggregation: by hand, by identity, by property, and against a hostile client."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto import (
    AggregateOptions,
    Centralized,
    ConfigError,
    FedAvg,
    FedNova,
    FedProto,
)
from fedproto.config import RunConfig
from fedproto.config.options import CLIP
from fedproto.data.tasks import task_named
from fedproto.engines.base import Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.options import options_to_dict
from fedproto.rounds import Run, load_federations, run_rounds
from fedproto.rounds.run import model_for
from fedproto.strategies.aggregation import combine
from fedproto.strategies.feddyn import FedDyn
from fedproto.strategies.scaffold import Scaffold
from fedproto.types import ClientUpdate, ClientWeights, ServerState
from helpers import (
    aggregated,
    config_of,
    every_strategy,
    make_setting,
    make_state,
    make_update,
    same_tensors,
    state_for,
    strategy_name,
    update_for,
)

RULES = ["mean", "median"]


def update(client: int, value, num_examples: int = 1) -> ClientUpdate:
    params = {"w": torch.tensor(value, dtype=torch.float64)}
    return ClientUpdate(client, num_examples, params, {}, None, 1, 1, 0.1)


def combined(values, options, shares=None, scale=1.0, old=None):
    """The next weights and what each client counted."""
    updates = [update(client, value) for client, value in enumerate(values)]
    start = torch.zeros_like(updates[0].params["w"]) if old is None else torch.tensor(old).double()
    shares = [1 / len(values)] * len(values) if shares is None else shares
    weights = ClientWeights(torch.tensor(shares, dtype=torch.float64), scale=scale)
    state, counted = combine(options, ServerState(0, {"w": start}, {}), updates, weights)
    return state.params["w"].tolist(), counted.tolist()


@pytest.mark.parametrize(
    ("values", "shares", "expected"),
    [
        ([[1.0], [5.0], [2.0]], None, [2.0]),
        ([[1.0], [5.0], [2.0], [4.0]], None, [3.0]),
        ([[1.0, 9.0], [5.0, 8.0], [2.0, -7.0]], None, [2.0, 8.0]),
        ([[1.0], [5.0], [2.0]], [0.2, 0.6, 0.2], [5.0]),
        ([[1.0], [2.0]], [0.5, 0.5], [1.5]),
        ([[7.0]], [1.0], [7.0]),
    ],
)
def test_median_by_hand(values, shares, expected):
    assert combined(values, AggregateOptions(rule="median"), shares)[0] == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1.0, 0.5, torch.tensor([1.0, 0.5, 0.25]).double()])
def test_the_median_of_a_row_is_that_of_its_holders(scale):
    """Row 0 has two holders, row 1 one, row 2 none: that stays as it was."""
    rows = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]).double().T
    sent = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]).double()
    values = [[[3.0, 5.0]] * 3, [[9.0, 1.0]] * 3, [[-3.0, 7.0]] * 3]
    weights = ClientWeights(torch.full((3,), 1 / 3).double(), {"w": rows}, scale)
    state, _ = combine(
        AggregateOptions(rule="median"),
        ServerState(0, {"w": sent}, {}),
        [update(client, value) for client, value in enumerate(values)],
        weights,
    )
    first, last = (scale, scale) if isinstance(scale, float) else (1.0, 0.25)
    expected = [[1 + 2 * first, 1 + 4 * first], [1 - 4 * last, 1 + 6 * last], [1.0, 1.0]]
    assert state.params["w"].tolist() == expected


def test_clipping_shortens_ways_that_are_too_long():
    options = AggregateOptions(clip_norm=2.0)
    found, _ = combined([[1.0, 0.0], [0.0, 8.0]], options)
    assert found == pytest.approx([0.5, 1.0])
    found, _ = combined([[1.0], [2.0], [30.0]], AggregateOptions(clip_norm="median"))
    assert found == pytest.approx([(1 + 2 + 2) / 3])
    assert combined([[1.0], [2.0]], AggregateOptions(clip_norm=5.0))[0] == [1.5]


@pytest.mark.parametrize(("clients", "times"), [(3, 1.5), (5, 1.5), (8, 2.4), (10, 3.0), (20, 3.0)])
def test_the_default_defence_clips_by_the_size_of_the_cohort(clients, times):
    """Among equal updates, one of seven times their norm is clipped to `times` of it."""
    found, _ = combined([[7.0], *[[-1.0]] * (clients - 1)], CLIP)
    assert found == pytest.approx([(times - (clients - 1)) / clients])
    usual, _ = combined([[1.2], *[[1.0]] * (clients - 1)], CLIP)
    assert usual == pytest.approx([1 + 0.2 / clients])


def test_an_update_of_much_weight_is_clipped_as_a_longer_one():
    options = AggregateOptions(clip_norm="median")
    found, _ = combined([[2.0], [-1.0], [-1.0], [-1.0]], options, [0.7, 0.1, 0.1, 0.1])
    assert found == pytest.approx([1 / 4 - 0.3])


def test_clipping_measures_from_the_sent_weights():
    found, _ = combined([[12.0], [10.5]], AggregateOptions(clip_norm=1.0), old=[10.0])
    assert found == pytest.approx([(11.0 + 10.5) / 2])


@pytest.mark.parametrize("rule", RULES)
def test_a_single_client_is_taken_as_it_is(rule):
    assert combined([[3.0, -4.0]], AggregateOptions(rule=rule))[0] == [3.0, -4.0]


@pytest.mark.parametrize("strategy", every_strategy(), ids=strategy_name)
def test_a_bound_that_clips_nothing_leaves_the_mean(strategy):
    if strategy.pooled:
        return
    options = AggregateOptions(clip_norm=1e9)
    state = state_for(strategy)
    updates = [update_for(strategy, client, 5 + client) for client in range(5)]
    plain, shares = aggregated(strategy, state, updates, make_setting(), AggregateOptions())
    other, counted = aggregated(strategy, state, updates, make_setting(), options)
    for name, tensor in plain.params.items():
        torch.testing.assert_close(other.params[name], tensor, rtol=0, atol=1e-6)
        if tensor.dtype == torch.float64:
            torch.testing.assert_close(other.params[name], tensor, rtol=0, atol=1e-12)
    assert same_tensors(plain.buffers, other.buffers)
    for name, tensor in plain.memory.items():
        torch.testing.assert_close(other.memory[name], tensor, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(counted, shares)


points = st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=7)


@given(points, st.sampled_from(RULES), st.randoms())
def test_the_order_of_clients_does_not_matter_and_the_hull_is_kept(values, rule, random):
    options = AggregateOptions(rule=rule)
    found, _ = combined(values, options)
    for column, value in enumerate(found):
        own = [each[column] for each in values]
        assert min(own) - 1e-6 <= value <= max(own) + 1e-6
    shuffled = random.sample(values, len(values))
    assert combined(shuffled, options)[0] == pytest.approx(found, abs=1e-5)


@given(points)
def test_one_client_in_five_moves_the_median_no_further_than_the_others_lie(values):
    honest = [[value / 100 for value in each] for each in values[:4]]
    if len(honest) < 4:
        return
    for attack in ([1e6, -1e6, 1e6], [-1e9, 1e9, 0.0]):
        found, _ = combined([*honest, attack], AggregateOptions(rule="median"))
        for column, value in enumerate(found):
            own = [each[column] for each in honest]
            assert min(own) - 1e-6 <= value <= max(own) + 1e-6


def test_a_strategys_scale_is_part_of_what_a_rule_sees():
    """FedAtt's ε and FedNova's normalisation happen before the median."""
    options = AggregateOptions(rule="median")
    assert combined([[1.0], [2.0], [3.0]], options, scale=2.0)[0] == [4.0]
    scale = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64)
    assert combined([[1.0], [2.0], [3.0]], options, scale=scale)[0] == [3.0]
    updates = [replace(update(0, [1.0]), steps=1), replace(update(1, [4.0]), steps=4)]
    weights = FedNova(weights="uniform").weigh(ServerState(0, {}, {}), updates)
    assert weights.scale.tolist() == [2.5, 0.625]


def test_integer_buffers_and_types_stay():
    state, updates = make_state(), [make_update(client) for client in range(5)]
    for rule in RULES:
        result, _ = combine(
            AggregateOptions(rule=rule), state, updates, FedAvg().weigh(state, updates)
        )
        assert result.buffers["num_batches_tracked"].tolist() == 4
        assert result.params["bias"].dtype == torch.float64
        assert result.params["weight"].dtype == torch.float32


def test_a_variance_is_never_scaled_beyond_the_average():
    state = ServerState(0, {"w": torch.zeros(1)}, {"running_var": torch.tensor([1.0])})
    updates = [
        replace(update(client, [1.0]), params={"w": torch.ones(1)}, buffers={"running_var": one})
        for client, one in enumerate((torch.tensor([0.5]), torch.tensor([0.1])))
    ]
    weights = ClientWeights(torch.tensor([0.5, 0.5]).double(), scale=5.0)
    result, _ = combine(AggregateOptions(), state, updates, weights)
    assert result.params["w"].tolist() == [5.0]
    assert result.buffers["running_var"].tolist() == pytest.approx([0.3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "mode"}, "rule must be one of"),
        ({"clip_norm": 0}, "clip_norm must be above 0"),
        ({"clip_norm": "mean"}, "clip_norm must be"),
    ],
)
def test_impossible_options_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        AggregateOptions(**given)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (Centralized(), {"rule": "median"}, "nothing to combine"),
        (Centralized(), {"clip_norm": 1.0}, "nothing to combine"),
    ],
)
def test_a_rule_without_meaning_is_refused_with_the_reason(strategy, options, message):
    config = replace(config_of(strategy), aggregate=AggregateOptions(**options))
    with pytest.raises(ConfigError, match=message):
        _ = config.method


class Hostile(ReferenceEngine):
    """One client of every cohort sends its way times −10."""

    def train(self, jobs):
        results = super().train(jobs)
        liar = min(range(len(jobs)), key=lambda place: jobs[place].client)
        sent, honest = jobs[liar].state.params, results[liar].params
        turned = {name: sent[name] - 10 * (one - sent[name]) for name, one in honest.items()}
        results[liar] = replace(results[liar], params=turned)
        return results


def accuracy_on_digits(engine_class, **aggregate) -> float:
    """Mean accuracy of the last rounds of a short run with ten clients a round."""
    from fedproto.config import read_config

    config: RunConfig = read_config(
        {
            "data": {"name": "digits", "clients": 20, "classes_per_client": 8},
            "model": {"name": "mlp", "hidden": 32, "features": 16},
            "strategy": {"name": "fedavg", "weights": "uniform"},
            "train": {"epochs": 3, "batch_size": 10, "lr": 0.1},
            "schedule": {"rounds": 20, "cohort": 10, "delta": 0.0},
            "aggregate": aggregate,
            "engine": {"name": "reference", "device": "cpu"},
        }
    )
    federation = load_federations([config])[config.data]
    model, task = model_for(config, federation), task_named(federation.task)
    workload = Workload(federation, model, task, config.engine)
    run = Run(config, federation)
    scores = [record.metrics["accuracy"] for _, record in run_rounds([run], engine_class(workload))]
    return sum(scores[-5:]) / 5


def test_robust_rules_bear_a_hostile_client_in_ten_and_the_mean_does_not():
    honest = accuracy_on_digits(ReferenceEngine)
    assert honest > 0.8
    assert accuracy_on_digits(Hostile) < honest - 0.3
    for options in (
        {"rule": "median"},
        {"clip_norm": "median"},
        options_to_dict(CLIP),
    ):
        assert accuracy_on_digits(Hostile, **options) > honest - 0.06, options


BOUNDED = [
    AggregateOptions(clip_norm="median", clip_times=1.5),
    *(AggregateOptions(rule=rule) for rule in RULES if rule != "mean"),
]


@pytest.mark.parametrize("options", BOUNDED, ids=lambda one: f"{one.rule} {one.clip_norm}")
@pytest.mark.parametrize("strategy", [Scaffold(), FedDyn()], ids=strategy_name)
def test_what_feeds_the_servers_memory_is_bounded_as_the_weights_are(strategy, options):
    """One client in five tells a way a million times as long as it was, and made in one step."""
    state, setting = state_for(strategy), make_setting()
    honest = [update_for(strategy, client) for client in range(5)]
    liar = honest[0]
    far = {
        name: state.params[name] + 1e6 * (one - state.params[name])
        for name, one in liar.params.items()
    }
    hostile = [replace(liar, params=far, steps=1), *honest[1:]]

    def moved(updates, rule):
        after, _ = aggregated(strategy, state, updates, setting, rule)
        squares = [
            (after.memory[name] - old).double().square().sum() for name, old in state.memory.items()
        ]
        return float(torch.stack(squares).sum().sqrt())

    usual = moved(honest, AggregateOptions())
    assert moved(hostile, AggregateOptions()) > 1000 * usual
    assert moved(hostile, options) < 3 * usual


def test_prototypes_are_kept_under_every_rule():
    strategy = FedProto()
    state, updates = state_for(strategy), [update_for(strategy, one) for one in range(5)]
    for rule in RULES:
        result, _ = aggregated(
            strategy, state, updates, make_setting(), AggregateOptions(rule=rule)
        )
        assert result.memory.keys() == strategy.server_memory(make_setting()).keys()
