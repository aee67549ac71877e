"""Guidance by classes: numbers worked by hand, what must hold for any clients, and liars."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedproto import (
    AggregateOptions,
    ConfigError,
    FedAvg,
    FedProto,
    FedRS,
    Guided,
    ServerOptions,
)
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, Workload
from fedproto.engines.setting import setting_of
from fedproto.errors import TrainingError
from fedproto.models.adapter import with_features
from fedproto.models.base import FeatureModel, build_model, class_rows
from fedproto.models.cnn import CNNOptions
from fedproto.models.cnn4 import CNN4Options
from fedproto.models.deeplab import SmallDeepLabOptions
from fedproto.models.mlp import MLPOptions
from fedproto.rounds.guard import Expected, reason_to_refuse
from fedproto.strategies.aggregation import MEAN
from fedproto.strategies.attention import balanced_attention, class_attention
from fedproto.strategies.contract import (
    FeatureShape,
    Local,
    Observation,
    Setting,
    initial_tensors,
)
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from fedproto.strategies.guidance import (
    CLASSES,
    REHEARSED,
    REHEARSED_COUNT,
    SEEN_COUNT,
    SEEN_SUM,
)
from fedproto.types import ClientUpdate, ServerState
from helpers import train

BY_CLASS = FedAvg(weights="uniform", head="by-class")
BY_COUNTS = replace(BY_CLASS, head_weights="counts")
HEAD = ("head.weight", "head.bias")
STATE = ServerState(
    0,
    {
        "body": torch.tensor([9.0]),
        "head.weight": torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]),
        "head.bias": torch.tensor([1.0, 2.0, 3.0]),
    },
    {},
)
SETTING = Setting(STATE.params, 3, 8, FeatureShape(2, per_sample=1), HEAD)


def update(client: int, level: float, counts, payload=None) -> ClientUpdate:
    """A client whose every weight is at one level."""
    params = {name: torch.full_like(one, level) for name, one in STATE.params.items()}
    told = {CLASSES: torch.tensor(counts), **(payload or {})}
    return ClientUpdate(client, sum(counts), params, {}, None, 1, 1, 0.1, told)


def combined(strategy, updates, options=MEAN, state=STATE, setting=SETTING):
    weights = strategy.weigh(state, updates)
    return strategy.aggregate(state, updates, weights, setting, options)[0]


def rows(state: ServerState) -> list[float]:
    """The head's rows, each of which is at one level here."""
    weight, bias = state.params["head.weight"], state.params["head.bias"]
    assert torch.equal(weight[:, 0], weight[:, 1])
    torch.testing.assert_close(weight[:, 0], bias)
    return bias.tolist()


# Class-wise attention


def test_class_attention_by_hand():
    holds = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1]], dtype=torch.bool)
    score = torch.tensor([[1.0, 5, 7, 7], [2.0, 5, 7, 0], [1.0, 5, 7, 0]])
    expected = [[0.25, 1, 0, 0], [0.5, 0, 0, 0.5], [0.25, 0, 0, 0.5]]
    assert class_attention(score, holds).tolist() == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # class 0 of clients 0 and 1, class 1 of client 0, class 2 of nobody: its row stays
        (BY_CLASS, [(10 + 20) / 2, 10, 3]),
        (BY_COUNTS, [(1 * 10 + 3 * 20) / 4, 10, 3]),
        # sizes 4, 3 and 0 weigh the holders
        (replace(BY_CLASS, weights="size"), [(4 * 10 + 3 * 20) / 7, 10, 3]),
        (FedAvg(weights="uniform"), [20, 20, 20]),
        # half a weight for client 2 in class 0, for 1 and 2 in class 1
        (
            replace(BY_CLASS, head_others=0.5),
            [(10 + 20 + 30 / 2) / 2.5, (10 + 20 / 2 + 30 / 2) / 2, 3],
        ),
        (replace(BY_CLASS, head_others=1.0), [20, 20, 3]),
    ],
)
def test_rows_of_the_head_by_hand(strategy, expected):
    updates = [update(0, 10.0, [1, 3, 0]), update(1, 20.0, [3, 0, 0]), update(2, 30.0, [0, 0, 0])]
    result = combined(strategy, updates)
    assert rows(result) == pytest.approx(expected)
    body = 20.0 if strategy.weights == "uniform" else (4 * 10 + 3 * 20) / 7
    assert result.params["body"].tolist() == pytest.approx([body])


