"""The drop-in strategy: the documented example runs, and bad replies are refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch

from documents import ROOT

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional

from fedproto import (
    STRATEGIES,
    AggregateOptions,
    Centralized,
    FedAvg,
    FedProto,
    Scaffold,
    ServerOptions,
)
from fedproto.config.options import CLIP
from fedproto.errors import ConfigError, TrainingError
from fedproto.flower.own_app import FedProtoStrategy, train_locally
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from fedproto.strategies.sections import HeadOptions, Method
from fedproto.strategies.serve import ServeOptions
from fedproto.strategies.values import Objective, Observation
from flower_grid import LocalGrid

PAGE = ROOT / "docs/how-to/flower-app.md"


@pytest.fixture
def example():
    """The names that the documented example defines."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(code.splitlines()) < 60
    names: dict = {}
    torch.manual_seed(0)
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def flower_strategy(example, method, **options):
    model = example["Net"]()
    return FedProtoStrategy(model, torch.zeros(1, 4), 3, method, **options)


def start(example, grid, rounds=3, **options):
    strategy = flower_strategy(example, FedProto(), **options)
    initial = ArrayRecord(example["Net"]().state_dict())
    return strategy, strategy.start(grid, initial, num_rounds=rounds)


def test_the_documented_example_runs(example, monkeypatch):
    kept = []
    original = FedProtoStrategy.start

    def remember(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        kept.append((self, result))
        return result

    monkeypatch.setattr(FedProtoStrategy, "start", remember)
    grid = LocalGrid(range(4), client_app=example["client_app"])
    context = Context(1, 1, {}, RecordDict(), {"rounds": 3})
    example["server_app"](grid, context)
    ((strategy, result),) = kept
    assert list(strategy.attention) == [1, 2, 3]
    for attention in strategy.attention.values():
        assert sum(attention.values()) == pytest.approx(1)
    losses = [result.train_metrics_clientapp[round_]["train_loss"] for round_ in (1, 3)]
    assert losses[1] < losses[0]


def test_its_attention_is_that_of_the_method(example):
    grid = LocalGrid(range(3), client_app=example["client_app"])
    strategy, _ = start(example, grid, rounds=2)
    assert strategy.attention[1] == pytest.approx({1000: 1 / 3, 1001: 1 / 3, 1002: 1 / 3})
    assert len(set(strategy.attention[2].values())) == 3


def test_it_has_the_default_defence_unless_told_otherwise(example):
    assert flower_strategy(example, FedAvg()).method.aggregate == CLIP
    assert flower_strategy(example, FedAvg(), defence="none").method.aggregate == AggregateOptions()
    own = AggregateOptions(rule="median")
    assert flower_strategy(example, Method(FedAvg(), aggregate=own)).method.aggregate == own


def test_a_named_head_is_averaged_class_by_class(example):
    """All clients of the example hold all classes, so that it is the plain average."""

    def weights_after(method):
        example["FedProto"] = lambda: method
        grid = LocalGrid(range(3), client_app=example["client_app"])
        torch.manual_seed(1)
        initial = ArrayRecord(example["Net"]().state_dict())
        strategy = flower_strategy(example, method)
        result = strategy.start(grid, initial, num_rounds=2)
        assert not any(strategy.failures.values())
        return result.arrays.to_torch_state_dict()

    plain = weights_after(FedAvg(weights="uniform"))
    rows = Method(FedAvg(weights="uniform"), head=HeadOptions(rows="holders"))
    by_class = weights_after(rows)
    for name, tensor in plain.items():
        torch.testing.assert_close(by_class[name], tensor)


def test_a_cohort_is_drawn_from_the_nodes(example):
    grid = LocalGrid(range(4), client_app=example["client_app"])
    random.seed(0)
    strategy, _ = start(example, grid, rounds=4, fraction_train=0.5)
    cohorts = [tuple(attention) for attention in strategy.attention.values()]
    assert all(len(cohort) == 2 for cohort in cohorts)
    assert len(set(cohorts)) > 1


def replaced(**parts):
    def tamper(client, reply):
        if client == 1 and reply.metadata.message_type == "train":
            reply.content = RecordDict({**dict(reply.content), **parts})
        return reply

    return tamper


def nan_weights(client, reply):
    if client == 1 and reply.metadata.message_type == "train":
        state = reply.content["arrays"].to_torch_state_dict()
        state["classifier.bias"][0] = torch.nan
        reply.content["arrays"] = ArrayRecord(state)
    return reply


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (nan_weights, "'classifier.bias' is NaN"),
        (replaced(metrics=MetricRecord({"num-examples": 10**12})), "no usable metrics"),
        (replaced(metrics=MetricRecord({"num-examples": 0})), "no usable metrics"),
        (replaced(metrics=MetricRecord({"num-examples": 30})), "'prototypes/count'"),
        (replaced(payload=ArrayRecord([])), "payload 'margins/local' is missing"),
        (replaced(work=MetricRecord({"steps": -1, "lr": 0.1})), "implausible number of steps"),
        (replaced(work=MetricRecord({"steps": 3, "lr": 0.0})), "implausible learning rate"),
        (replaced(work=MetricRecord({"steps": 3, "lr": 1e-300})), "implausible learning rate"),
        (replaced(arrays=ArrayRecord([])), "is missing"),
    ],
)
def test_a_bad_reply_is_refused_and_the_round_goes_on(example, tamper, reason):
    grid = LocalGrid(range(3), tamper, example["client_app"])
    strategy, result = start(example, grid, rounds=2)
    assert reason in strategy.failures[2][1001]
    assert list(strategy.attention[2]) == [1000, 1002]
    assert all(bool(torch.isfinite(t).all()) for t in result.arrays.to_torch_state_dict().values())


