"""A last layer from prototypes: by hand, against densities, for any clients, and with liars."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from fedproto import FedAvg, FedProto, Guided, ProtoHead, ServerOptions
from fedproto.errors import TrainingError
from fedproto.rounds import run_rounds
from fedproto.strategies.contract import (
    FeatureShape,
    Local,
    Observation,
    Setting,
    initial_tensors,
)
from fedproto.strategies.served import (
    COUNT,
    FLOOR,
    SQUARES,
    SUM,
    TRAINED,
    gaussian_head,
    modesty,
)
from fedproto.types import ClientUpdate, ServerState, part
from helpers import begin, config_of, engine_for, train

SERVED = FedAvg(weights="uniform", tolerate_partial_work=True, serve="prototypes")
HEAD = ("head.weight", "head.bias")
PARAMS = {"body": torch.ones(1), "head.weight": torch.zeros(3, 2), "head.bias": torch.zeros(3)}
SETTING = Setting(PARAMS, 3, 8, FeatureShape(2, per_sample=1), HEAD)
LOOK = frozenset({"features", "squares"})


def seen(features: torch.Tensor, labels: torch.Tensor) -> Observation:
    return Observation.of(LOOK, features, labels, 3, torch.zeros(()))


def told(client: int, features: torch.Tensor, labels: torch.Tensor) -> ClientUpdate:
    """A client's update, its payload as the strategy makes it."""
    local = Local(len(labels), 1, 0.1, torch.empty(0), PARAMS, {}, {}, 0)
    payload = SERVED.report(local, PARAMS, seen(features, labels), None).payload
    return ClientUpdate(client, len(labels), dict(PARAMS), {}, None, 1, 1, 0.1, payload)


def after(updates, state=None, strategy=SERVED) -> ServerState:
    """The state that is served after a round with these updates."""
    state = state or ServerState(0, PARAMS, {}, initial_tensors(strategy.server_memory(SETTING)))
    state = strategy.sent(state)
    combined, _ = strategy.aggregate(state, updates, strategy.weigh(state, updates), SETTING)
    return strategy.served(combined, state, SETTING)


def drawn(seed: int, number: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (number,), generator=generator)
    centers = torch.tensor([[0.0, 0.0], [2.0, 1.0], [-1.0, 3.0]])
    return centers[labels] + torch.randn(number, 2, generator=generator), labels


def test_two_classes_on_a_line_by_hand():
    """Classes at 0 and 4, two features each, one to each side of the mean: variance 1."""
    weight, bias = gaussian_head(
        torch.tensor([2.0, 2.0]).double(),
        torch.tensor([[0.0], [8.0]]).double(),
        torch.tensor([[1.0 + 1 + 9 + 25]]).double(),
    )
    steep = 2 / (1 + FLOOR)
    assert torch.allclose(weight.flatten(), torch.tensor([-steep, steep]).double())
    # ln ½ − ½·W·(±2) − W·2: halfway, at 2, both score alike.
    level = torch.log(torch.tensor(0.5)).double()
    expected = torch.stack([level - steep + 2 * steep, level - steep - 2 * steep])
    assert torch.allclose(bias, expected)
    assert torch.allclose(weight[0] * 2 + bias[0], weight[1] * 2 + bias[1])


def test_scores_are_those_of_gaussian_densities():
    features, labels = drawn(0)
    one = seen(features.double(), labels)
    weight, bias = gaussian_head(one.count.double(), one.sums.double(), one.squares)
    means = one.sums / one.count.unsqueeze(1)
    apart = features.double() - means[labels]
    within = apart.t() @ apart / len(labels)
    within += FLOOR * within.diagonal().mean() * torch.eye(2).double()
    density = torch.stack(
        [MultivariateNormal(mean, within).log_prob(features.double()) for mean in means], dim=1
    )
    expected = density + (one.count.double() / len(labels)).log()
    found = features.double() @ weight.t() + bias
    assert torch.allclose(found.log_softmax(1), expected.log_softmax(1), atol=1e-9)


@given(st.permutations(range(4)), st.integers(0, 5))
def test_it_is_that_of_the_pooled_features_in_any_order(order, seed):
    features, labels = drawn(seed)
    parts = [told(k, features[k::4], labels[k::4]) for k in range(4)]
    pooled = after([told(0, features, labels)])
    found = after([parts[k] for k in order])
    for name in HEAD:
        assert torch.allclose(found.params[name], pooled.params[name], rtol=1e-4, atol=1e-4)