def test_rows_by_margins_by_hand():
    strategy = FedProto(head="by-class", head_weights="margins", margins="local")
    logit = float(torch.logit(torch.tensor(0.75)))

    def told(margin):
        return {
            SUM: torch.zeros(3, 2),
            COUNT: torch.tensor([1, 0, 0]),
            MARGIN: torch.tensor([margin, 0, 0]),
        }

    updates = [update(0, 10.0, [1, 0, 0], told(logit)), update(1, 20.0, [1, 1, 0], told(0.0))]
    known = {SUM: torch.zeros(3, 2).double(), COUNT: torch.tensor([1, 1, 1])}
    result = combined(strategy, updates, state=replace(STATE, round=1, memory=known))
    # σ of the margins is 0.75 and 0.5: shares 0.6 and 0.4 of class 0; class 1 is client 1's
    assert rows(result) == pytest.approx([0.6 * 10 + 0.4 * 20, 20, 3], rel=1e-6)
    without = combined(strategy, updates)
    assert rows(without) == pytest.approx([(1 * 10 + 2 * 20) / 3, 20, 3]), "sizes in round 0"


def test_margins_need_a_strategy_that_has_them():
    with pytest.raises(ConfigError, match="fedproto"):
        FedAvg(head="by-class", head_weights="margins")


cohorts = st.lists(
    st.tuples(
        st.integers(-50, 50).map(float),
        st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one[0],  # of equal values a trimmed mean cuts any
)
by_class = st.sampled_from([BY_CLASS, BY_COUNTS, replace(BY_CLASS, weights="balanced")])
rules = st.sampled_from(
    [
        MEAN,
        AggregateOptions(rule="median"),
        AggregateOptions(rule="trimmed-mean", trim=0.2),
        AggregateOptions(max_share=1.2),
        AggregateOptions(rule="multi-krum", krum=0),
    ]
)


@given(cohort=cohorts, strategy=by_class, options=rules)
def test_rows_lie_between_those_of_their_holders_in_any_order(cohort, strategy, options):
    updates = [update(client, *one) for client, one in enumerate(cohort)]
    result = combined(strategy, updates, options)
    again = combined(strategy, updates[::-1], options)
    for name, tensor in result.params.items():
        torch.testing.assert_close(again.params[name], tensor, rtol=1e-4, atol=1e-4)
    for place, value in enumerate(rows(result)):
        held = [level for level, counts in cohort if counts[place]]
        if held:
            assert min(held) - 1e-4 <= value <= max(held) + 1e-4
        else:
            assert value == place + 1, "the row of a class that nobody holds moved"


@given(cohort=cohorts, options=rules)
def test_a_client_without_a_class_leaves_its_row_alone(cohort, options):
    updates = [
        update(client, level, [*counts[:2], 0]) for client, (level, counts) in enumerate(cohort)
    ]
    holder = update(len(cohort), 7.0, [0, 0, 1])
    assert rows(combined(BY_CLASS, [*updates, holder], options))[2] == pytest.approx(7.0)


@given(levels=st.lists(st.floats(-50, 50), min_size=1, max_size=6), strategy=by_class)
def test_where_all_hold_all_alike_it_is_the_plain_average(levels, strategy):
    updates = [update(client, level, [2, 2, 2]) for client, level in enumerate(levels)]
    plain, found = combined(FedAvg(weights="uniform"), updates), combined(strategy, updates)
    for name, tensor in plain.params.items():
        torch.testing.assert_close(found.params[name], tensor, rtol=1e-5, atol=1e-5)


def test_krum_without_a_holder_keeps_the_row():
    updates = [update(client, client / 10, [1, 0, 0]) for client in range(4)]
    outlier = update(4, 900.0, [0, 0, 5])
    result = combined(BY_CLASS, [*updates, outlier], AggregateOptions(rule="multi-krum", krum=1))
    assert rows(result) == pytest.approx([0.15, 2, 3])


def test_rows_have_no_geometric_median():
    options = AggregateOptions(rule="geometric-median")
    options.check_fits(5, pooled=False, weighs_tensors=FedAvg().weighs_tensors)
    with pytest.raises(ConfigError, match="class by class"):
        options.check_fits(5, pooled=False, weighs_tensors=BY_CLASS.weighs_tensors)


# Balanced attention


def test_balanced_attention_by_hand():
    # Two clients of class 0 alone and one of class 1 alone, u = (½, ½). By symmetry a = (x, x, y)
    # with y = 1 − 2x, and ½(2x − ½)²·2 + λ/2 (2(x − ⅓)² + (y − ⅓)²) is least at
    # 4(2x − ½) + λ(2(x − ⅓) + 4(x − ⅓)) = 0, so x = (2 + 2λ) / (8 + 6λ).
    count = torch.tensor([[3, 0], [9, 0], [0, 4]])
    for strength in (0.01, 1.0, 100.0):
        x = (2 + 2 * strength) / (8 + 6 * strength)
        expected = torch.tensor([x, x, 1 - 2 * x], dtype=torch.float64)
        torch.testing.assert_close(balanced_attention(count, strength), expected)


def _energy(a_k, count_kc, strength):
    q_kc = count_kc.double() / count_kc.sum(dim=1, keepdim=True).clamp(min=1)
    present = (count_kc.sum(dim=0) > 0).double()
    u_c = present / present.sum().clamp(min=1)
    away = a_k - 1 / len(a_k)
    return 0.5 * (a_k @ q_kc - u_c).square().sum() + strength / 2 * away.square().sum()


def _best_by_trying(count_kc, strength):
    """The least energy over all sets of clients that have a weight at all."""
    number, best = len(count_kc), None
    q_kc = count_kc.double() / count_kc.sum(dim=1, keepdim=True).clamp(min=1)
    present = (count_kc.sum(dim=0) > 0).double()
    u_c = present / present.sum().clamp(min=1)
    for size in range(1, number + 1):
        for chosen in combinations(range(number), size):
            q = q_kc[list(chosen)]
            system = torch.ones(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size] = q @ q.t() + strength * torch.eye(size).double()
            system[size, size] = 0
            right = torch.cat([q @ u_c + strength / number, torch.ones(1).double()])
            a_k = torch.zeros(number, dtype=torch.float64)
            a_k[list(chosen)] = torch.linalg.solve(system, right)[:size]
            if bool((a_k >= 0).all()):
                energy = float(_energy(a_k, count_kc, strength))
                best = energy if best is None else min(best, energy)
    return best


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=6),
    strength=st.sampled_from([1e-4, 0.01, 0.1, 3.0]),
)
def test_balanced_attention_is_the_minimum(counts, strength):
    count_kc = torch.tensor(counts)
    a_k = balanced_attention(count_kc, strength)
    assert bool((a_k >= 0).all())
    assert float(a_k.sum()) == pytest.approx(1)
    found = float(_energy(a_k, count_kc, strength))
    assert found == pytest.approx(_best_by_trying(count_kc, strength), abs=1e-9)
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(balanced_attention(count_kc[order], strength), a_k[order])


