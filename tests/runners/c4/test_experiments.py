"""The experiments with language models: which models they train, and that they can be compared."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from runners.c4.checks import check
from runners.c4.cost import model_parameters
from runners.c4.model import layer_of
from runners.c4.reference.experiments import AGAINST, EXPERIMENTS

MODELS = [(experiment, name) for experiment, found in EXPERIMENTS.items() if found.folder for name in found.rows]


@pytest.mark.parametrize(("experiment", "name"), MODELS)
def test_a_model_of_30m_parameters_reads_301m_tokens(experiment: str, name: str) -> None:
    found = EXPERIMENTS[experiment]
    config, options = found.config(name, out=Path("somewhere")), dict(found.rows[name].options)
    check(config, options, ())
    assert config.steps * config.batch_size * config.seq_len == 301_465_600
    parameters, tables = model_parameters(config, options, 8000)
    assert parameters - tables == pytest.approx(29.5e6, rel=0.03)
    assert (config.parametrisation == "authors") == name.endswith("-authors")


def test_each_file_is_one_model() -> None:
    """Experiments that share a folder share no name, and no two models of a folder are the same."""
    models = defaultdict(list)
    for experiment in EXPERIMENTS.values():
        for name, row in experiment.rows.items():
            layer_config = layer_of(experiment.config(name), dict(row.options))[1]
            models[experiment.folder].append((name, repr((experiment.config(name), layer_config))))
    for found in models.values():
        names, settings = zip(*found, strict=True)
        assert len(set(names)) == len(set(settings)) == len(found)
    assert set(models) == {"", AGAINST}


def test_variants_differ_from_the_model_that_they_are_compared_with() -> None:
    variants, base = EXPERIMENTS["variants"], EXPERIMENTS["transition"].config("rt-6")
    beta2, batch = variants.config("rt-6-beta2-0.99"), variants.config("rt-6-batch-32")
    assert (base.beta2, beta2.beta2) == (0.95, 0.99)
    assert (base.batch_size, batch.batch_size, batch.steps) == (64, 32, 2 * base.steps)
    assert variants.rows["rt-6-no-persistent-norm"].options == {"persistent_norm": False}
    assert [variants.rows[f"rt-6-block-{n}"].options for n in (4, 16)] == [{"block": 4}, {"block": 16}]


@pytest.mark.parametrize(
    ("experiment", "name", "message"),
    [
        ("transition", "my_layer:Mine", "no row 'my_layer:Mine': a layer of your own is a row of --experiment ranking"),
        ("ranking", "my_layer.Mine", "no row 'my_layer.Mine': write a layer of your own as package.module:Class"),
        ("variants", "rt-6-beta2-0.9", "no row 'rt-6-beta2-0.9': did you mean rt-6-beta2-0.99?"),
    ],
)
def test_a_layer_of_ones_own_is_a_row_of_the_ranking_alone(experiment: str, name: str, message: str) -> None:
    assert EXPERIMENTS["ranking"].config("my_layer:Mine").mixer == "my_layer:Mine"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        EXPERIMENTS[experiment].config(name)
