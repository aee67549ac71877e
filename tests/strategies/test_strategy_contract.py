"""What every registered strategy must fulfil; a new one is tested the day it is written."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fedproto.config import RunConfig, read_config
from fedproto.rounds import run_rounds
from helpers import (
    aggregated,
    begin,
    config_of,
    engine_for,
    every_strategy,
    make_setting,
    same_tensors,
    state_for,
    strategy_name,
    train,
    update_for,
)

pytestmark = pytest.mark.parametrize("strategy", every_strategy(), ids=strategy_name)


def check_weights(strategy, state, updates):
    weights = strategy.weigh(state, updates)
    for vector in (weights.client, *(weights.tensor or {}).values()):
        assert vector.shape == (len(updates),)
        assert torch.isfinite(vector).all()
        assert (vector >= 0).all()
        assert float(vector.sum()) == pytest.approx(1)
    return weights


def aggregate(strategy, state, updates):
    check_weights(strategy, state, updates)
    result, counted = aggregated(strategy, state, updates, make_setting())
    assert float(counted.sum()) == pytest.approx(1)
    return result


def test_weights_are_a_distribution(strategy):
    updates = [update_for(strategy, client, size) for client, size in enumerate((1, 10, 500))]
    for round_ in (0, 1):
        check_weights(strategy, state_for(strategy, round_), updates)


def test_the_next_state_has_the_same_names_shapes_and_dtypes(strategy):
    state = state_for(strategy)
    result = aggregate(strategy, state, [update_for(strategy, client) for client in range(3)])
    assert result.round == state.round + 1
    pairs = (
        (state.params, result.params),
        (state.buffers, result.buffers),
        (state.memory, result.memory),
    )
    # Memory that begins empty may be there afterwards.
    assert result.memory.keys() <= strategy.server_memory(make_setting()).keys()
    for old, new in pairs:
        assert old.keys() <= new.keys()
        for name in old:
            assert (new[name].shape, new[name].dtype) == (old[name].shape, old[name].dtype)


def test_inputs_are_not_mutated(strategy):
    state, updates = state_for(strategy), [update_for(strategy, client) for client in range(3)]
    kept = copy.deepcopy((state, updates))
    aggregate(strategy, state, updates)
    for update, before in zip(updates, kept[1], strict=True):
        assert same_tensors(update.params, before.params)
        assert same_tensors(update.buffers, before.buffers)
        assert same_tensors(update.payload, before.payload)
    assert same_tensors(state.params, kept[0].params)
    assert same_tensors(state.buffers, kept[0].buffers)
    assert same_tensors(state.memory, kept[0].memory)


def test_a_single_client_gets_all_the_weight(strategy):
    weights = check_weights(strategy, state_for(strategy), [update_for(strategy, 0)])
    assert weights.client.tolist() == [1.0]


def test_a_client_with_one_class(strategy):
    updates = [update_for(strategy, 0, counts=(5, 5)), update_for(strategy, 1, counts=(0, 5))]
    result = aggregate(strategy, state_for(strategy), updates)
    assert all(torch.isfinite(tensor).all() for tensor in result.params.values())


def test_a_client_with_no_finished_epoch(strategy):
    state = state_for(strategy)
    idle = replace(
        update_for(strategy, 1, epochs=0), params=state.params, buffers=state.buffers, steps=0
    )
    result = aggregate(strategy, state, [update_for(strategy, 0), idle])
    assert all(torch.isfinite(tensor).all() for tensor in result.params.values())


def test_the_order_of_updates_does_not_matter(strategy):
    state = state_for(strategy)
    updates = [update_for(strategy, client, 5 + client) for client in range(4)]
    forwards = aggregate(strategy, state, updates)
    backwards = aggregate(strategy, state, updates[::-1])
    for name, tensor in forwards.params.items():
        torch.testing.assert_close(backwards.params[name], tensor)


def test_deterministic_for_a_seed(strategy, small_federation, small_model):
    one = train(strategy, small_federation, small_model, seed=4)
    torch.rand(3)  # the global generator must play no part
    two = train(strategy, small_federation, small_model, seed=4)
    assert same_tensors(one.state.params, two.state.params)
    assert [record.attention for record in one.records] == [
        record.attention for record in two.records
    ]
    other = train(strategy, small_federation, small_model, seed=5)
    assert not same_tensors(one.state.params, other.state.params)


def test_training_leaves_the_received_state_alone(strategy, small_federation, small_model):
    run = begin(config_of(strategy), small_model)
    received, kept = run.state, copy.deepcopy(run.state)
    for _ in run_rounds([run], engine_for(small_federation, small_model)):
        assert same_tensors(received.params, kept.params)


def test_it_learns(strategy, small_federation, small_model):
    run = train(strategy, small_federation, small_model, rounds=12, delta=0.25)
    losses = [record.metrics["loss"] for record in run.records]
    assert losses[-1] < losses[0]


def test_options_survive_the_run_directory(strategy):
    config = RunConfig(strategy=strategy)
    again = read_config(config.to_dict())
    assert again.strategy == strategy
    assert again.digest() == config.digest()
