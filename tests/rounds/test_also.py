"""Several served models of one run: each is tested as if it had been served alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedproto import ConfigError, FedAvg
from fedproto.config import read_config
from fedproto.config.options import EvaluateOptions
from fedproto.config.recipe import read_recipe
from fedproto.data.federation import Federation
from fedproto.measures import MeasureOptions
from fedproto.report.results import StoredRun
from fedproto.rounds import Run
from fedproto.rounds import train as train_all
from fedproto.rounds.evaluate import models_to_test
from fedproto.store import open_or_create
from fedproto.strategies.fedacg import FedACG
from fedproto.strategies.fedntd import FedNTD
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord
from helpers import AfterRound, begin, config_of, same_tensors, train_runs

TEXTS = (
    "average=none",
    "average=ema decay=0.5",
    "average=window window=2",
    "average=all",
    "head=lda",
    "head=ridge add=true",
    "head=cof",
)


def scores(record: RoundRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if name != "seconds"}


@pytest.mark.parametrize(
    ("strategy", "delta"),
    [(FedAvg(), 0.5), (FedACG(), 0.5), (FedNTD(), 0.0), (FedACG(), 1.0)],  # at 1 no client answers
)
def test_each_model_scores_as_in_a_run_that_serves_it(
    strategy, delta, small_federation, small_model
):
    federation = replace(small_federation, validation=small_federation.clients[0].train)
    plain = config_of(strategy, rounds=4, delta=delta)
    plain = replace(plain, measure=MeasureOptions(every=2, what=("clients",)))
    together = begin(replace(plain, serve=ServeOptions(also=TEXTS)), small_model)
    train_runs([together], federation, small_model)
    stored = StoredRun(Path(), together.config, together.records)
    for text in TEXTS:
        options = ServeOptions.parse(text)
        alone = begin(replace(plain, serve=options), small_model)
        train_runs([alone], federation, small_model)
        assert same_tensors(together.state.params, alone.state.params)
        assert same_tensors(
            models_to_test(together, together.state)[text].params, alone.state.served.params
        )
        found = stored.tested_as(options)
        assert found.config == alone.config
        assert len(found.records) == len(alone.records) == 4
        for one, other in zip(found.records, alone.records, strict=True):
            assert scores(one) == scores(other)
            assert one.tables == other.tables


def test_heads_under_one_average_share_the_statistics_and_the_download(
    small_federation, small_model
):
    texts = [f"average=ema decay=0.5 head={head}" for head in ("lda", "ridge forget=0.1", "cof")]
    plain = config_of(FedACG(), rounds=4, delta=0.5)
    served = replace(ServeOptions.parse(texts[0]), also=(*texts[1:], "average=ema decay=0.5"))
    together = begin(replace(plain, serve=served), small_model)
    train_runs([together], small_federation, small_model)
    stored = StoredRun(Path(), together.config, together.records)
    for text in (*texts, "average=ema decay=0.5"):
        alone = begin(replace(plain, serve=ServeOptions.parse(text)), small_model)
        train_runs([alone], small_federation, small_model)
        found = stored.tested_as(alone.config.serve)
        assert [scores(one) for one in found.records] == [scores(one) for one in alone.records]
        if text == texts[0]:
            for one, other in zip(together.records, alone.records, strict=True):
                assert (one.bytes_down, one.bytes_up) == (other.bytes_down, other.bytes_up)


def test_a_model_that_was_not_tested_is_not_made_up(small_federation, small_model):
    run = begin(config_of(FedAvg()), small_model)
    train_runs([run], small_federation, small_model)
    with pytest.raises(KeyError):
        StoredRun(Path(), run.config, run.records).tested_as(ServeOptions(average="ema"))


def test_options_as_text_are_those_that_differ_from_the_defaults():
    assert ServeOptions.parse("decay=0.9 average=ema") == ServeOptions(average="ema")
    assert ServeOptions.parse("decay=0.9 average=ema").text == "average=ema"
    every = ServeOptions(head="ridge", add=True, fade=2.5, ridge=0.5)
    assert ServeOptions.parse(every.text) == every
    assert ServeOptions().text == "average=none"
    given = ServeOptions(also=["average=ema", "decay=0.9 average=ema"])
    assert given.also == ("average=ema",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ema", r"serve.also: 'ema': write options as 'average=ema decay=0.95'"),
        ("average=mean", r"serve.also: 'average=mean'.average must be 'none', 'ema'"),
        ("avarage=ema", r"did you mean 'average'"),
        ("also=average=ema", r"cannot have further models"),
        ("average=ema decay=2", r"decay must be at least 0 and at most 1"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(ConfigError, match=words):
        read_config({"strategy": "fedavg", "serve": {"also": [text]}})


def interrupt(_, record: RoundRecord) -> None:
    if record.round == 1:
        raise KeyboardInterrupt


def test_a_resumed_run_has_the_same_records(tmp_path: Path):
    config = next(iter(read_recipe("quickstart", ["schedule.rounds=4"]).values()))
    config = replace(config, serve=ServeOptions(also=("average=ema", "head=lda")))
    federation: Federation = config.data.load(Path())
    records = []
    for name, killed in (("whole", False), ("resumed", True)):
        if killed:
            store = open_or_create(tmp_path / name, config)
            with pytest.raises(KeyboardInterrupt):
                train_all([Run(config, federation, store=store)], [AfterRound(interrupt)])
        run = Run(config, federation, store=open_or_create(tmp_path / name, config))
        train_all([run])
        assert run.store is not None
        records.append([replace(one, seconds=0.0) for one in run.store.records()])
    assert records[0] == records[1]
    assert set(records[0][-1].also) == {"average=ema", "head=lda"}


def test_the_last_rounds_are_all_tested(small_federation, small_model):
    config = replace(config_of(FedAvg(), rounds=9), evaluate=EvaluateOptions(every=4, last=3))
    run = begin(config, small_model)
    train_runs([run], small_federation, small_model)
    assert [one.round for one in run.records if "accuracy" in one.metrics] == [3, 6, 7, 8]


def test_test_data_can_be_left_unread(small_federation, small_model):
    federation = replace(small_federation, validation=small_federation.clients[0].train)
    config = replace(
        config_of(FedAvg()),
        evaluate=EvaluateOptions(test=False),
        serve=ServeOptions(also=("average=ema",)),
    )
    run = begin(config, small_model)
    train_runs([run], federation, small_model)
    for record in run.records:
        taken = {*record.metrics, *record.also["average=ema"]}
        assert taken == {"train_loss", "validation_accuracy", "validation_loss"}
        assert not record.tables
    with pytest.raises(ConfigError, match=r"set data\.validation"):
        train_runs([begin(config, small_model)], small_federation, small_model)


def test_compare_shows_each_model_in_a_row(tmp_path: Path, small_federation, small_model):
    config = replace(config_of(FedAvg()), serve=ServeOptions(also=("average=ema", "average=none")))
    run = begin(config, small_model)
    train_runs([run], small_federation, small_model)
    shown = StoredRun(tmp_path, config, run.records).all_tested()
    assert [one.config.serve.text for one in shown] == ["average=none", "average=ema"]
    assert shown[0].records[-1].metrics == run.records[-1].metrics
    assert shown[1].records[-1].metrics != run.records[-1].metrics
    assert [sorted(one.records[-1].tables) for one in shown] == [["class", "client"]] * 2