def test_balanced_attention_of_many_clients_ends():
    count_kc = torch.randint(0, 50, (300, 62), generator=torch.Generator().manual_seed(0))
    count_kc = torch.where(count_kc > 45, count_kc, 0)
    a_k = balanced_attention(count_kc, 1e-4)
    assert float(a_k.sum()) == pytest.approx(1)
    q_kc = count_kc.double() / count_kc.sum(dim=1, keepdim=True).clamp(min=1)
    slope_k = q_kc @ (a_k @ q_kc - 1 / 62) + 1e-4 * (a_k - 1 / 300)
    price = slope_k[a_k > 0].mean()
    assert bool((slope_k >= price - 1e-9).all()), "not the minimum: a client without weight pulls"


# Rehearsal


def test_a_client_rehearses_known_classes_that_it_lacks():
    broadcast = {
        REHEARSED: torch.tensor([[1.0, 1], [2, 2], [3, 3]]),
        REHEARSED_COUNT: torch.tensor([4, 0, 6]),
    }
    local = Local(5, 2, 0.1, torch.tensor([0, 0, 5]), {}, broadcast, {})
    virtual = FedAvg(rehearsal=0.3).objective(local).virtual
    assert virtual is not None
    assert (virtual.labels.tolist(), virtual.weight) == ([0], 0.3), "class 1 is not known yet"
    assert virtual.features.tolist() == [[1.0, 1.0]]
    everything = replace(local, classes=torch.tensor([1, 1, 1]))
    assert FedAvg(rehearsal=0.3).objective(everything).virtual is None
    assert FedAvg().objective(local).virtual is None
    both = FedRS(rehearsal=0.3, scale=0.5).objective(local)
    assert both.virtual is not None
    assert both.scale.tolist() == [0.5, 0.5, 1.0]