def test_an_error_is_on_record_and_too_few_make_no_round(example):
    def tamper(client, reply):
        if client == 1 and reply.metadata.message_type == "train":
            return Message(Error(7, "no\npower"), reply_to=reply)
        return reply

    grid = LocalGrid(range(2), tamper, example["client_app"])
    strategy, _ = start(example, grid, rounds=1)
    assert strategy.attention == {}
    assert any("no power" in reason for reason in strategy.failures[1].values())


def asked(example, **about):
    config = {"server-round": 1, "last-round": 0, "clients": 4, **about}
    parts = {"arrays": ArrayRecord(example["Net"]().state_dict()), "config": ConfigRecord(config)}
    return Message(RecordDict(parts), 1000, "train")


def statistics(model, loader):
    """Features summed up by class, and their number."""
    inputs, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    with torch.no_grad():
        features = model.encoder(inputs)
    sums = torch.stack([features[labels == label].sum(dim=0) for label in range(3)])
    return Observation(sums, torch.bincount(labels, minlength=3), torch.zeros(()))


def test_the_helper_looks_before_and_after(example):
    model, loader = example["Net"](), example["load_data"](0)
    before = statistics(model, loader)

    def train(local_loss):
        assert local_loss.objective == Objective()
        with torch.no_grad():
            model.encoder[0].weight.mul_(-1)
        return "trained"

    context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
    LocalGrid([0])
    result, records = train_locally(asked(example), context, FedProto(), model, loader, 3, train)
    after = statistics(model, loader)
    assert result == "trained"
    assert model.training
    sent = records["payload"].to_torch_state_dict()
    torch.testing.assert_close(sent[SUM].float(), after.sum)
    assert torch.equal(sent[COUNT], after.count)
    expected = FedProto().report(None, {}, before, after).payload[MARGIN]
    torch.testing.assert_close(sent[MARGIN], expected, check_dtype=False)


def test_what_an_app_has_frozen_stays_frozen(example):
    """FedRep trains the head alone, then the body; an encoder that is frozen has no turn."""
    model, loader = example["Net"](), example["load_data"](0)
    model.encoder.requires_grad_(False)
    phases = []

    def train(local_loss):
        for epoch in range(2):
            local_loss.begin_epoch(epoch, 2)
            phases.append([name for name, one in model.named_parameters() if one.requires_grad])

    context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
    LocalGrid([0])
    method = STRATEGIES.get("fedrep")()
    train_locally(asked(example), context, method, model, loader, 3, train)
    head = ["classifier.weight", "classifier.bias"]
    assert phases == [head, []]
    assert [name for name, one in model.named_parameters() if one.requires_grad] == head


