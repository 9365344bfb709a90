"""A run of a reference language model: its losses, and the sizes of its gradients."""

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4.checkpoints import load_model, newest
from runners.c4.data.corpus import Windows
from runners.c4.evaluation.evaluate import split_recall
from runners.c4.evaluation.gradients import SEQUENCES, sizes_by_distance
from runners.c4.identity import run_folder
from runners.c4.reference.cells import ConvergedRun, DivergedRun
from runners.c4.reference.training import train_place
from runners.files import DamagedFileError
from tests.runners.c4.runs import ALONE, configured, corpus_of


def test_the_gradients_of_a_run_are_those_of_its_last_model_on_validation_text(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, lr=1e-3, seed=1)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    done = train_place((1e-3, 1), config, {}, corpus, split, ALONE, [])

    model, _ = load_model(run_folder(config, {}, corpus.folder.name))
    assert len(windows) < SEQUENCES
    tokens_ST = torch.from_numpy(windows.batch(0, len(windows)))
    found = sizes_by_distance(model, tokens_ST, ALONE.device)
    assert isinstance(done, ConvergedRun)
    assert done.gradient == found.gradient
    assert done.gradient_half_width == found.half_width


def test_a_single_window_has_no_gradients(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their interval would be no number, which the file could not hold."""
    config = configured(texts, tmp_path, lr=1e-3, seed=1)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.seq_len, config.seq_len)
    monkeypatch.setattr(Windows, "__len__", lambda self: 1)
    done = train_place((1e-3, 1), config, {}, corpus, split, ALONE, [])
    assert isinstance(done, ConvergedRun)
    assert done.gradient is None
    assert math.isfinite(done.validation_loss)


def test_the_losses_of_a_run_are_those_of_its_last_step(texts: Path, tmp_path: Path) -> None:
    """An earlier checkpoint takes the place of a damaged one only in training."""
    config = configured(texts, tmp_path, lr=1e-3)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    train_place((1e-3, 0), config, {}, corpus, split, ALONE, [])

    last = newest(run_folder(config, {}, corpus.folder.name))
    assert last is not None
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=r"step-00000008.safetensors is damaged"):
        train_place((1e-3, 0), config, {}, corpus, split, ALONE, [])


def test_a_validation_loss_that_is_not_finite_after_the_first_step_is_divergence(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, warmup_fraction=0.0, steps=1)
    corpus = corpus_of(config)
    windows = Windows(corpus, "validation", config.seq_len, None)
    split = split_recall(corpus, windows, config.validation_tokens, config.seq_len)
    done = train_place((1e30, 0), config, {}, corpus, split, ALONE, [])
    assert isinstance(done, DivergedRun)
    assert done.diverged_at == 1
