"""What each strategy does, and identities between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

import fedproto
from fedproto import Centralized, FedAtt, FedAvg, FedProto, FedProx
from fedproto.equations import aggregate_margin, aggregate_prototypes
from fedproto.errors import ConfigError, TrainingError
from fedproto.rounds.jobs import prepare
from fedproto.rounds.loop import finish_round
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from fedproto.strategies.values import Batch, Local, Observation, Report
from fedproto.types import ClientUpdate, Prototypes, ServerState
from helpers import (
    aggregated,
    begin,
    config_of,
    engine_for,
    make_setting,
    make_state,
    make_update,
    planned,
    prototypes_of,
    same_tensors,
    train,
    train_runs,
)


def updates_of_sizes(*sizes: int) -> list[ClientUpdate]:
    return [make_update(client, size) for client, size in enumerate(sizes)]


def test_fedavg_weighs_by_size_or_all_alike():
    updates = updates_of_sizes(10, 30)
    assert FedAvg().weigh(make_state(), updates).client.tolist() == [0.25, 0.75]
    assert FedAvg(weights="uniform").weigh(make_state(), updates).client.tolist() == [0.5, 0.5]


def test_fedprox_penalty_is_half_mu_times_the_squared_distance():
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    received = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([1.0])}
    penalty = FedProx(mu=0.5).objective(None).closed_form(params, received)
    assert float(penalty) == pytest.approx(0.25 * (1 + 4 + 4))


def test_fedprox_without_mu_equals_fedavg_with_toleration(small_federation, small_model):
    prox = train(FedProx(mu=0), small_federation, small_model)
    avg = train(FedAvg(), small_federation, small_model, partial_work=True)
    assert same_tensors(prox.state.params, avg.state.params)
    assert [record.metrics for record in prox.records] == [record.metrics for record in avg.records]


def test_fedprox_stays_nearer_to_the_received_weights(small_federation, small_model):
    start = small_model.state_dict()

    def moved(mu: float) -> float:
        run = train(FedProx(mu=mu), small_federation, small_model, rounds=1)
        return sum(float((run.state.params[name] - start[name]).norm()) for name in start)

    assert moved(5.0) < moved(0.5) < moved(0.0)


def test_fedatt_weighs_each_tensor_by_softmax_of_distance():
    state = ServerState(0, {"w": torch.tensor([0.0, 0.0])}, {})
    updates = [
        ClientUpdate(0, 1, {"w": torch.tensor([3.0, 4.0])}, {}, 0.1, 1, 1, 0.1),
        ClientUpdate(1, 1, {"w": torch.tensor([0.0, 4.0])}, {}, 0.1, 1, 1, 0.1),
    ]
    strategy = FedAtt(epsilon=2.0)
    weights = strategy.weigh(state, updates)
    first = math.exp(5) / (math.exp(5) + math.exp(4))
    assert weights.tensor["w"].tolist() == pytest.approx([first, 1 - first])
    moved = aggregated(strategy, state, updates, make_setting())[0].params["w"]
    # w − ε Σ α_k (w − w_k), from w = 0
    assert moved.tolist() == pytest.approx([2 * first * 3, 2 * 4.0], rel=1e-5)


def test_fedatt_never_steps_batch_norm_statistics_beyond_the_average():
    state = ServerState(
        1, {"w": torch.zeros(1)}, {"running_var": torch.tensor([100.0]), "steps": torch.tensor(3)}
    )
    updates = [
        ClientUpdate(
            client,
            1,
            {"w": torch.ones(1)},
            {"running_var": torch.tensor([1.0]), "steps": torch.tensor(client)},
            0.1,
            1,
            steps=1,
            lr=0.1,
        )
        for client in range(2)
    ]
    strategy = FedAtt(epsilon=1.2)
    buffers = aggregated(strategy, state, updates, make_setting())[0].buffers
    assert buffers["running_var"].tolist() == [1.0]
    assert buffers["steps"].dtype == torch.int64
    assert int(buffers["steps"]) == 1


def test_fedproto_weighs_by_size_at_round_0():
    weights = FedProto().weigh(make_state(round_=0), updates_of_sizes(10, 30, 60))
    assert weights.client.tolist() == pytest.approx([0.1, 0.3, 0.6])


def test_fedproto_attention_by_hand():
    updates = [make_update(client) for client in range(2)]
    state = make_state()

    def attention(sums: list[float]) -> torch.Tensor:
        v = torch.tensor([1 / (1 + math.exp(-total)) for total in sums], dtype=torch.float64)
        return v / v.sum()

    local = attention([float(update.payload[MARGIN].sum()) for update in updates])
    aggregate = attention(
        [
            float(
                aggregate_margin(
                    Prototypes(update.payload[SUM].double(), update.payload[COUNT]),
                    prototypes_of(state),
                ).sum()
            )
            for update in updates
        ]
    )
    expected = {"local": local, "aggregate": aggregate, "both": (local + aggregate) / 2}
    for margins, weights in expected.items():
        weighed = FedProto(margins=margins).weigh(state, updates).client
        torch.testing.assert_close(weighed, weights, rtol=1e-6, atol=1e-9)


def test_fedproto_same_class_distance_prefers_prototypes_that_moved():
    still, moved = make_update(0), make_update(0)
    known = aggregate_prototypes([prototypes_of(still)])
    memory = {SUM: known.sum, COUNT: known.count}
    state = ServerState(1, still.params, still.buffers, memory)
    turned = moved.payload | {SUM: moved.payload[SUM].flip(-1)}
    moved = replace(moved, client=1, payload=turned)
    strategy = FedProto(measure="same-class-distance", margins="aggregate")
    weights = strategy.weigh(state, [still, moved]).client
    assert weights[1] > weights[0]
    before, after = (Observation(one.payload[SUM], one.payload[COUNT]) for one in (still, moved))
    local = Local(10, 1, 0.1, torch.tensor([5, 5]), {}, {}, {})
    assert (strategy.report(local, {}, before, after).payload[MARGIN] > 0).all()


def test_equal_margins_give_uniform_attention():
    update = make_update(0)
    same = [ClientUpdate(**(vars(update) | {"client": client})) for client in range(4)]
    weights = FedProto().weigh(make_state(), same).client
    assert weights.tolist() == pytest.approx([0.25] * 4)


def test_fedproto_keeps_the_aggregate_prototypes_of_the_round():
    updates = updates_of_sizes(10, 30)
    state, _ = aggregated(FedProto(), make_state(), updates, make_setting())
    expected = aggregate_prototypes([prototypes_of(update) for update in updates])
    torch.testing.assert_close(prototypes_of(state).mean.float(), expected.mean)


def test_fedproto_carries_unseen_prototypes_only_when_asked():
    old = make_state(counts=(5, 5))
    updates = [make_update(client, counts=(5, 0)) for client in range(2)]

    def kept(strategy):
        return prototypes_of(replace(old, memory=strategy.remember(old, updates, make_setting())))

    assert kept(FedProto()).seen.tolist() == [True, False]
    carried = kept(FedProto(carry_unseen_prototypes=True))
    assert carried.seen.tolist() == [True, True]
    torch.testing.assert_close(carried.mean[1], prototypes_of(old).mean[1])


def test_fedproto_says_that_it_needs_features():
    with pytest.raises(TrainingError, match="shape of the model's features"):
        FedProto().payload(replace(make_setting(), features=None), 10)


@pytest.mark.parametrize("strategy", [FedAvg(), FedProx(), FedProto(), FedAtt(epsilon=1.0)])
def test_one_client_returns_its_own_weights(strategy, small_federation, small_model):
    run = begin(config_of(strategy, cohort=1, delta=0), small_model)
    engine = engine_for(small_federation, small_model)
    setting = prepare([run], engine)
    plan = planned(run, small_federation)
    (update,) = engine.train(plan.jobs)
    closed = finish_round(run, plan, [update], setting)
    assert same_tensors(closed.state.params, update.params)
    assert closed.attention == {update.client: 1.0}


def test_fedproto_differs_from_uniform_only_by_its_attention(small_federation, small_model):
    fedproto = train(FedProto(), small_federation, small_model, rounds=4)
    fair = train(
        FedAvg(weights="uniform"),
        small_federation,
        small_model,
        rounds=4,
        partial_work=True,
    )
    for ours, theirs in zip(fedproto.records, fair.records, strict=True):
        assert (ours.cohort, ours.epochs) == (theirs.cohort, theirs.epochs)
    later = fedproto.records[-1].attention
    assert later != fair.records[-1].attention
    assert sum(later.values()) == pytest.approx(1)


def test_centralized_makes_the_cohorts_number_of_steps(small_federation, small_model, monkeypatch):
    config = config_of(Centralized(), rounds=1, cohort=3)
    run = begin(config, small_model)
    steps = []
    original = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *a, **k: (steps.append(1), original(self, *a, **k))[1]
    )
    train_runs([run], small_federation, small_model)
    central = len(steps)
    steps.clear()
    train(FedAvg(), small_federation, small_model, rounds=1, cohort=3, delta=0)
    assert central == len(steps) > 0
    assert run.records[0].bytes_up == run.records[0].bytes_down == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedProx(mu=-1), "mu must be at least 0, not -1"),
        (lambda: FedAtt(epsilon=0), "epsilon must be above 0, not 0"),
        (lambda: FedAvg(weights="biggest"), "weights must be one of 'size', 'uniform'"),
        (lambda: FedProto(carry_unseen_prototypes=1), "must be true or false, not 1"),
    ],
)
def test_impossible_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@dataclass(frozen=True)
class CountsInTheReport(FedAvg):
    """Reads the client's class counts, and does not say so."""

    def report(self, local: Local, *_) -> Report:
        return Report({"seen": local.classes})


@dataclass(frozen=True)
class CountsInTheTerm(FedAvg):
    """The same in its term of the loss, which engines run in different ways."""

    def batch_term(self, local: Local, batch: Batch) -> torch.Tensor:
        return (batch.logits * local.classes).mean()


@pytest.mark.parametrize("engine", ["reference", "processes", "stacked"])
@pytest.mark.parametrize("strategy", [CountsInTheReport(), CountsInTheTerm()])
def test_a_strategy_is_told_to_declare_what_it_reads(strategy, engine):
    data = fedproto.load_data("digits", clients=3)
    with pytest.raises(TrainingError, match=r"needs a strategy's statistics = Needs\(classes=True"):
        fedproto.run(
            data, "mlp", strategy, rounds=1, cohort=2, engine={"name": engine, "device": "cpu"}
        )
