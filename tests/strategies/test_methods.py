"""The field's methods: numbers worked by hand, and what they reduce to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedproto import (
    ConfigError,
    FedAvg,
    FedDisco,
    FedDyn,
    FedNova,
    FedProx,
    Scaffold,
    ServerOptions,
)
from fedproto.rounds import run_rounds
from fedproto.rounds.jobs import check_fits, plan_round, prepare
from fedproto.strategies.values import Local, Setting
from fedproto.types import ClientUpdate, ServerState
from helpers import aggregated, begin, config_of, engine_for, same_tensors
from paper.baselines import FedLC, FedRS


def number(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def update(client: int, value: float, *, samples=1, steps=1, lr=0.1, **payload) -> ClientUpdate:
    sent = {name: torch.as_tensor(one, dtype=torch.float64) for name, one in payload.items()}
    return ClientUpdate(
        client, samples, {"w": number(value)}, {}, None, 1, steps=steps, lr=lr, payload=sent
    )


def local(received: float, *, steps=1, lr=0.1, classes=(), broadcast=None, memory=None) -> Local:
    return Local(
        num_examples=10,
        steps=steps,
        lr=lr,
        class_counts=torch.tensor(classes),
        params={"w": number(received)},
        broadcast=broadcast or {},
        memory=memory or {},
    )


SETTING = Setting({"w": number(0.0)}, num_classes=4, num_clients=8)


def combined(strategy, state, updates) -> float:
    result, _ = aggregated(strategy, state, updates, SETTING)
    return float(result.params["w"])


def test_scaffold_by_hand():
    control, own = {"control/w": number(0.5)}, {"control/w": number(-1.0)}
    job = local(3.0, steps=4, lr=0.25, broadcast=control, memory=own)
    # the local gradient is corrected by c − c_k = 1.5
    assert Scaffold().objective(job).linear["w"].tolist() == [1.5]
    report = Scaffold().report(job, {"w": number(1.0)}, None, None)
    # c_k⁺ = c_k − c + (w_t − w_k)/(steps·lr) = −1 − 0.5 + 2/1
    assert report.memory["control/w"].tolist() == [0.5]
    assert report.payload == {}
    state = ServerState(0, {"w": number(3.0)}, {}, control)
    updates = [update(0, 1.0, steps=4, lr=0.25), update(1, 2.0, steps=1, lr=0.25)]
    # Δ_0 = 2/1 − 0.5, as the client reckons, and Δ_1 = 1/0.25 − 0.5; c ← c + (1.5 + 3.5)/8
    kept = aggregated(Scaffold(), state, updates, SETTING)[0]
    assert kept.memory["control/w"].tolist() == [1.125]
    assert combined(Scaffold(), state, updates) == 1.5


def test_scaffold_keeps_its_control_without_a_step():
    control = {"control/w": number(0.5)}
    job = local(3.0, steps=0, broadcast=control, memory={"control/w": number(-1.0)})
    report = Scaffold().report(job, {"w": number(3.0)}, None, None)
    assert report.memory["control/w"].tolist() == [-1.0]
    state = ServerState(0, {"w": number(3.0)}, {}, control)
    assert Scaffold().adds(state, update(0, 3.0, steps=0), SETTING)["control/w"].tolist() == [0.0]


def test_feddyn_by_hand():
    strategy = FedDyn(alpha=0.5)
    job = local(1.0, memory={"slope/w": number(2.0)})
    objective = strategy.objective(job)
    assert (objective.proximal, objective.linear["w"].tolist()) == (0.5, [-2.0])
    # g_k ← g_k − α (w_k − w_t) = 2 − 0.5 · 3
    report = strategy.report(job, {"w": number(4.0)}, None, None)
    assert report.memory["slope/w"].tolist() == [0.5]
    assert report.payload == {}
    state = ServerState(0, {"w": number(1.0)}, {}, {"drift/w": number(0.2)})
    updates = [update(0, 4.0), update(1, 2.0)]
    # h ← 0.2 − 0.5/8 · (3 + 1) = −0.05; w = 3 − h/α = 3.1
    kept = aggregated(strategy, state, updates, SETTING)[0]
    assert float(kept.memory["drift/w"]) == pytest.approx(-0.05)
    assert combined(strategy, state, updates) == pytest.approx(3.1)


def test_fednova_by_hand():
    state = ServerState(0, {"w": number(1.0)}, {})
    updates = [update(0, 3.0, samples=3, steps=4), update(1, 2.0, samples=1, steps=2)]
    # τ_eff = 0.75·4 + 0.25·2 = 3.5; the way is 3.5 · (0.75·2/4 + 0.25·1/2) = 1.75
    assert combined(FedNova(), state, updates) == pytest.approx(2.75)


def test_fedrs_scales_absent_classes():
    objective = FedRS(scale=0.5).objective(local(0.0, classes=(3, 0, 1, 0)))
    assert objective.scale.tolist() == [1.0, 0.5, 1.0, 0.5]
    scores = torch.tensor([[2.0, 4.0, -1.0, 6.0]])
    assert objective.calibrate(scores).tolist() == [[2.0, 2.0, -1.0, 3.0]]


def test_fedlc_subtracts_a_margin_that_falls_with_frequency():
    objective = FedLC(tau=2.0).objective(local(0.0, classes=(16, 81, 0, 1)))
    found = objective.calibrate(torch.zeros(1, 4, dtype=torch.float64))[0]
    assert found[[0, 1, 3]].tolist() == pytest.approx([-1.0, -2 / 3, -2.0])
    assert float(found.softmax(dim=0)[2]) == 0.0
    assert not FedLC(tau=0.0).objective(local(0.0, classes=(1, 1, 1, 1))).calibrated


def test_feddisco_by_hand():
    classes = "classes/discrepancy"
    # shares (1, 0, 0, 0): KL(share ‖ uniform) = ln 4
    report = FedDisco().report(local(0.0, classes=(7, 0, 0, 0)), {}, None, None)
    assert float(report.payload[classes]) == pytest.approx(math.log(4))
    state = ServerState(0, {"w": number(0.0)}, {})
    updates = [
        update(0, 1.0, samples=3, **{classes: 0.8}),
        update(1, 1.0, samples=1, **{classes: 0.2}),
    ]
    # divergences are shares of their sum: 0.75 − 0.5·0.8 + 0.1 = 0.45, 0.25 − 0.5·0.2 + 0.1 = 0.25
    weights = FedDisco(a=0.5, b=0.1).weigh(state, updates).client
    assert weights.tolist() == pytest.approx([0.45 / 0.7, 0.25 / 0.7])
    assert FedDisco(a=5.0, b=0.0).weigh(state, updates).client.tolist() == [0.75, 0.25]


def rounds(strategy, federation, model, *, number=1, server=None, **options):
    """A run in float64."""
    options = {"delta": 0.0, "cohort": 6, "rounds": number} | options
    config = replace(config_of(strategy, **options), server=server or ServerOptions())
    model = model.double()
    run = begin(config, model)
    for _ in run_rounds([run], engine_for(federation, model, dtype="float64")):
        pass
    return run


def check_close(one, other):
    for name, tensor in other.state.params.items():
        torch.testing.assert_close(one.state.params[name], tensor, rtol=0, atol=1e-12)


def test_feddyn_begins_as_fedprox_with_a_step_of_two(small_federation, small_model):
    """With all clients in the cohort, equal weights and μ = α."""
    uniform = UniformProx(mu=0.7)
    double = ServerOptions(optimizer="sgd", lr=2.0)
    prox = rounds(uniform, small_federation, small_model, server=double)
    check_close(rounds(FedDyn(alpha=0.7), small_federation, small_model), prox)


class UniformProx(FedProx):
    def weigh(self, state, updates):
        return FedAvg(weights="uniform").weigh(state, updates)


def test_scaffold_begins_as_the_plain_mean(small_federation, small_model):
    fair = FedAvg(weights="uniform")
    options = {"delta": 0.5, "cohort": 4, "partial_work": True}
    one = rounds(Scaffold(), small_federation, small_model, **options)
    check_close(one, rounds(fair, small_federation, small_model, **options))
    two = rounds(Scaffold(), small_federation, small_model, number=2, **options)
    plain = rounds(fair, small_federation, small_model, number=2, **options)
    assert not same_tensors(two.state.params, plain.state.params)


def test_fednova_with_equal_steps_is_fedavg(small_federation, small_model):
    """One batch per client whatever its size: all make as many steps."""
    one = rounds(FedNova(), small_federation, small_model, number=3, batch_size=100)
    check_close(one, rounds(FedAvg(), small_federation, small_model, number=3, batch_size=100))


@pytest.mark.parametrize("strategy", [FedRS(scale=1.0), FedLC(tau=0.0)])
def test_calibration_of_nothing_is_fedavg(strategy, small_federation, small_model):
    one = rounds(strategy, small_federation, small_model, number=2)
    check_close(one, rounds(FedAvg(), small_federation, small_model, number=2))


def test_feddisco_without_discrepancy_is_fedavg(small_federation, small_model):
    one = rounds(FedDisco(a=0.0, b=0.0), small_federation, small_model, number=2)
    check_close(one, rounds(FedAvg(), small_federation, small_model, number=2))


def test_fedrs_of_scale_zero_leaves_absent_rows_alone(small_federation, small_model):
    """The last client of the federation holds class 2 alone."""
    run = begin(config_of(FedRS(scale=0.0), cohort=6, delta=0), small_model)
    engine = engine_for(small_federation, small_model)
    setting = prepare([run], engine)
    jobs = plan_round(run, small_federation, setting).jobs
    (update,) = engine.train([job for job in jobs if job.client == 5])
    before = run.state.params["classifier.weight"]
    moved = (update.params["classifier.weight"] - before).abs().sum(dim=1)
    assert moved[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("strategy", [Scaffold(), FedNova()])
@pytest.mark.parametrize("train", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_methods_for_plain_descent_refuse_other_rules(strategy, train, small_federation):
    with pytest.raises(ConfigError, match="assumes plain gradient descent"):
        check_fits(config_of(strategy, **train), small_federation)


def test_control_variates_sum_to_the_clients_mean(small_federation, small_model):
    """With everyone in the cohort c is the mean of the c_k after every round."""
    run = rounds(Scaffold(), small_federation, small_model, number=3)
    for name, server in run.state.memory.items():
        own = [run.memory.load(client, 2)[name] for client in range(6)]
        torch.testing.assert_close(torch.stack(own).mean(dim=0), server, rtol=0, atol=1e-12)
