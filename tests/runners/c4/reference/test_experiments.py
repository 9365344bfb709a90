"""The models of the experiments."""

import pytest

from mixers import MIXERS
from runners.c4.reference.experiments import EXPERIMENTS


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_longer_sequence_has_as_many_parts_as_in_the_tasks(mixer: str) -> None:
    """Blocks of one position, RT's, are no parts."""
    experiment, config = EXPERIMENTS["ranking"], MIXERS[mixer].Config()
    lengths = {name: getattr(config, name, 1) for name in ("window", "segment", "chunk", "block")}
    parts = {name: 128 / length for name, length in lengths.items() if length > 1}
    options = experiment.rows[mixer].options
    assert {name: experiment.config(mixer).seq_len / options[name] for name in options} == parts