def scaffold_app(example):
    """The documented client, with SCAFFOLD and its correction in the loss."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        model, loader = example["Net"](), example["load_data"](context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())

        def fit(local_loss):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for inputs, labels in loader:
                optimizer.zero_grad()
                local_loss(inputs, labels).backward()
                optimizer.step()

        around = message, context, Scaffold(), model, loader, 3
        _, records = train_locally(*around, fit, steps=len(loader), lr=0.1)
        metrics = MetricRecord({"num-examples": 60})
        return Message(RecordDict({"metrics": metrics, **records}), reply_to=message)

    return app


def scaffold_by_hand(example, initial, clients, rounds):
    """Algorithm 1 of Karimireddy et al. written down step by step."""
    weights = {name: tensor.clone() for name, tensor in initial.items()}
    own = [{name: torch.zeros_like(one) for name, one in weights.items()} for _ in range(clients)]
    server = {name: torch.zeros_like(one) for name, one in weights.items()}
    for _ in range(rounds):
        trained, moved = [], []
        for client in range(clients):
            model = example["Net"]()
            model.load_state_dict(weights)
            loader = example["load_data"](client)
            for inputs, labels in loader:
                model.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                with torch.no_grad():
                    for name, one in model.named_parameters():
                        one -= 0.1 * (one.grad - own[client][name] + server[name])
            after = model.state_dict()
            now = {
                name: own[client][name] - server[name] + (one - after[name]) / (0.1 * len(loader))
                for name, one in weights.items()
            }
            moved.append({name: now[name] - own[client][name] for name in now})
            own[client] = now
            trained.append(after)
        weights = {n: torch.stack([one[n] for one in trained]).mean(dim=0) for n in weights}
        server = {n: server[n] + sum(one[n] for one in moved) / clients for n in server}
    return weights


def test_memory_of_server_and_clients_works_in_an_app_of_ones_own(example):
    torch.manual_seed(1)
    initial = example["Net"]().state_dict()
    strategy = flower_strategy(example, Scaffold())
    grid = LocalGrid(range(3), client_app=scaffold_app(example))
    truth = scaffold_by_hand(example, initial, clients=3, rounds=4)
    for _ in range(2):  # the second start begins anew
        result = strategy.start(grid, ArrayRecord(initial), num_rounds=4)
        found = result.arrays.to_torch_state_dict()
        for name, tensor in truth.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


class WithNorm(torch.nn.Module):
    """Batch norm has floating buffers, which are no parameters."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()
        )
        self.classifier = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.classifier(self.encoder(x))


