"""Options and recipes: what is read, and how mistakes are answered."""

from __future__ import annotations

import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from fedproto import FedAvg, FedProto, FedProx
from fedproto.config import RunConfig, differences, read_config
from fedproto.config.recipe import (
    apply_overrides,
    bundled_recipes,
    expand,
    read_recipe,
    recipe_summary,
)
from fedproto.errors import ConfigError
from fedproto.options import (
    Options,
    Registry,
    describe,
    option,
    options_to_dict,
    read_options,
)
from paper.cases import configs_of


@dataclass(frozen=True)
class Sample(Options):
    rate: float = option(0.5, "a rate", at_least=0, at_most=1)
    number: int = option(1, "a number", at_least=1)
    kind: Literal["a", "b"] = option("a", "a kind")
    flag: bool = option(False, "a flag")
    limit: float | None = option(None, "a limit", above=0)
    names: tuple[str, ...] = option((), "some names")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rte": 1}, r"here: unknown option 'rte'; did you mean 'rate'\?"),
        ({"zzz": 1}, "unknown option 'zzz'; known: flag, kind, limit"),
        ({"rate": 1.5}, "here.rate must be at least 0 and at most 1, not 1.5"),
        ({"rate": "high"}, "here.rate must be a number, not 'high'"),
        ({"rate": float("nan")}, "here.rate must be a number, not nan"),
        ({"rate": True}, "here.rate must be a number, not True"),
        ({"number": 0}, "here.number must be at least 1, not 0"),
        ({"number": 1.5}, "here.number must be an integer, not 1.5"),
        ({"kind": "c"}, "here.kind must be one of 'a', 'b', not 'c'"),
        ({"flag": 1}, "here.flag must be true or false, not 1"),
        ({"limit": 0}, "here.limit must be above 0, not 0"),
        ({"limit": "x"}, "here.limit must be a number or none, not 'x'"),
        ({"names": "x"}, "here.names must be a list of strings, not 'x'"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(given, message):
    with pytest.raises(ConfigError, match=message):
        read_options(Sample, given, "here")


def test_options_are_converted_and_come_back():
    options = read_options(Sample, {"rate": 1, "limit": 2, "names": ["x", "y"]}, "here")
    assert (options.rate, options.limit, options.names) == (1.0, 2.0, ("x", "y"))
    assert isinstance(options.rate, float)
    assert read_options(Sample, options_to_dict(options), "again") == options


def test_descriptions_have_type_range_and_meaning():
    described = {each.name: each for each in describe(Sample)}
    assert described["rate"].type == "a number at least 0 and at most 1"
    assert described["kind"].type == "one of 'a', 'b'"
    assert (described["flag"].default, described["flag"].help) == (False, "a flag")


def test_a_changed_default_keeps_range_and_meaning():
    @dataclass(frozen=True)
    class Other(Sample):
        rate: float = 0.25

    (rate,) = [each for each in describe(Other) if each.name == "rate"]
    (before,) = [each for each in describe(Sample) if each.name == "rate"]
    assert (rate.default, rate.type, rate.help) == (0.25, before.type, before.help)
    with pytest.raises(ConfigError, match="rate must be at least 0 and at most 1"):
        read_options(Other, {"rate": 2.0}, "here")


def test_every_bundled_recipe_is_valid():
    recipes = bundled_recipes()
    assert {"demo", "quickstart", "synthetic", "digits", "mnist"} <= recipes.keys()
    assert len(recipes) <= 16, "those of studies are in paper/recipes"
    for name, path in recipes.items():
        assert read_recipe(name)
        assert recipe_summary(path)


def test_the_ablation_recipe_has_the_papers_ten_rows_at_three_delta():
    configs = configs_of("ablation")
    assert len(configs) == 30
    assert len({config.label for config in configs}) == 10
    assert {config.schedule.delta for config in configs} == {0.0, 0.5, 0.8}
    fair = next(config for config in configs if config.label == "Fairness sampling iid")
    assert fair.strategy == FedAvg(weights="uniform")
    uniform = {config.label for config in configs if config.schedule.sampling == "uniform"}
    assert uniform == {"Fairness sampling iid"}


BASE = {
    "strategy": {"name": "fedprox", "mu": 0.5},
    "data": {"name": "synthetic"},
    "model": {"name": "mlp"},
}


def test_a_sweep_is_variants_times_axes():
    runs = expand(
        BASE
        | {
            "variants": [
                {"label": "One"},
                {"label": "Two", "strategy": {"mu": 0.1}},
                {"label": "Other", "strategy": {"name": "fedavg"}},
            ],
            "sweep": {"seed": [0, 1], "schedule": {"delta": [0.0, 0.5]}},
        }
    )
    assert len(runs) == 12
    assert runs["two-seed1-delta0.5"].strategy == FedProx(mu=0.1)
    assert runs["one-seed0-delta0.0"].strategy == FedProx(mu=0.5)
    assert runs["other-seed0-delta0.0"].strategy == FedAvg()
    assert runs["two-seed1-delta0.5"].seed == 1


def test_overrides_are_typed_and_a_new_name_starts_afresh():
    changed = apply_overrides(BASE, ["schedule.delta=0.8", "strategy.name=fedproto", "seed=3"])
    (config,) = expand(changed).values()
    assert config.strategy == FedProto()
    assert (config.schedule.delta, config.seed) == (0.8, 3)
    (quoted,) = expand(apply_overrides(BASE, ['label="A b"', "engine.device=cpu"])).values()
    assert (quoted.label, quoted.engine.device) == ("A b", "cpu")
    assert BASE["strategy"]["name"] == "fedprox"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["delta"], "write it as key=value"),
        (["=3"], "write it as key=value"),
        (["strategy.muu=1"], "strategy: unknown option 'muu'; did you mean 'mu'"),
        (["strategie.mu=1"], "unknown section or option 'strategie'; did you mean 'strategy'"),
        (["strategy.name=fedprot"], "strategy.name: unknown strategy 'fedprot'; did you mean"),
        (["data.name=mnits2"], "data.name: unknown data set"),
        (["schedule.delta=1.5"], "schedule.delta must be at least 0 and at most 1, not 1.5"),
        (["train.epochs=0"], "train.epochs must be at least 1, not 0"),
        (["schedule=3"], "schedule must be a section of options, not 3"),
        (["seed=-1"], "seed must be an integer of at least 0"),
        (["seed.x=1", "seed.y=2"], "seed must be an integer"),
        (["label=3"], "label must be a string"),
        (["engine.name=warp"], "unknown engine 'warp'"),
        (["sweep=3"], "sweep must be a section of lists"),
        (["sweep.seed=3"], "sweep.seed must be a list of values, not 3"),
        (["variants=3"], "variants must be tables"),
        (["train.lr=2", "train.lr.x=3"], "train.lr.x: lr is 2, not a section of options"),
    ],
)
def test_impossible_recipes_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        expand(apply_overrides(BASE, overrides))


