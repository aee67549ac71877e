"""The study of served models: the rule that chooses parameters, and the chain to its tables."""

from __future__ import annotations

import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pandas as pd

from fedproto import FedAvg, Steady
from fedproto.cli import main
from fedproto.config.recipe import combine
from fedproto.report.arrangement import arrange
from fedproto.report.results import StoredRun
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord
from helpers import begin, config_of, train_runs
from paper import reproduction
from paper.cases import Scope
from paper.experiments.serve_grid import methods_for, read_choices, searches, tables_of
from paper.halving import AVERAGES, HEADS, TRAINED, methods, without_head, written
from paper.library import Request, settings_digest
from paper.reproduction import Plan, TimeLimit

PAPER = Scope(scale="paper")


class Known:
    """A library of runs whose validation score is a function of their options."""

    def __init__(self, score, longest=1.0, heads=True):
        self.score, self.longest, self.heads, self.asked = score, longest, heads, []

    def find(self, request: Request):
        rounds = request.first or request.config.schedule.rounds
        self.asked.append((request.config.title, rounds))
        if rounds > self.longest * request.config.schedule.rounds:
            return None
        if request.config.serve.computes_head and not self.heads:
            return None
        served, *others = (request.config.serve.text, *request.config.serve.also)
        value, *beside = (
            {"validation_accuracy": self.score(request.config, text)} for text in (served, *others)
        )
        also = dict(zip(others, beside, strict=True))
        records = [
            RoundRecord(t, [], [], [], {}, {}, value, 0, 0, 0.0, also=also) for t in range(rounds)
        ]
        return StoredRun(Path(), request.config, records)


def search(method: str, library, case: str = "cifar10"):
    (found,) = [one for one in searches(PAPER.case(case), PAPER, library) if one.method == method]
    return found


def test_candidates_go_on_by_their_scores_and_the_schedule_is_chosen_last():
    def score(config, _):
        best = {0.5: 0.1, 0.7: 0.3, 0.9: 0.2}[config.server.momentum]
        return best + (config.train.lr == 0.1) / 100 + (config.train.lr_schedule == "cosine") / 1000

    one = search("FedAvgM", Known(score))
    rounds = {config.title: (length, value) for config, length, value in one.scores()}
    assert len(rounds) == 7
    assert sorted(length for length, _ in rounds.values()) == [40, 40, 40, 40, 100, 200, 200]
    assert rounds["FedAvgM: momentum 0.7, lr 0.0333"][0] == 100
    chosen = one.chosen
    assert chosen.title == "FedAvgM: momentum 0.7, lr 0.1, cosine"
    assert chosen.train.lr_schedule == "cosine"
    assert not chosen.evaluate.test


def test_nothing_is_chosen_while_runs_are_missing():
    one = search("FedDyn", Known(lambda *_: 0.5, longest=0.5))
    assert one.chosen is None
    wanted = {(each.config.title, each.first) for each in one.requests()}
    assert ("FedDyn: alpha 0.001, lr 0.0333", 200) in wanted
    assert ("FedDyn: alpha 0.001, lr 0.0333, cosine", 200) in wanted


def test_every_method_has_the_same_budget():
    for case in ("cifar10", "mnist"):
        found = searches(PAPER.case(case), PAPER, Known(lambda *_: 0.5))
        costs = {one.method: sorted(length for _, length, _ in one.scores()) for one in found}
        assert len({tuple(cost) for cost in costs.values()}) == 1
        assert len(costs) == len(methods()) - (case == "cifar10")


def test_where_equal_weights_change_nothing_they_are_no_method():
    assert "Equal weights" not in methods_for(PAPER.case("cifar10"), PAPER)
    assert "Equal weights" in methods_for(PAPER.case("mnist"), PAPER)