def told(sums, count):
    return {SEEN_SUM: torch.tensor(sums), SEEN_COUNT: torch.tensor(count)}


@pytest.mark.parametrize(
    ("rehearsed", "expected"),
    [
        # class 0: (2 + 10)/4 = 3, known before as 1; class 1 is new; class 2 stays
        ("trained", [[3.0, 0], [5, 5], [7, 7]]),
        ("received", [[3.0, 0], [5, 5], [7, 7]]),
        ("running", [[2.0, 0.5], [5, 5], [7, 7]]),
    ],
)
def test_rehearsed_prototypes_by_hand(rehearsed, expected):
    strategy = FedAvg(rehearsal=1.0, rehearsed=rehearsed)
    memory = {
        REHEARSED: torch.tensor([[1.0, 1], [0, 0], [7, 7]]),
        REHEARSED_COUNT: torch.tensor([2, 0, 1]),
    }
    updates = [
        update(0, 0.0, [1, 0, 0], told([[2.0, 0], [0, 0], [0, 0]], [1, 0, 0])),
        update(1, 0.0, [3, 2, 0], told([[10.0, 0], [10, 10], [0, 0]], [3, 2, 0])),
    ]
    kept = strategy.remember(replace(STATE, memory=memory), updates, SETTING)
    assert kept[REHEARSED].tolist() == expected
    assert kept[REHEARSED_COUNT].tolist() == [4, 2, 1]


@pytest.mark.parametrize("strategy", [FedAvg(rehearsal=1.0), FedProto(rehearsal=1.0)])
def test_what_is_rehearsed_comes_from_the_asked_model(strategy):
    before, after = (
        Observation(torch.full((3, 2), level), torch.tensor([1, 1, 1]), torch.zeros(()))
        for level in (1.0, 2.0)
    )
    received = {REHEARSED: torch.zeros(3, 2), REHEARSED_COUNT: torch.zeros(3)}
    local = Local(3, 1, 0.1, torch.tensor([1, 1, 1]), {}, received, {})
    for rehearsed, level in (("trained", 2.0), ("received", 1.0), ("running", 2.0)):
        chosen = replace(strategy, rehearsed=rehearsed)
        sent = chosen.report(local, {}, before, after).payload
        assert sent.keys() == chosen.payload(SETTING, 3).keys()
        merged = chosen.rehearsable([update(0, 0.0, [1, 1, 1], sent)])
        assert merged.mean.flatten().tolist() == [level] * 6
    # what FedProto sends anyway is not sent twice
    assert (SEEN_SUM in FedProto(rehearsal=1.0, rehearsed="trained").payload(SETTING, 3)) is False


def test_no_client_makes_what_others_rehearse_absurd():
    strategy = FedAvg(rehearsal=1.0)
    honest = [
        update(k, 0.0, [1, 1, 0], told([[3.0, 4], [0, 5 + k], [0, 0]], [1, 1, 0])) for k in range(4)
    ]
    plain = strategy.rehearsable(honest)
    assert plain.mean[1].tolist() == [0, 6.5], "lengths of 5 to 8 are left as they are"
    for lie in (1e29, -1e29, 1e4):
        liar = update(4, 0.0, [1, 0, 0], told([[lie, 0.0], [0, 0], [0, 0]], [1, 0, 0]))
        found = strategy.rehearsable([*honest, liar]).mean
        # the median of the nine lengths is 5, so the liar's is at most 15, a fifth of the class
        torch.testing.assert_close(
            found[0, 0], torch.tensor((4 * 3 + (15 if lie > 0 else -15)) / 5).double()
        )
        assert found[1].tolist() == plain.mean[1].tolist()


def test_a_model_that_cannot_rehearse_says_so():
    """As DeepLab, whose decoder also takes low-level features."""
    with pytest.raises(TrainingError, match="rehearsal = 0"):
        FedAvg(rehearsal=0.5).server_memory(replace(SETTING, scores_features=False))


