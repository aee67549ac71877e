"""Amounts and statistics that clients report count no further than the cohort makes plausible."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedproto import AggregateOptions, FedAvg, FedProto, PrivacyOptions, ServeOptions
from fedproto.config import read_config
from fedproto.config.options import CLIP, DEFENCES, defended_method
from fedproto.rounds import claims
from fedproto.rounds.aggregate import aggregate_round
from fedproto.rounds.claims import believed_sizes, bound_claims
from fedproto.rounds.jobs import participants
from fedproto.strategies.fednova import FedNova
from fedproto.strategies.fedprototan import FedProtoTan
from fedproto.strategies.sections import CLASSES, HeadOptions, Method
from fedproto.strategies.serve import COUNT, PRODUCTS, SQUARES, SUM
from fedproto.strategies.values import Local, Observation, Setting, initial_tensors
from fedproto.types import ClientUpdate, ServerState
from helpers import job_of, make_update

C, D, LIAR, CLAIMED = 4, 6, 0, 9_999_999
PARAMS = {"body": torch.zeros(3), "head.weight": torch.zeros(C, D), "head.bias": torch.zeros(C)}
BUFFERS = {
    "norm.running_mean": torch.zeros(D),
    "norm.running_var": torch.ones(D),
    "norm.num_batches_tracked": torch.tensor(0),
}
SETTING = Setting(PARAMS, C, 20, (D, 1), ("head.weight", "head.bias"), buffers=BUFFERS, labels=1)
LDA = Method(FedAvg(), serve=ServeOptions(head="lda"))
MEANS = 3 * torch.randn(C, D, generator=torch.Generator().manual_seed(7))


def samples(client: int, number: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    labels = torch.randint(C, (number,), generator=generator)
    return MEANS[labels] + torch.randn(number, D, generator=generator), labels


def honest(client: int, method: Method = LDA, number: int = 60) -> ClientUpdate:
    features, labels = samples(client, number)
    seen = Observation.of(method.needs.before | method.needs.after, features, labels, C)
    local = Local(number, 1, 0.1, seen.count, PARAMS, {}, {})
    generator = torch.Generator().manual_seed(100 + client)
    params = {name: torch.randn(one.shape, generator=generator) for name, one in PARAMS.items()}
    buffers = {
        "norm.running_mean": torch.randn(D, generator=generator),
        "norm.running_var": 1 + torch.rand(D, generator=generator),
        "norm.num_batches_tracked": torch.tensor(12),
    }
    payload = method.report(local, params, seen, seen).payload
    return ClientUpdate(client, number, params, buffers, 0.5, 1, 1, 0.1, payload)


def lying(update: ClientUpdate, distance: float = 50.0) -> ClientUpdate:
    """Far means of all classes with as many samples as anyone likes, and matching products."""
    way = torch.randn(C, D, generator=torch.Generator().manual_seed(3))
    mean, count = distance * way, torch.full((C,), CLAIMED // C)
    payload = {name: one for name, one in update.payload.items() if name not in (SUM, COUNT)}
    group = SUM.split("/")[0] if SUM in update.payload else "prototypes"
    payload[f"{group}/sum"] = mean * count.unsqueeze(1)
    payload[f"{group}/count"] = count
    if PRODUCTS in payload:
        square = (CLAIMED // C) * mean.t() @ mean
        payload[PRODUCTS] = square[tuple(torch.triu_indices(D, D))]
    return replace(update, num_examples=CLAIMED, payload=payload)


def closed(method: Method, updates: list[ClientUpdate], state: ServerState | None = None):
    state = state or ServerState(0, PARAMS, BUFFERS, initial_tensors(method.server_memory(SETTING)))
    results = [(job_of(method, state, one.client, one.num_examples), one) for one in updates]
    return aggregate_round(method, state, results, SETTING)


def accuracy(state: ServerState) -> float:
    features, labels = samples(999, 400)
    served = state.served.params
    scores = features @ served["head.weight"].t() + served["head.bias"]
    return float((scores.argmax(dim=1) == labels).double().mean())


@pytest.mark.parametrize("defence", [name for name in DEFENCES if name != "none"])
def test_one_client_does_not_own_the_served_head(defence):
    """Without a defence it does; under each of them the head stays as good as without a liar."""
    method = replace(LDA, aggregate=DEFENCES[defence])
    usual = [honest(client) for client in range(7)]
    attacked = [lying(usual[LIAR]), *usual[1:]]
    assert accuracy(closed(LDA, usual).state) > 0.9
    assert accuracy(closed(LDA, attacked).state) < 0.6
    outcome = closed(method, attacked)
    assert "are implausible in most classes" in outcome.failures[LIAR]
    assert LIAR not in outcome.attention
    assert accuracy(outcome.state) > 0.9


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_products_that_no_features_have_do_not_own_the_served_head(covariance):
    """Squares of any size beside honest means: the liar's scatter is bounded by the cohort's."""
    defended = replace(
        LDA, serve=ServeOptions(head="lda", covariance=covariance), aggregate=DEFENCES["clip"]
    )
    trusting = replace(defended, aggregate=DEFENCES["none"])
    usual = [honest(client, defended) for client in range(7)]
    name = PRODUCTS if covariance == "full" else SQUARES

    def size(method: Method, updates: list[ClientUpdate]) -> float:
        return float(closed(method, updates).state.memory[name].norm())

    for factor in (1e6, -1e6):
        payload = {**usual[LIAR].payload, name: factor * usual[LIAR].payload[name]}
        attacked = [replace(usual[LIAR], payload=payload), *usual[1:]]
        assert size(trusting, attacked) > 1e4 * size(trusting, usual)
        assert size(defended, attacked) < 2 * size(trusting, usual)
        assert accuracy(closed(defended, attacked).state) > 0.9
    bounded = bound_claims(defended.aggregate, usual, defended.payload(SETTING, 60))
    for one, own in zip(bounded, usual, strict=True):
        assert torch.equal(one.payload[name], own.payload[name])


def ring(lies: dict[tuple[int, int], float]) -> claims._Statistics:
    """Six clients and six classes, each of which two clients hold; some means are moved."""
    generator = torch.Generator().manual_seed(5)
    class_mean_cd = 5 * torch.randn(6, D, generator=generator, dtype=torch.float64)
    count_kc = torch.zeros(6, 6, dtype=torch.float64)
    mean_kcd = torch.zeros(6, 6, D, dtype=torch.float64)
    for client in range(6):
        for c in (client, (client + 1) % 6):
            noise = 0.1 * torch.randn(D, generator=generator, dtype=torch.float64)
            count_kc[client, c] = 50
            mean_kcd[client, c] = class_mean_cd[c] + noise + lies.get((client, c), 0.0)
    return claims._Statistics(("sum", "count", None), count_kc, mean_kcd)


@pytest.mark.parametrize(
    ("lies", "refused"),
    [
        ({}, []),
        # The others agree in their other class.
        ({(0, 0): 9.0, (0, 1): 9.0}, [0]),
        # In one class alone nobody can tell which one lies.
        ({(0, 0): 9.0}, []),
    ],
)
def test_of_two_holders_the_one_that_contradicts_all_others_is_not_believed(lies, refused):
    assert claims._odd(ring(lies)).nonzero().flatten().tolist() == refused


def test_of_two_single_classes_that_differ_neither_is_rejected():
    """Two clients that hold one class only, the same: either of them may lie."""
    known = ring({(0, 0): 9.0})
    known.count[0, 1] = known.count[5, 5] = 0
    assert claims._odd(known).nonzero().flatten().tolist() == []


def test_the_mean_of_a_class_that_nobody_else_holds_is_bounded_by_the_cohort():
    usual = [honest(client) for client in range(7)]
    for client, one in enumerate(usual):
        held = torch.ones(C, dtype=torch.bool)
        held[3] = client == LIAR
        payload = {**one.payload, COUNT: torch.where(held, one.payload[COUNT], 0)}
        payload[SUM] = torch.where(held.unsqueeze(1), one.payload[SUM], 0)
        usual[client] = replace(one, payload=payload)
    own = usual[LIAR].payload
    away = torch.zeros(C, D)
    away[3] = 1e3 * own[COUNT][3]
    attacked = [replace(usual[LIAR], payload={**own, SUM: own[SUM] + away}), *usual[1:]]

    def told(options: AggregateOptions) -> float:
        (first, *_) = bound_claims(options, attacked, LDA.payload(SETTING, 60))
        return float((first.payload[SUM][3] / first.payload[COUNT][3]).norm())

    assert told(AggregateOptions()) > 1000
    assert told(CLIP) < 3 * float(MEANS.norm(dim=1).max())


def test_the_median_is_taken_of_statistics_and_of_buffers_too():
    """Class means, scatter and running statistics of the merged round, number by number."""
    options = AggregateOptions(rule="median")
    usual = [honest(client) for client in range(7)]
    merged = claims.merge_by_rule(options, usual, LDA.payload(SETTING, 60))
    names = next(claims._statistics(LDA.payload(SETTING, 60)))
    told, found = (claims._Statistics.of(each, names) for each in (usual, merged))
    middle = told.mean.median(dim=0).values  # of seven clients, all of which hold all classes
    for mean in found.mean:
        torch.testing.assert_close(mean, middle, rtol=1e-4, atol=1e-4)
    for scatter in found.scatter:
        torch.testing.assert_close(scatter, told.scatter.median(dim=0).values, rtol=1e-3, atol=1e-3)
    state = closed(replace(LDA, aggregate=options), usual).state
    kept = state.memory[SUM] / state.memory[COUNT].unsqueeze(1)
    torch.testing.assert_close(kept.double(), middle, rtol=1e-4, atol=1e-4)
    bounded = bound_claims(options, usual, {})
    for name in ("norm.running_mean", "norm.running_var"):
        numbers = torch.stack([one.buffers[name] for one in bounded])
        torch.testing.assert_close(state.buffers[name], numbers.median(dim=0).values)


def test_one_holder_of_a_class_does_not_own_its_row():
    """Among the holders of a class no weight exceeds one and a half equal shares."""
    method = Method(FedAvg(), head=HeadOptions(rows="counts"))
    updates = [
        ClientUpdate(
            client,
            100,
            {name: torch.full_like(one, float(client == LIAR)) for name, one in PARAMS.items()},
            BUFFERS,
            *(0.5, 1, 1, 0.1),
            payload={CLASSES: torch.tensor([97 if client == LIAR else 1, 1, 1, 1])},
        )
        for client in range(4)
    ]

    def of_the_liar(**options: float) -> float:
        bounded = replace(method, aggregate=AggregateOptions(**options))
        return float(closed(bounded, updates).state.params["head.weight"][0, 0])

    assert of_the_liar() == pytest.approx(0.97)
    assert of_the_liar(max_share=1.2) == pytest.approx(1.2 / 4)


def test_counts_beyond_a_multiple_of_the_cohorts_median_do_not_count():
    count = torch.tensor([[20.0, 20.0], [30.0, 30.0], [CLAIMED, CLAIMED]], dtype=torch.float64)
    bounded = claims._bound_counts(AggregateOptions(max_claim=2.0), count)
    assert bounded.tolist() == [[20.0, 20.0], [30.0, 30.0], [60.0, 60.0]]


def test_a_lie_about_one_class_of_several_is_clipped():
    """It contradicts the others in too few classes to be rejected."""
    usual = [honest(client) for client in range(7)]
    sums = usual[LIAR].payload[SUM].clone()
    sums[1] += 1e3 * usual[LIAR].payload[COUNT][1]
    attacked = [replace(usual[LIAR], payload={**usual[LIAR].payload, SUM: sums}), *usual[1:]]

    def error(method: Method) -> float:
        outcome = closed(method, attacked)
        assert not outcome.failures
        kept = outcome.state.memory
        return float((kept[SUM][1] / kept[COUNT][1] - MEANS[1]).norm())

    assert error(LDA) > 100
    assert error(replace(LDA, aggregate=CLIP)) < 1.5


@pytest.mark.parametrize("claimed", [50, 10_000_000])
def test_a_claim_of_steps_does_not_lengthen_the_updates_of_others(claimed):
    """FedNova multiplies all updates by the mean number of steps."""
    usual = [honest(client, Method(FedNova())) for client in range(7)]
    attacked = [replace(usual[LIAR], steps=claimed), *usual[1:]]

    def moved(updates: list[ClientUpdate], aggregate: AggregateOptions) -> float:
        state = closed(Method(FedNova(), aggregate=aggregate), updates).state
        return float(torch.cat([one.flatten() for one in state.params.values()]).norm())

    once = moved(usual, CLIP)
    assert moved(usual, AggregateOptions()) == once
    assert moved(attacked, AggregateOptions()) > 5 * once
    assert moved(attacked, CLIP) < 1.2 * once


def test_a_class_keeps_its_count_when_one_client_holds_most_of_it():
    """Else the class would look rare to the computed head."""
    count = torch.tensor([[90.0, 50.0], [6.0, 50.0], [0.0, 50.0]], dtype=torch.float64)
    bounded = claims._bound_counts(AggregateOptions(max_share=1.5), count)
    assert bounded.sum(dim=0).tolist() == [96.0, 150.0]
    assert bounded[:, 0].tolist() == [48.0, 48.0, 0.0]


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_prototypes_that_clients_get_are_bounded_like_weights(rule):
    options = replace(CLIP, rule=rule)
    method = Method(FedProtoTan(), aggregate=options)
    usual = [honest(client, method) for client in range(7)]
    for update in usual:
        assert set(update.payload) == {"prototypes/sum", "prototypes/count"}
    outcome = closed(method, [lying(usual[LIAR]), *usual[1:]])
    kept = outcome.state.memory
    means = kept["prototypes/sum"] / kept["prototypes/count"].unsqueeze(1)
    assert float((means - MEANS).norm(dim=1).max()) < 1.5


def test_a_claim_of_samples_counts_up_to_a_multiple_of_the_median():
    options = AggregateOptions(max_claim=3.0)
    sizes = [CLAIMED, 10, 20, 30, 40]
    updates = [replace(make_update(client, size), payload={}) for client, size in enumerate(sizes)]
    bounded = bound_claims(options, updates, {})
    assert [one.num_examples for one in bounded] == [90, 10, 20, 30, 40]
    assert bound_claims(AggregateOptions(), updates, {}) == updates


def test_a_claim_in_the_draw_counts_up_to_a_multiple_of_the_median():
    sizes = np.array([CLAIMED, *[100] * 9])
    assert believed_sizes(sizes, None, 5.0) is sizes
    assert believed_sizes(sizes, 2.0, 5.0).tolist() == [1000, *[100] * 9]
    config = read_config({"strategy": "fedavg", "schedule": {"cohort": 1, "sampling": "size"}})
    claimed = SimpleNamespace(train_sizes=sizes)

    def drawn(aggregate: AggregateOptions) -> float:
        run = replace(config, aggregate=aggregate)
        return sum(0 in participants(run, round_, claimed).cohort for round_ in range(200)) / 200

    assert drawn(AggregateOptions()) == 1.0
    assert 0.5 < drawn(CLIP) < 0.95


def test_a_claim_of_a_class_counts_up_to_a_multiple_of_the_median():
    method = Method(
        FedAvg(), head=HeadOptions(rows="counts"), aggregate=AggregateOptions(max_claim=2.0)
    )
    sizes = [CLAIMED, *[10] * 4]
    updates = [
        ClientUpdate(
            client,
            size,
            {name: torch.full_like(one, float(client == LIAR)) for name, one in PARAMS.items()},
            BUFFERS,
            *(0.5, 1, 1, 0.1),
            payload={CLASSES: torch.tensor([size, 0, 0, 0])},
        )
        for client, size in enumerate(sizes)
    ]
    row = closed(method, updates).state.params["head.weight"][0]
    assert row.tolist() == pytest.approx([20 / 60] * D)


@pytest.mark.parametrize("lie", [{"running_mean": 10.0}, {"running_var": 1e14}, {"tracked": 2**62}])
def test_batch_norm_statistics_stay_in_the_range_of_the_cohort(lie):
    usual = [honest(client) for client in range(7)]
    (part, value), *_ = lie.items()
    buffers = {
        name: torch.full_like(one, value) if part in name else one
        for name, one in usual[LIAR].buffers.items()
    }
    attacked = [replace(usual[LIAR], buffers=buffers), *usual[1:]]
    outcome = closed(replace(LDA, aggregate=CLIP), attacked)
    assert not outcome.failures
    for name, merged in outcome.state.buffers.items():
        own = torch.stack([one.buffers[name] for one in usual[1:]])
        assert bool((merged >= own.amin(dim=0)).all()), name
        assert bool((merged <= own.amax(dim=0)).all()), name
    assert bool((outcome.state.buffers["norm.running_var"] > 0).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_buffers_without_negative_numbers_are_bounded(dtype):
    numbers = [255, *[0 if dtype is torch.bool else 4 * (client % 2) for client in range(6)]]
    usual = [
        replace(honest(client), buffers={"mask": torch.tensor([number]).to(dtype)})
        for client, number in enumerate(numbers)
    ]
    bounded = [one.buffers["mask"] for one in bound_claims(CLIP, usual, {})]
    assert {one.dtype for one in bounded} == {dtype}
    most = 0 if dtype is torch.bool else 6
    assert [int(one) for one in bounded] == [most, *numbers[1:]]


def test_a_negative_running_variance_counts_as_zero():
    """Where variances differ much, half of their range below them is negative."""
    usual = [honest(client) for client in range(7)]
    name = "norm.running_var"
    spread = [
        replace(one, buffers={**one.buffers, name: torch.full((D,), 0.1 + client)})
        for client, one in enumerate(usual)
    ]
    spread[LIAR] = replace(
        spread[LIAR], buffers={**spread[LIAR].buffers, name: torch.full((D,), -1e6)}
    )
    bounded = bound_claims(CLIP, spread, {})
    assert bool((bounded[LIAR].buffers[name] == 0).all())


def test_honest_statistics_keep_their_bits():
    usual = [honest(client) for client in range(7)]
    bounded = bound_claims(CLIP, usual, LDA.payload(SETTING, 1))
    for before, after in zip(usual, bounded, strict=True):
        assert after.num_examples == before.num_examples
        assert all(torch.equal(after.payload[name], one) for name, one in before.payload.items())


def test_two_clients_cannot_be_compared():
    usual = [lying(honest(0)), honest(1)]
    assert bound_claims(CLIP, usual, LDA.payload(SETTING, 1)) == usual


def test_two_feature_vectors_can_be_computed_from_their_statistics_unless_withheld():
    features, labels = torch.randn(2, D, generator=torch.Generator().manual_seed(1)), torch.zeros(2)
    labels = labels.long()

    def reported(method: Method) -> dict[str, torch.Tensor]:
        seen = Observation.of(method.needs.before, features, labels, C)
        local = Local(2, 1, 0.1, seen.count, PARAMS, {}, {})
        return dict(method.report(local, PARAMS, seen, None).payload)

    told = reported(LDA)
    middle = (told[SUM][0] / 2).double()
    square = torch.zeros(D, D, dtype=torch.float64)
    square[tuple(torch.triu_indices(D, D))] = told[PRODUCTS].double()
    square = square + square.t() - square.diagonal().diag()
    value, vector = torch.linalg.eigh(square / 2 - torch.outer(middle, middle))
    apart = value[-1].sqrt() * vector[:, -1]
    found = torch.stack([middle + apart, middle - apart])
    nearest = torch.cdist(features.double(), found).amin(dim=1)
    assert float(nearest.max()) < 1e-4
    private = defended_method(LDA)
    assert private.privacy.min_samples == 5
    withheld = reported(private)
    assert withheld.keys() == told.keys()
    assert all(not one.any() for one in withheld.values())


def test_statistics_of_frequent_classes_are_those_of_their_samples_alone():
    features, labels = samples(4, 80)
    rare = labels == 2
    rare[rare.nonzero().flatten()[:3]] = False  # three samples of class 2 are left
    features, labels = features[~rare], labels[~rare]
    for needs in ({"head": "lda"}, {"head": "ncm"}):
        method = Method(
            FedAvg(), serve=ServeOptions(**needs), privacy=PrivacyOptions(min_samples=4)
        )
        plain = replace(method, privacy=PrivacyOptions())
        payloads = []
        for one, kept in ((method, labels >= 0), (plain, labels != 2)):
            what = one.needs.before
            seen = Observation.of(what, features[kept], labels[kept], C)
            local = Local(len(labels), 1, 0.1, seen.count, PARAMS, {}, {})
            payloads.append(one.report(local, PARAMS, seen, None).payload)
        withheld, alone = payloads
        assert all(torch.allclose(withheld[name], alone[name]) for name in alone)


def test_runs_over_flower_are_defended_and_private_unless_they_say_otherwise():
    tables = {"strategy": {"name": "fedproto"}}
    run = read_config(tables).defended()
    assert run.aggregate == CLIP
    assert run.privacy.min_samples == 5
    own = read_config(
        {**tables, "aggregate": {"rule": "median"}, "privacy": {"min_samples": 1}}
    ).defended()
    assert own.aggregate == AggregateOptions(rule="median")
    assert own.privacy.min_samples == 1
    assert defended_method(Method(FedProto())).aggregate == CLIP
    assert defended_method(Method(FedProto()), "none").aggregate == AggregateOptions()