def test_a_recipe_whose_variants_are_taken_away_is_one_run():
    recipe = BASE | {"variants": [{"label": "One"}, {"label": "Two"}], "sweep": {"seed": [0, 1]}}
    assert len(expand(apply_overrides(recipe, ["variants=[]", "sweep={}"]))) == 1


def test_setting_what_is_swept_over_is_refused():
    with pytest.raises(ConfigError, match=r"set sweep.seed=\[...\]"):
        apply_overrides(BASE | {"sweep": {"seed": [1, 2]}}, ["seed=3"])


def test_variants_without_labels_of_their_own_are_refused():
    with pytest.raises(ConfigError, match="two runs would have the name 'fedprox'"):
        expand(BASE | {"variants": [{}, {"strategy": {"mu": 1.0}}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = \n", "cannot be read: .*line 1"),
        ("", "strategy is missing"),
        (b"\xff\xfe", "cannot be"),
    ],
)
def test_unreadable_recipe_files(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        read_recipe(str(path))


@pytest.mark.parametrize(
    ("source", "message"),
    [("nowhere.toml", "does not exist"), ("quickstar", "did you mean 'quickstart'")],
)
def test_recipes_that_are_not_there(source, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(source)


def test_the_digest_covers_what_results_depend_on():
    config = read_config(BASE)
    assert config.digest() == read_config(config.to_dict()).digest()
    assert replace(config, label="other").digest() == config.digest()
    assert replace(config, seed=1).digest() != config.digest()
    assert replace(config, strategy=FedAvg()).digest() != config.digest()


def test_differences_name_the_options():
    one, other = read_config(BASE), read_config(BASE | {"strategy": {"name": "fedprox"}})
    assert differences(one, other) == ["strategy.mu"]
    assert RunConfig(strategy=FedAvg()).title == "fedavg"


def test_a_scale_changes_what_it_names(tmp_path):
    """The scale of a recipe that is extended counts too; what is set by hand comes last."""
    (tmp_path / "base.toml").write_text(
        'strategy = "fedavg"\ndata = "synthetic"\n[schedule]\nrounds = 500\ncohort = 7\n'
        "[sweep]\nseed = [0, 1, 2]\n"
        "[scales.quick]\nschedule = { rounds = 3 }\nsweep = { train = { lr = [0.5] } }\n"
    )
    (tmp_path / "own.toml").write_text(
        'extends = "base.toml"\n[scales.quick]\nmodel = { name = "mlp", hidden = 4 }\n'
    )
    full = read_recipe(str(tmp_path / "own.toml"))
    assert len(full) == 3
    assert {run.schedule.rounds for run in full.values()} == {500}
    (quick,) = read_recipe(str(tmp_path / "own.toml"), scale="quick").values()
    assert (quick.schedule.rounds, quick.schedule.cohort, quick.seed) == (3, 7, 0)
    assert (quick.train.lr, quick.model.hidden) == (0.5, 4)
    (set_,) = read_recipe(str(tmp_path / "own.toml"), ["schedule.rounds=9"], "quick").values()
    assert set_.schedule.rounds == 9
    with pytest.raises(ConfigError, match=r"own.toml: --scale: unknown scale 'quik'; did you mean"):
        read_recipe(str(tmp_path / "own.toml"), scale="quik")
    (tmp_path / "wrong.toml").write_text('strategy = "fedavg"\nscales = 3\n')
    with pytest.raises(ConfigError, match="scales must be sections"):
        read_recipe(str(tmp_path / "wrong.toml"))


BENCHMARKS = ("cifar10", "cifar10-resnet", "cifar100", "cifar100-pretrained", "pacs")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_fields_benchmarks_have_a_quick_scale(name):
    full, quick = read_recipe(name), read_recipe(name, scale="quick")
    labels = {run.label for run in full.values()}
    trained = {"SCAFFOLD"} if name != "cifar100-pretrained" else set()
    assert {"FedAvg", "FedAvgM", "FedProto"} | trained <= labels
    assert {run.label for run in quick.values()} == labels
    assert len(quick) == len(labels), "one seed each"
    assert max(run.schedule.rounds for run in quick.values()) <= 60


def test_the_cifar10_recipe_is_the_fields_setting():
    run = next(iter(read_recipe("cifar10").values()))
    assert (run.data.clients, run.data.partition, run.data.alpha) == (100, "dirichlet-equal", 0.1)
    assert (run.data.test, run.schedule.cohort, run.train.epochs) == ("official", 10, 5)
    assert (run.train.batch_size, run.train.lr, run.train.weight_decay) == (50, 0.1, 1e-3)
    assert run.train.lr_at(1, 500) == pytest.approx(0.1 * 0.998)


def test_a_recipe_extends_another(tmp_path):
    (tmp_path / "base.toml").write_text(
        'strategy = { name = "fedprox", mu = 0.5 }\n[train]\nlr = 0.5\nepochs = 3\n'
        "[sweep]\nseed = [0, 1]\n"
    )
    (tmp_path / "own.toml").write_text('extends = "base.toml"\n[train]\nlr = 0.1\n')
    runs = read_recipe(str(tmp_path / "own.toml"))
    assert list(runs) == ["fedprox-seed0", "fedprox-seed1"]
    assert {(run.train.lr, run.train.epochs, run.strategy.mu) for run in runs.values()} == {
        (0.1, 3, 0.5)
    }
    (tmp_path / "other.toml").write_text(
        'extends = "own.toml"\nstrategy = { name = "fedavg" }\n[sweep]\nschedule.delta = [0.5]\n'
    )
    (run,) = read_recipe(str(tmp_path / "other.toml")).values()
    assert (run.schedule.delta, run.seed, type(run.strategy).__name__) == (0.5, 0, "FedAvg")


def test_options_without_a_name_hold_for_every_class():
    runs = expand(
        {
            "strategy": {"mu": 0.5},
            "variants": [
                {"strategy": {"name": "fedprox"}},
                {"strategy": {"name": "fedacg", "mu": 0.25}},
            ],
        }
    )
    assert {run.title: run.strategy.mu for run in runs.values()} == {"fedprox": 0.5, "fedacg": 0.25}


def test_the_papers_recipes_draw_cohorts_as_its_sources_do():
    for name in ("mnist", "femnist", "synthetic", "celeba"):
        assert {run.schedule.sampling for run in read_recipe(name).values()} == {"uniform"}
        assert {run.schedule.sampling for run in configs_of(f"earlier-{name}")} == {"size"}
    by_size = [run for run in configs_of("mnist-ablation") if run.schedule.sampling == "size"]
    assert {run.label for run in by_size} == {"Fairness", "FedAvg by size"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "own.toml"', "extends itself: own.toml → own.toml"),
        ('extends = "mnits"', "did you mean 'mnist'"),
        ("extends = 3", "extends must name a recipe, not 3"),
        ('extends = "digits"\nvariants = "own.toml"', "extends itself"),
    ],
)
def test_a_recipe_that_cannot_extend_says_why(tmp_path, text, message):
    (tmp_path / "own.toml").write_text(text + "\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_recipe(str(tmp_path / "own.toml"))


@pytest.mark.parametrize("data", ["digits", "synthetic", "mnist", "femnist"])
def test_the_methods_recipes_hold_the_same_methods(data):
    runs = configs_of(f"methods-{data}")
    names = {run.label for run in runs}
    assert len(names) == 10
    assert {"FedAvg", "Fairness + toleration", "FedProto", "SCAFFOLD", "FedAdam"} <= names
    assert {run.data for run in runs} == {next(iter(read_recipe(data).values())).data}


def test_threads_that_ask_a_registry_at_once_find_all_of_it(tmp_path, monkeypatch):
    package = tmp_path / "slow_kinds"
    package.mkdir()
    (package / "__init__.py").write_text("import time")
    (package / "first.py").write_text("import time; time.sleep(0.3)")
    (package / "second.py").write_text("from slow_kinds import made; made.register('last')(dict)")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[dict] = Registry("kind", "slow_kinds")
    importlib.import_module("slow_kinds").made = registry
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: registry.names(), range(2))) == [["last"], ["last"]]