def test_guided_is_the_class_wise_head_with_fedavgms_step():
    strategy, updates = Guided(), [update(0, 10.0, [1, 1, 0]), update(1, 20.0, [1, 0, 0])]
    average = FedAvg(weights="uniform", tolerate_partial_work=True, head="by-class")
    momentum = ServerOptions(optimizer="sgd", momentum=0.9)
    state = replace(STATE, memory=initial_tensors(strategy.server_memory(SETTING)))
    expected = replace(STATE, memory=initial_tensors(momentum.memory(SETTING)))
    for _ in range(3):
        state, counted = strategy.aggregate(state, updates, strategy.weigh(state, updates), SETTING)
        mean, same = average.aggregate(expected, updates, average.weigh(expected, updates), SETTING)
        expected = momentum.step(expected, mean)
        assert counted.tolist() == same.tolist()
        for name, tensor in expected.params.items():
            assert torch.equal(state.params[name], tensor)
    # a step of [server] keeps its own memory beside it
    assert strategy.server_memory(SETTING).keys().isdisjoint(momentum.memory(SETTING))


# What leaves a client


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [
        (FedAvg(), None),
        (BY_CLASS, [1, 0, 1]),
        (BY_COUNTS, [7, 0, 2]),
        (FedAvg(weights="balanced"), [7, 0, 2]),
    ],
)
def test_no_more_is_told_of_the_classes_than_the_rule_needs(strategy, sent):
    local = Local(9, 1, 0.1, torch.tensor([7, 0, 2]), {}, {}, {})
    told = strategy.report(local, {}, None, None).payload
    assert told.keys() == strategy.payload(SETTING, 9).keys()
    assert (told[CLASSES].tolist() if told else None) == sent


def test_a_client_may_turn_its_answers():
    strategy = replace(BY_CLASS, flip=0.2)
    local = Local(9, 1, 0.1, torch.tensor([7, 0, 2] * 40), {}, {}, {}, secret=5)
    truth = local.classes > 0
    turned = torch.stack(
        [
            (strategy.report(replace(local, secret=one), {}, None, None).payload[CLASSES] > 0)
            ^ truth
            for one in range(400)
        ]
    ).double()
    # 48,000 answers: 0.2 within five standard deviations, for every class and every client
    assert float(turned.mean()) == pytest.approx(0.2, abs=5 * 0.4 / 48_000**0.5)
    assert float(turned.mean(dim=0).max()) < 0.2 + 5 * 0.4 / 400**0.5
    assert float(turned.mean(dim=1).max()) < 0.2 + 5 * 0.4 / 120**0.5
    neighbours = torch.corrcoef(torch.stack([turned[:-1].flatten(), turned[1:].flatten()]))
    assert abs(float(neighbours[0, 1])) < 5 / 47_880**0.5
    again = strategy.report(local, {}, None, None).payload[CLASSES]
    assert torch.equal(again, strategy.report(local, {}, None, None).payload[CLASSES])


@pytest.mark.parametrize(
    "more", [{"head_weights": "counts"}, {"rehearsal": 0.1}, {"head": "average"}]
)
def test_answers_are_not_turned_where_counts_are_told(more):
    with pytest.raises(ConfigError, match="hide nothing"):
        FedAvg(**({"head": "by-class", "flip": 0.1} | more))


def refusal(strategy, counts, num_examples=9):
    one = replace(update(0, 1.0, counts), num_examples=num_examples)
    expected = Expected(0, num_examples, 1, STATE, strategy.payload(SETTING, num_examples))
    return reason_to_refuse(one, expected)


def test_the_guard_bounds_what_counts_a_client_may_claim():
    assert refusal(BY_COUNTS, [4, 5, 0]) is None
    assert "sums up to more than 9" in refusal(BY_COUNTS, [5, 5, 0])
    assert "not within" in refusal(BY_COUNTS, [-1, 5, 0])
    assert "not within" in refusal(BY_COUNTS, [10, 0, 0])
    assert refusal(BY_CLASS, [1, 1, 1]) is None
    assert "not within [0, 1]" in refusal(BY_CLASS, [2, 0, 0])
    pixels = replace(SETTING, labels=100)
    assert BY_COUNTS.payload(pixels, 9)[CLASSES].total == 900


lies = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(lambda one: sum(one) <= 9)