def test_a_class_that_nobody_held_wins_nowhere():
    features, labels = drawn(1)
    held = labels != 2
    state = after([told(0, features[held], labels[held])])
    scores = features @ state.params["head.weight"].t() + state.params["head.bias"]
    assert torch.isfinite(scores).all()
    assert (scores.argmax(1) != 2).all()


def test_what_was_known_is_forgotten_slowly():
    first, second = drawn(2), drawn(3)
    state = after([told(0, *first)])
    state = after([told(1, *second)], state)
    expected = 0.7 * seen(*first).squares + seen(*second).squares
    assert torch.allclose(state.memory[SQUARES], expected, rtol=1e-6)
    assert torch.allclose(
        state.memory[COUNT], 0.7 * seen(*first).count + seen(*second).count.double()
    )


def test_serving_changes_nothing_of_the_training(small_federation, small_model):
    """Whatever is served, clients go on with what they train; served is what they received."""
    for plain in (FedAvg(tolerate_partial_work=True), FedProto(), Guided(), Guided(rehearsal=0.5)):
        expected = train(plain, small_federation, small_model, rounds=4)
        found = train(replace(plain, serve="prototypes"), small_federation, small_model, rounds=4)
        going_on = found.sent.params
        for name, one in expected.state.params.items():
            assert torch.equal(going_on[name], one), (plain, name)
        received = train(plain, small_federation, small_model, rounds=3).state.params
        served = found.state.params
        other = [name for name, one in received.items() if not torch.equal(served[name], one)]
        assert len(other) == 2


def test_protohead_is_momentum_with_a_computed_layer_that_fades(small_federation, small_model):
    plain = config_of(FedAvg(weights="uniform", tolerate_partial_work=True), rounds=4)
    parts = replace(plain.strategy, serve="both", fade=50.0)
    momentum = replace(plain, strategy=parts, server=ServerOptions(optimizer="sgd", momentum=0.9))
    runs = [begin(one, small_model) for one in (momentum, config_of(ProtoHead(), rounds=4))]
    for run in runs:
        list(run_rounds([run], small_federation, engine_for(small_federation, small_model)))
    for name, one in runs[0].state.params.items():
        assert torch.equal(runs[1].state.params[name], one)
        assert torch.equal(runs[1].sent.params[name], runs[0].sent.params[name])


def test_it_works_with_a_step_of_the_server(small_federation, small_model):
    plain = config_of(FedAvg(tolerate_partial_work=True), rounds=3)
    plain = replace(plain, server=ServerOptions(optimizer="sgd", momentum=0.9))
    states = []
    for serve in ("trained", "prototypes"):
        run = begin(replace(plain, strategy=replace(plain.strategy, serve=serve)), small_model)
        list(run_rounds([run], small_federation, engine_for(small_federation, small_model)))
        states.append(run.sent)
    for name, one in states[0].params.items():
        assert torch.equal(states[1].params[name], one)


def test_it_classifies_better_than_what_clients_train(small_federation, small_model):
    plain = FedAvg(weights="uniform", tolerate_partial_work=True)
    scores = [
        train(one, small_federation, small_model, rounds=4).records[-1].metrics["accuracy"]
        for one in (plain, replace(plain, serve="prototypes"))
    ]
    assert scores[1] > scores[0]


def test_a_client_that_lies_cannot_make_it_absurd():
    honest = [told(k, *drawn(k)) for k in range(5)]
    long = told(5, *drawn(5))
    long = replace(long, payload={**long.payload, SQUARES: long.payload[SQUARES] * 1e20})
    negative = told(6, *drawn(6))
    negative = replace(negative, payload={**negative.payload, SQUARES: -negative.payload[SQUARES]})
    features, labels = drawn(9, 400)

    def accuracy(updates) -> float:
        state = after(updates)
        scores = features @ state.params["head.weight"].t() + state.params["head.bias"]
        return float((scores.argmax(1) == labels).float().mean())

    crossed = told(7, *drawn(7))
    half = crossed.payload[SQUARES].clone()
    half[1] = 1e4
    crossed = replace(crossed, payload={**crossed.payload, SQUARES: half})
    fair = accuracy(honest)
    assert accuracy([*honest, long]) > fair - 0.1
    for liar in (negative, crossed):
        assert accuracy([*honest, liar]) == fair
    assert torch.equal(after([negative]).params["head.weight"], PARAMS["head.weight"])


def test_a_state_that_was_served_holds_what_training_needs():
    state = after([told(0, *drawn(4))])
    assert part(TRAINED, state.memory).keys() == PARAMS.keys()
    assert set(SERVED.server_memory(SETTING)) >= {SUM, COUNT, SQUARES}
    assert torch.equal(SERVED.sent(state).params["head.weight"], PARAMS["head.weight"])


