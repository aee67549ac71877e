"""The server's optimizers, by hand and by identity, with any strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedproto import STRATEGIES, ConfigError, FedAvg, ServerOptions
from fedproto.rounds import run_rounds
from fedproto.strategies.sections import MOMENTUM, SQUARE
from fedproto.strategies.values import Setting, initial_tensors
from fedproto.types import ServerState
from helpers import begin, config_of, engine_for, every_strategy, same_tensors, strategy_name


def steps(options: ServerOptions, targets: list[float], start: float = 1.0) -> list[float]:
    """Where a single weight goes when clients agree on these targets, one after another."""
    weight = {"w": torch.tensor([start], dtype=torch.float64)}
    memory = initial_tensors(options.server_memory(Setting(weight, 2, 5)))
    state, values = ServerState(0, weight, {}, memory), []
    for target in targets:
        wanted = {"w": torch.tensor([target], dtype=torch.float64)}
        combined = ServerState(state.round + 1, wanted, {}, state.memory)
        state = options.step(state, combined)
        values.append(float(state.params["w"]))
    return values


def test_none_takes_the_combined_weights():
    assert steps(ServerOptions(), [0.25, 4.0]) == [0.25, 4.0]


def test_sgd_goes_a_share_of_the_way():
    assert steps(ServerOptions(optimizer="sgd", lr=0.5), [0.0, 1.5]) == [0.5, 1.0]


def test_fedavgm_by_hand():
    # g = 1 − 0 = 1, m = 1, w = 1 − 0.5; then g = 0.5 − 0 = 0.5, m = 0.9 + 0.5 = 1.4, w = −0.2
    options = ServerOptions(optimizer="sgd", lr=0.5, momentum=0.9)
    assert steps(options, [0.0, 0.0]) == pytest.approx([0.5, -0.2])


def test_adam_by_hand():
    """One step from g = 1: m = 0.4, no correction of the start."""
    second = 0.75 * 0.01 + 0.25 * 1.0
    options = ServerOptions(optimizer="adam", lr=0.1, beta1=0.6, beta2=0.75, tau=0.1)
    (found,) = steps(options, [0.0])
    assert found == pytest.approx(1.0 - 0.1 * 0.4 / (second**0.5 + 0.1))


def test_memory_begins_as_the_paper_has_it():
    setting = Setting({"w": torch.zeros(2)}, 2, 5)
    memory = initial_tensors(ServerOptions(optimizer="adam", tau=0.1).server_memory(setting))
    assert memory[f"{MOMENTUM}/w"].tolist() == [0.0, 0.0]
    assert memory[f"{SQUARE}/w"].tolist() == pytest.approx([0.01, 0.01])
    assert ServerOptions(optimizer="sgd").server_memory(setting) == {}


def run_with(strategy, federation, model, **sections):
    config = replace(config_of(strategy, rounds=4), **sections)
    run = begin(config, model)
    for _ in run_rounds([run], engine_for(federation, model)):
        pass
    return run


@pytest.mark.parametrize("strategy", every_strategy(), ids=strategy_name)
def test_sgd_at_rate_one_is_none_bit_for_bit(strategy, small_federation, small_model):
    plain = run_with(strategy, small_federation, small_model)
    stepped = run_with(
        strategy, small_federation, small_model, server=ServerOptions(optimizer="sgd", lr=1.0)
    )
    assert same_tensors(plain.state.params, stepped.state.params)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["fedavg", "fedproto", "scaffold", "feddyn", "fedatt"])
def test_every_optimizer_works_with_strategies_of_all_kinds(
    name, optimizer, small_federation, small_model
):
    options = ServerOptions(optimizer=optimizer, lr=0.05, momentum=0.5)
    run = run_with(STRATEGIES.get(name)(), small_federation, small_model, server=options)
    assert any(key.startswith("server/") for key in run.state.memory)
    assert all(bool(torch.isfinite(one).all()) for one in run.state.params.values())
    assert not same_tensors(
        run.state.params,
        run_with(STRATEGIES.get(name)(), small_federation, small_model).state.params,
    )


def test_buffers_are_never_stepped():
    old = ServerState(0, {"w": torch.zeros(1)}, {"running_var": torch.tensor([4.0])})
    combined = ServerState(1, {"w": torch.ones(1)}, {"running_var": torch.tensor([1.0])})
    stepped = ServerOptions(optimizer="sgd", lr=3.0).step(old, combined)
    assert stepped.params["w"].tolist() == [3.0]
    assert stepped.buffers["running_var"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "rmsprop"}, "optimizer must be one of"),
        ({"lr": 0}, "lr must be above 0"),
        ({"momentum": 1.5}, "momentum must be at least 0 and at most 1"),
        ({"tau": 0.0}, "tau must be above 0"),
    ],
)
def test_impossible_options_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**given)


def test_fedavg_and_momentum_go_on_where_plain_averaging_stops():
    """A cohort that stands still: momentum carries the model on, memory is what does it."""
    options = ServerOptions(optimizer="sgd", lr=1.0, momentum=0.5)
    first, second = steps(options, [0.0, 0.0])
    assert (first, second) == (0.0, -0.5)
    assert FedAvg().server_memory(Setting({}, 2, 5)) == {}