def test_final_runs_share_no_seed_with_the_grid_and_see_no_validation_part():
    for case in ("cifar10", "cifar100-alpha03", "mnist", "femnist", "synthetic", "celeba"):
        grid, final = (tables_of(PAPER.case(case), PAPER, stage) for stage in ("grid", "final"))
        assert grid["evaluate"]["test"] is False
        assert grid["data"]["validation"] == 0.1
        assert "seed" not in grid
        assert 0 not in final["sweep"]["seed"]
        assert len(final["sweep"]["seed"]) == 5
        assert final["evaluate"]["validation"] is False
        official = case.startswith("cifar")
        # Test parts that are the clients' own stay the same ones, which the grid never read.
        assert (grid["data"].get("seed") != final["data"]["seed"]) is official


def test_only_the_recommended_method_is_compared_by_what_it_serves():
    def score(_, text):
        return 0.5 + 0.25 * (text == AVERAGES[1]) - 0.25 * (text == AVERAGES[0])

    steady, opponent = (search(name, Known(score)) for name in ("Steady", "FedACG"))
    assert steady.served() == opponent.served() == AVERAGES[1]
    assert {value for _, _, value in steady.scores()} == {0.75}
    assert {value for _, _, value in opponent.scores()} == {0.5}
    worse = search("Steady", Known(lambda _, text: 0.5 - 0.1 * (text != TRAINED)))
    assert worse.served() == TRAINED
    assert (
        search("FedACG", Known(lambda _, text: 0.5 - 0.1 * (text != TRAINED))).served() != TRAINED
    )


def test_a_head_under_the_best_average_is_served_where_it_is_worth_its_bytes():
    best = AVERAGES[2]
    ridge, lda = (f"{best} {head}" for head in (HEADS[3], HEADS[0]))

    def scores(gain):
        return lambda _, text: 0.5 + 0.1 * (best in text) + gain * (text == ridge)

    one = search("Steady", Known(scores(0.006)))
    assert one.served() == ServeOptions.parse(ridge).text
    assert search("Steady", Known(scores(0.004))).served() == best
    assert search("Steady", Known(scores(0.006), heads=False)).served() == best
    assert search("FedACG", Known(scores(0.006))).served() == best
    headed = one.with_heads()
    assert headed.serve.text == ServeOptions.parse(lda).text
    assert replace(headed, serve=one.chosen.serve, label=one.chosen.label) == one.chosen
    assert headed in [each.config for each in one.requests()]
    assert headed not in [config for config, _, _ in one.scores()]
    assert set(one.served_scores) == {TRAINED, *AVERAGES, *headed.serve.also, headed.serve.text}
    assert without_head(one.served()) == best
    newest = search("Steady", Known(lambda _, text: 0.5 + 0.1 * (text == TRAINED)))
    assert newest.with_heads().serve.text == ServeOptions.parse(HEADS[0]).text


def test_a_final_run_serves_the_head_and_tests_what_it_is_made_of():
    served = f"{AVERAGES[0]} {HEADS[0]}"
    tables = tables_of(PAPER.case("cifar10"), PAPER, "final")
    tables.pop("sweep")
    (config,) = combine([written(tables, "Steady", [served, AVERAGES[0]])], {}).values()
    assert config.serve.text == ServeOptions.parse(served).text
    assert config.serve.also == (TRAINED, AVERAGES[0])


def test_an_average_of_none_is_the_same_whether_written_or_not():
    plain, written = (
        replace(config_of(FedAvg()), serve=ServeOptions(average=one)) for one in (None, "none")
    )
    assert settings_digest(plain) == settings_digest(written)
    steady = config_of(Steady())
    averaged = replace(steady, serve=ServeOptions(average="ema"))
    assert settings_digest(steady) == settings_digest(averaged)
    newest = replace(steady, serve=ServeOptions(average="none"))
    assert settings_digest(steady) != settings_digest(newest)
    shown = [StoredRun(Path(str(n)), one, []) for n, one in enumerate((plain, written))]
    assert len(arrange(shown).groups) == 1