@given(lie=lies, strategy=st.sampled_from([BY_CLASS, BY_COUNTS]))
def test_a_liar_gains_no_more_than_holders_weights_allow(lie, strategy):
    """Whatever a client claims within the guard's bounds, as far as rows can tell."""
    honest = [update(1, 0.0, [5, 4, 0]), update(2, 0.0, [3, 0, 6])]
    claim = [min(one, 1) for one in lie] if strategy is BY_CLASS else lie
    assert refusal(strategy, claim) is None
    liar = replace(update(0, 1.0, claim), num_examples=9)
    state = replace(STATE, params={name: one * 0 for name, one in STATE.params.items()})
    result = combined(strategy, [liar, *honest], state=state)
    # everybody else is at 0, so the value of a row is the liar's share of it
    for place, share in enumerate(rows(result)):
        others = [one.payload[CLASSES][place] for one in honest if one.payload[CLASSES][place]]
        most = 1 / (1 + len(others)) if strategy is BY_CLASS else 9 / (9 + int(sum(others)))
        assert share <= most + 1e-6
    assert float(result.params["body"]) == pytest.approx(1 / 3), "the rest does not listen to lies"
    capped = combined(strategy, [liar, *honest], AggregateOptions(max_share=1.0), state=state)
    for place, share in enumerate(rows(capped)):
        held = sum(bool(one.payload[CLASSES][place]) for one in honest)
        assert share <= 1 / (1 + held) + 1e-6


# Which layer is the head


def names_of(model, shape, classes):
    return class_rows(model.eval(), torch.zeros(1, *shape), classes)


@pytest.mark.parametrize(
    ("options", "shape", "names"),
    [
        (MLPOptions(hidden=4, features=3), (5,), ("classifier.weight", "classifier.bias")),
        (
            CNNOptions(channels1=2, channels2=2, features=3),
            (1, 8, 8),
            ("classifier.weight", "classifier.bias"),
        ),
        (CNN4Options(channels=2), (1, 16, 16), ("classifier.weight", "classifier.bias")),
        (SmallDeepLabOptions(channels=4), (3, 32, 32), ("classifier.weight", "classifier.bias")),
    ],
)
def test_the_models_that_come_along_have_a_head(options, shape, names):
    assert names_of(build_model(options, shape, 6, seed=0), shape, 6) == names


class Odd(FeatureModel):
    """Its last layer is registered first, under a name of its own."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.verdict = nn.Linear(4, outputs, bias=False)
        self.inner = nn.Linear(5, 4)
        self.token = nn.Parameter(torch.zeros(4))

    def features(self, x):
        return self.inner(x) + self.token

    def head(self, features):
        return self.verdict(features)


def test_the_head_is_found_by_what_it_does():
    assert names_of(Odd(), (5,), 6) == ("verdict.weight",)
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.LogSoftmax(dim=1))
    assert names_of(with_features(plain), (5,), 6) == ("2.weight", "2.bias")
    assert names_of(with_features(plain, layer="1"), (5,), 6) == ("2.weight", "2.bias")


class Named(Odd):
    """Says itself what its head is."""

    def last_layer(self):
        return self.inner


def test_a_model_may_name_its_head_and_may_have_none():
    assert names_of(Named(), (5,), 4) == ("inner.weight", "inner.bias")
    assert names_of(Odd(outputs=9), (5,), 6) == (), "its rows are not the classes"
    normed = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    assert names_of(with_features(normed), (5,), 6) == (), "what comes last is no such layer"
    with pytest.raises(TrainingError, match="head = 'average'"):
        combined(BY_CLASS, [update(0, 1.0, [1, 0, 0])], setting=replace(SETTING, head=()))


def test_the_setting_knows_head_and_labels(small_federation, small_model):
    workload = Workload(
        small_federation, small_model, task_named("classification"), EngineOptions()
    )
    setting = setting_of(workload, dict(small_model.named_parameters()))
    assert len(setting.head) == 2
    assert setting.labels == 1
    assert task_named("segmentation").labels_per_sample((3, 4, 5)) == 20


@pytest.mark.parametrize(
    "strategy",
    [
        Guided(),
        BY_COUNTS,
        FedAvg(weights="balanced", rehearsal=0.5),
        FedProto(head="by-class", head_weights="margins", rehearsal=0.5, rehearsed="received"),
    ],
)
def test_it_learns_with_stragglers(strategy, small_federation, small_model):
    run = train(strategy, small_federation, small_model, rounds=12, delta=0.25)
    losses = [record.metrics["loss"] for record in run.records]
    assert losses[-1] < losses[0]
    assert all(not record.failures for record in run.records)