def method_app(example, method, hostile=None):
    """A client that trains with any method, one of whose nodes may be hostile."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        model, loader = WithNorm(), example["load_data"](client)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())

        def fit(local_loss):
            for epoch in range(2):
                local_loss.begin_epoch(epoch, 2)
                trained = [one for one in model.parameters() if one.requires_grad]
                optimizer = torch.optim.SGD(trained, lr=0.05)
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    local_loss(inputs, labels).backward()
                    optimizer.step()

        _, records = train_locally(
            message, context, method, model, loader, 3, fit, steps=2 * len(loader), lr=0.05
        )
        if client == hostile:
            far = {
                name: one * 30 if one.is_floating_point() else one
                for name, one in records["arrays"].to_torch_state_dict().items()
            }
            records["arrays"] = ArrayRecord(far)
        metrics = MetricRecord({"num-examples": 60})
        return Message(RecordDict({"metrics": metrics, **records}), reply_to=message)

    return app


SECTIONS = {
    "rows": Method(FedAvg(), head=HeadOptions(rows="holders")),
    "momentum": Method(FedAvg(), server=ServerOptions(optimizer="sgd", momentum=0.9)),
    "look-ahead": Method(FedAvg(), server=ServerOptions(lookahead=0.85)),
    "served head": Method(FedAvg(), serve=ServeOptions(head="lda", add=True, fade=50.0)),
    "served average": Method(FedAvg(), serve=ServeOptions(average="ema")),
    "median": Method(FedProto(), aggregate=AggregateOptions(rule="median")),
}
METHODS = {
    name: Method(STRATEGIES.get(name)()) for name in STRATEGIES.names() if name != "centralized"
}


@pytest.mark.parametrize("name", [*METHODS, *SECTIONS])
def test_every_method_runs_with_batch_norm_and_one_hostile_node(example, name):
    method = {**METHODS, **SECTIONS}[name]
    method = replace(method, aggregate=replace(method.aggregate, drop_beyond=10.0))
    grid = LocalGrid(range(4), client_app=method_app(example, method, hostile=3))
    torch.manual_seed(2)
    model = WithNorm()
    strategy = FedProtoStrategy(model, torch.zeros(1, 4), 3, method)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=3)
    for round_ in (1, 2, 3):
        assert list(strategy.failures[round_]) == [1003], strategy.failures
        assert list(strategy.attention[round_]) == [1000, 1001, 1002]
    found = result.arrays.to_torch_state_dict()
    assert all(bool(torch.isfinite(one).all()) for one in found.values())
    assert bool((found["encoder.1.running_var"] > 0).all())
    model.load_state_dict(found)
    inputs, labels = next(iter(example["load_data"](0)))
    right = (model.eval()(inputs).argmax(dim=1) == labels).float().mean()
    assert float(right) > 0.3


def test_momentum_never_steps_statistics(example):
    """Running variances were stepped below zero when floating buffers counted as parameters."""
    method = Method(FedAvg(weights="uniform"), server=ServerOptions(optimizer="sgd", momentum=0.9))
    grid = LocalGrid(range(3), client_app=method_app(example, method))
    torch.manual_seed(3)
    model = WithNorm()
    strategy = FedProtoStrategy(model, torch.zeros(1, 4), 3, method)
    found = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=5).arrays
    variance = found.to_torch_state_dict()["encoder.1.running_var"]
    assert bool((variance > 0).all())


def test_initial_arrays_of_another_model_are_refused(example):
    strategy = flower_strategy(example, FedAvg())
    grid = LocalGrid(range(3), client_app=example["client_app"])
    with pytest.raises(ConfigError, match="do not fit the model"):
        strategy.start(grid, ArrayRecord(WithNorm().state_dict()), num_rounds=1)


@pytest.mark.parametrize(("defence", "score"), [("clip", 10 / 12), ("none", 1.0)])
def test_a_node_that_claims_an_enormous_test_set_does_not_decide_the_score(example, defence, score):
    """Two honest nodes score 0 on 60 samples; ten times the median is believed of the third."""
    app = example["client_app"]

    @app.evaluate()
    def evaluate(message, context):
        liar = context.node_config["partition-id"] == 2
        claimed = {"num-examples": 9_999_999 if liar else 60, "accuracy": 1.0 if liar else 0.0}
        return Message(RecordDict({"metrics": MetricRecord(claimed)}), reply_to=message)

    grid = LocalGrid(range(3), client_app=app)
    _, result = start(example, grid, rounds=1, defence=defence)
    found = result.evaluate_metrics_clientapp[1]["accuracy"]
    assert found == pytest.approx(score, abs=1e-4)


def test_a_node_without_a_score_does_not_count_as_zero(example):
    app = example["client_app"]

    @app.evaluate()
    def evaluate(message, context):
        scores = {} if context.node_config["partition-id"] == 2 else {"accuracy": 0.8}
        metrics = MetricRecord({"num-examples": 60, **scores})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    _, result = start(example, LocalGrid(range(3), client_app=app), rounds=1)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("method", "defence", "said"),
    [
        ("scaffold", "clip", r"a strategy such as FedAvg\(\), not 'scaffold'"),
        (FedAvg(), "clipp", "did you mean 'clip'"),
        (Centralized(), "clip", "cannot run over Flower"),
    ],
)
def test_a_mistake_on_the_server_is_one_line(example, method, defence, said):
    with pytest.raises(ConfigError, match=said):
        flower_strategy(example, method, defence=defence)


DICTS = [{"img": torch.zeros(2, 4), "label": torch.zeros(2, dtype=torch.int64)}]


@pytest.mark.parametrize(
    ("batches", "about", "said"),
    [
        ([], {}, "no data to train on"),
        (DICTS, {}, r"pairs \(inputs, labels\)"),
        (iter([tuple(DICTS[0].values())]), {}, "a list or a DataLoader"),
        ([tuple(DICTS[0].values())], {"last-round": None}, "does it run FedProtoStrategy"),
    ],
)
def test_a_mistake_on_a_client_is_one_line(example, batches, about, said):
    message = asked(example)
    for name in about:  # as Flower's own FedAvg sends it
        del message.content["config"][name]
    context = Context(1, 1000, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(TrainingError, match=said):
        train_locally(message, context, FedProto(), example["Net"](), batches, 3, print)