def test_a_paused_run_goes_on_where_it_was(small_federation, small_model):
    whole, paused = (begin(config_of(FedAvg(), rounds=5), small_model) for _ in range(2))
    train_runs([whole], small_federation, small_model)
    paused.pause = 2
    train_runs([paused], small_federation, small_model)
    assert len(paused.records) == 2
    assert paused.stop_reason == "paused after round 2"
    paused.pause = None
    train_runs([paused], small_federation, small_model)
    scores = [[one.metrics for one in run.records] for run in (whole, paused)]
    assert scores[0] == scores[1]


def test_a_time_limit_ends_with_the_round_in_progress(small_federation, small_model):
    run = begin(config_of(FedAvg(), rounds=50), small_model)
    limit = TimeLimit(minutes=0.0)
    limit.runs = [run]
    limit.on_pass(1)
    train_runs([run], small_federation, small_model)
    assert len(run.records) == 1
    limit = TimeLimit(minutes=None)
    limit.runs = [run]
    time.sleep(0.01)
    limit.on_pass(1)
    assert run.pause == 1
    assert not limit.is_over


def test_what_earlier_runs_decide_is_looked_up_before_it_is_trained(monkeypatch):
    """A head chosen by the grid changes final runs that were wanted with the average alone."""
    trained = []
    data = config_of(FedAvg()).data

    def request(label, order):
        return Request("digits", replace(config_of(FedAvg()), label=label, seed=order), order=order)

    class Planned(Plan):
        def look(self, library):
            del library
            served = "head" if "grid" in trained else "average"
            wanted = [request("grid", 0), request(f"final: {served}", 1), request("never", 2)]
            self.missing = [one for one in wanted if one.config.label not in trained[:2]]

    def train_stage(folder, stage, *_):
        assert folder == "smoke/digits"
        trained.extend(one.config.label for one in stage)

    monkeypatch.setattr(reproduction, "_train_stage", train_stage)
    plan = Planned(Scope("smoke"), {})
    plan.look(None)
    assert reproduction.train(plan, None, {data: None}, None)
    # What no run answers is tried once.
    assert trained == ["grid", "final: head", "never"]


def test_without_the_data_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path / "data"))
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        main(["reproduce", "serve-grid", "--scale", "paper", "--only", "cifar10", *folders])
    assert "cifar10 is left out" in said.getvalue()
    assert not list(tmp_path.rglob("run.json"))


def test_the_whole_chain_at_smoke_scale(tmp_path):
    def call(*arguments):
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
        said = StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            assert main(["reproduce", *arguments, "--scale", "smoke", *folders]) == 0
        return said.getvalue()

    assert "out of time" in call("serve-grid", "--minutes", "0.0001")
    call("serve-grid")
    call("serve", "--seeds", "3")
    out = tmp_path / "out/smoke"
    choice = read_choices(out)["synthetic"]
    assert set(choice.values) == {"FedAvg", "FedAvgM", "Steady"}
    grid = pd.read_csv(out / "serve-grid.csv")
    assert grid["chosen"].sum() == 3
    tested = pd.read_csv(out / "serve-averages.csv").groupby("method")["average"].agg(list)
    assert [sum("head" in text for text in tested[name]) for name in choice.values] == [0, 0, 4]
    table = pd.read_csv(out / "serve.csv").set_index("method")
    assert set(table["runs"]) == {3}
    assert {"Steady", "FedAvg", "FedAvg + average"} <= set(table.index)
    pairs = pd.read_csv(out / "serve-pairs.csv")
    assert set(pairs["minus"]) == {"Steady"}
    changes = pd.read_csv(out / "serve-oscillation.csv")
    assert set(changes["model"]) == {"newest model", "average"}
    assert (out / "serve-oscillation.png").stat().st_size > 0
    before = (out / "serve.csv").read_bytes()
    assert "0 are missing" in call("serve", "--seeds", "3", "--existing")
    assert (out / "serve.csv").read_bytes() == before