@pytest.mark.parametrize(("round_", "share"), [(0, 1.0), (20, 0.5), (60, 0.25)])
def test_both_adds_the_scores_of_the_layer_that_was_received(round_, share):
    """The computed ones fade where that is asked for; a factor for all of them decides nothing."""
    updates = [told(client, *drawn(client)) for client in range(3)]
    begun = initial_tensors(SERVED.server_memory(SETTING))
    state = ServerState(round_, {**PARAMS, "head.weight": torch.ones(3, 2)}, {}, begun)
    alone, full, fading = (
        after(updates, state, replace(SERVED, serve=serve, fade=fade))
        for serve, fade in (("prototypes", 0.0), ("both", 0.0), ("both", 20.0))
    )
    known = [alone.memory[name] for name in (COUNT, SUM, SQUARES)]
    for found, counted, own in ((alone, 1.0, 0.0), (full, 1.0, 1.0), (fading, share, 1.0)):
        layer = {
            name: counted * computed + own * state.params[name].double()
            for name, computed in zip(HEAD, gaussian_head(*known), strict=True)
        }
        factor = modesty(*layer.values(), *known[:2])
        for name, one in layer.items():
            torch.testing.assert_close(found.params[name], (factor * one).float())
    assert torch.equal(fading.params["body"], full.params["body"])
    assert full.memory.keys() == alone.memory.keys()


@pytest.mark.parametrize(("weight", "factor"), [(0.1, 1.0), (10.0, math.log(5) / 2 / 20)])
def test_a_layer_is_no_surer_than_what_is_known_allows(weight, factor):
    """Two vectors of each class, at ±1: ahead by twice the weight, at most by ln √5."""
    count_c, sum_cd = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([[2.0], [-2.0], [0.0]])
    weight_cd = torch.tensor([[weight], [-weight], [0.0]])
    bias_c = torch.tensor([0.0, 0.0, -100.0])
    assert float(modesty(weight_cd, bias_c, count_c, sum_cd)) == pytest.approx(factor)


def test_a_layer_that_is_wrong_or_has_one_class_stays_as_it_is():
    count_c, sum_cd = torch.tensor([2.0, 2.0]), torch.tensor([[2.0], [-2.0]])
    upside_down = torch.tensor([[-10.0], [10.0]])
    assert float(modesty(upside_down, torch.zeros(2), count_c, sum_cd)) == 1
    one = modesty(torch.ones(1, 1), torch.zeros(1), torch.ones(1), torch.ones(1, 1))
    assert float(one) == 1


def test_a_layer_without_biases_is_judged_without_them():
    setting = replace(SETTING, head=HEAD[:1])
    begun = initial_tensors(SERVED.server_memory(setting))
    received = ServerState(0, PARAMS, {}, begun)
    updates = [told(client, *drawn(client)) for client in range(3)]
    combined, _ = SERVED.aggregate(received, updates, SERVED.weigh(received, updates), setting)
    found = SERVED.served(combined, received, setting)
    known = [found.memory[name] for name in (COUNT, SUM, SQUARES)]
    weight_cd, bias_c = gaussian_head(*known)
    expected = modesty(weight_cd, torch.zeros_like(bias_c), *known[:2]) * weight_cd
    torch.testing.assert_close(found.params["head.weight"], expected.float())
    assert torch.equal(found.params["head.bias"], PARAMS["head.bias"])


def test_what_a_model_keeps_beside_its_weights_goes_with_them():
    """Statistics of batch normalisation are those of the model that is served, or goes on."""
    setting = replace(SETTING, buffers={"running": torch.zeros(2)})
    memory = initial_tensors(SERVED.server_memory(setting))
    received = ServerState(0, PARAMS, {"running": torch.zeros(2)}, memory)
    updates = [replace(told(0, *drawn(4)), buffers={"running": torch.ones(2)})]
    combined, _ = SERVED.aggregate(received, updates, SERVED.weigh(received, updates), setting)
    state = SERVED.served(combined, received, setting)
    assert torch.equal(state.buffers["running"], torch.zeros(2))
    assert torch.equal(SERVED.sent(state).buffers["running"], torch.ones(2))
    assert state.memory.keys() == SERVED.server_memory(setting).keys()


def test_a_model_with_another_head_is_told_so():
    """Before anything is trained."""
    for setting in (replace(SETTING, head=()), replace(SETTING, scores_features=False)):
        with pytest.raises(TrainingError, match="serve = 'trained'"):
            SERVED.server_memory(setting)
