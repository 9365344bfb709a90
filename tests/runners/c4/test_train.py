"""Training against AdamW written out; parts of a batch, several processes, and downstream sets."""

import gzip
import json
import signal
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers.models import LanguageModel  # noqa: E402
from runners.c4 import checkpoints  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.curve import read_curve  # noqa: E402
from runners.c4.data.corpus import (  # noqa: E402
    Corpus,
    Manifest,
    Part,
    Windows,
    write_shard,
)
from runners.c4.data.prepare import prepare  # noqa: E402
from runners.c4.data.sources import SPLITS  # noqa: E402
from runners.c4.evaluation.downstream import read_items  # noqa: E402
from runners.c4.evaluation.evaluate import validation_loss, windows_together  # noqa: E402
from runners.c4.gpu_peak import peak_flops  # noqa: E402
from runners.c4.identity import run_folder  # noqa: E402
from runners.c4.model import build, token_losses  # noqa: E402
from runners.c4.step import learning_rate  # noqa: E402
from runners.c4.train import train  # noqa: E402
from runners.c4.watchers import Bar  # noqa: E402
from runners.interrupt import StoppedError  # noqa: E402
from tests.runners.c4.runs import ALONE, At, configured, corpus_of, folder_of, interrupt, last_tensors, losses, run  # noqa: E402
from tests.runners.processes import forks, run_program  # noqa: E402


def test_learning_rate_warms_up_to_the_peak_and_falls_to_a_tenth() -> None:
    """Against torch's own schedules, which count steps in the same way."""
    config = Config(steps=100, lr=0.5)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 40, total_iters=39)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60, eta_min=0.05)
    expected = []
    for step in range(100):
        if step > 39:
            fall.step()
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < 39:
            warm.step()
    np.testing.assert_allclose([learning_rate(config, step) for step in range(100)], expected, rtol=1e-9)
    assert learning_rate(config, 39) == 0.5
    assert learning_rate(config, 99) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        *(("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12)),
        *(("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA GH200 480GB", 989e12)),
        *(("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA A100 80GB PCIe", 312e12), ("NVIDIA RTX A1000", None)),
        *(("NVIDIA B200", 2250e12), ("NVIDIA GB200", 2500e12), ("NVIDIA H20", None)),
    ],
)
def test_the_peak_is_that_of_the_gpu_s_own_variant(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_the_loss_falls_and_the_result_is_kept(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, steps=40, lr=3e-2)
    result = run(config)
    assert result["validation_loss"] < read_curve(folder_of(config))[0].loss - 0.3
    again = run(config, [At(1, interrupt)])
    assert again == result


def test_steps_are_those_of_adamw_written_out(texts: Path, tmp_path: Path) -> None:
    """Gradients longer than ``clip`` are scaled down to it; gains, which a name tells here, do not decay."""
    config = configured(
        *(texts, tmp_path), seed=1, steps=3, beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.3, clip=0.05
    )
    run(config)
    corpus, rows = corpus_of(config), read_curve(folder_of(config))
    model, windows = build(config, {}, corpus.manifest.vocab_size), Windows(corpus, "train", 12, seed=1)
    gains = [y for name, y in model.named_parameters() if name.endswith("gain")]
    matrices = [y for name, y in model.named_parameters() if name.endswith("weight")]
    groups = [{"params": gains, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.3}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99), eps=1e-3)
    for step, row in enumerate(rows):
        tokens_BT = torch.from_numpy(windows.batch(step, 4))
        loss = F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [y.grad for y in (*gains, *matrices) if y.grad is not None]
        norm = torch.cat([y.flatten() for y in gradients]).norm().item()
        assert (row.loss, row.grad_norm) == (pytest.approx(loss.item(), rel=1e-5), pytest.approx(norm, rel=1e-4))
        assert norm > 0.05
        for y in gradients:
            y.mul_(0.05 / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
    trained = checkpoints.load_model(folder_of(config))[0].state_dict()
    for name, y in model.state_dict().items():
        torch.testing.assert_close(trained[name], y, rtol=1e-4, atol=1e-5, msg=name)


def test_rows_state_each_step_and_the_result_the_median_speed(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, steps=7)
    result, rows = run(config), read_curve(folder_of(config))
    assert [row.lr for row in rows] == [learning_rate(config, step) for step in range(7)]
    assert [row.tokens for row in rows] == [48 * step for step in range(1, 8)]
    assert [row.step for row in rows if row.validation_loss is not None] == [1, 3, 7]
    assert result["tokens_per_second"] == median(row.tokens_per_second for row in rows)


def test_the_validation_loss_is_that_of_the_first_validation_texts_in_order(texts: Path, tmp_path: Path) -> None:
    """Five windows and a rest are asked for, of a corpus with more of them."""
    config = configured(texts, tmp_path, steps=2, validation_tokens=65)
    corpus = prepare(tmp_path, config.data, config.tokenizer, 97, 400, Console(quiet=True))
    result = train(config, {}, corpus, ALONE, [])
    model, tokenizer = checkpoints.load_model(run_folder(config, {}, corpus.folder.name))
    with gzip.open(texts / "c4-validation.json.gz", "rt") as file:
        documents = [json.loads(line)["text"] for line in file]
    end = tokenizer.token_to_id("</s>")
    tokens_BT = torch.tensor([i for text in documents for i in [*tokenizer.encode(text).ids, end]]).unfold(0, 13, 12)
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens_BT[:5, :-1]).flatten(0, 1), tokens_BT[:5, 1:].flatten())
    assert result["validation_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_questions_are_asked_of_a_finished_run_once(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    result, asked = run(config), replace(config, downstream=str(tmp_path / "items"))
    (tmp_path / "items").mkdir()

    def scores(*golds: int) -> Any:
        choices = {"contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}
        lines = [json.dumps({"id": i, "gold": gold, **choices}) + "\n" for i, gold in enumerate(golds)]
        (tmp_path / "items" / "pairs.jsonl").write_text("".join(lines))
        found = run(asked, [At(1, interrupt)])
        assert {name: value for name, value in found.items() if name != "downstream"} == result
        return found["downstream"]["pairs"]

    first = scores(0)
    assert first["items"] == 1
    kept = folder_of(config) / "downstream.json"
    written = kept.stat().st_mtime_ns
    assert scores(0) == first
    assert kept.stat().st_mtime_ns == written
    before = sha256(
        repr(read_items(tmp_path / "items")).encode()
    ).hexdigest()  # of a version without one of the figures
    kept.write_text(json.dumps({"items": before, "scores": {"pairs": {"items": 1, "accuracy": first["accuracy"]}}}))
    assert scores(0) == first
    assert scores(1)["accuracy"] == 1 - first["accuracy"]
    assert scores(0, 1)["accuracy"] == 0.5


@pytest.fixture
def asked(texts: Path, tmp_path: Path) -> Config:
    """A run with two downstream sets of one question each."""
    question = {"id": 0, "gold": 0, "contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}
    (tmp_path / "items").mkdir()
    for name in ("first", "second"):
        (tmp_path / "items" / f"{name}.jsonl").write_text(json.dumps(question))
    return configured(texts, tmp_path, downstream=str(tmp_path / "items"))


def test_ctrl_c_after_training_says_what_is_left(asked: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("runners.c4.train.evaluate_items", interrupted)
    with pytest.raises(StoppedError, match="the run is trained, the same command continues with") as stop:
        run(asked)
    assert stop.value.status == 130
    monkeypatch.undo()
    assert run(asked, [At(1, interrupt)])["downstream"].keys() == {"first", "second"}


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_goes_on_after_training(asked: Config, capsys: pytest.CaptureFixture[str], terminal: bool) -> None:
    run(asked, [Bar(Console(width=120, force_terminal=terminal, color_system=None))])
    out = capsys.readouterr().out
    assert out.index("step      8: ") < out.index("evaluating first: set 1 of 2\n")
    assert "evaluating second: set 2 of 2\n" in out
    assert ("2/2" in out) == terminal  # a log has lines alone


def test_accumulated_gradients_are_those_of_the_whole_batch(texts: Path, tmp_path: Path) -> None:
    whole, parts = (configured(texts, tmp_path / str(n), micro_batch_size=n) for n in (4, 1))
    run(whole)
    run(parts)
    np.testing.assert_allclose(losses(whole), losses(parts), rtol=1e-5)


def test_recomputed_activations_change_nothing(texts: Path, tmp_path: Path) -> None:
    kept, recomputed = (configured(texts, tmp_path / str(n), recompute=n) for n in (False, True))
    run(kept)
    run(recomputed)
    np.testing.assert_allclose(losses(kept), losses(recomputed), rtol=1e-5)


def test_evaluations_of_a_run_have_few_passes_and_the_loss_of_many(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(texts, tmp_path, micro_batch_size=2, validation_tokens=120)  # 10 windows, 4 at once
    passes = []

    def counted(model: LanguageModel, tokens_BT: torch.Tensor) -> torch.Tensor:
        passes.append(len(tokens_BT))
        return token_losses(model, tokens_BT)

    def as_on_a_gpu(config: Config, device: torch.device, world_size: int) -> int:
        return windows_together(config, torch.device("cuda"), world_size)

    monkeypatch.setattr("runners.c4.evaluation.evaluate.token_losses", counted)
    monkeypatch.setattr("runners.c4.loop.windows_together", as_on_a_gpu)
    result = run(config)
    assert passes == [4, 4, 4] * config.evaluations

    model, _ = checkpoints.load_model(folder_of(config))
    windows = Windows(corpus_of(config), "validation", config.seq_len, None)
    one_by_one = validation_loss(model, windows, config.validation_tokens, 1, torch.device("cpu"))
    assert result["validation_loss"] == pytest.approx(one_by_one, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mixer", "parametrisation"),
    [
        *((mixer, "paper") for mixer in ("rt", "transformer", "gla", "lstm")),
        ("rt", "authors"),
        ("transformer", "authors"),
    ],
)
def test_gpu_layers_as_graphs_train_as_on_a_cpu(
    mixer: str, parametrisation: str, tmp_path: Path, device: torch.device
) -> None:
    """Two parts a step, so that gradients are added up over replays; what bfloat16 adds in 8 steps stays."""
    tokens_N = np.random.default_rng(0).integers(0, 40, 2000).cumsum() % 61
    documents_D3 = np.array([[0, 0, 0]])
    parts = {
        split: Part(shards=(write_shard(tmp_path, split, tokens_N.astype(np.uint16), documents_D3, 0),))
        for split in SPLITS
    }
    manifest = Manifest(tokenizer="", vocab_size=61, end_of_text=0, sources={}, splits=parts)
    corpus = Corpus(folder=tmp_path, manifest=manifest, asked=dict.fromkeys(SPLITS, 2000))
    curves = []
    for world in (ALONE, replace(ALONE, device=device)):
        out = tmp_path / world.device.type
        settings = {"mixer": mixer, "parametrisation": parametrisation, "micro_batch_size": 2, "lr": 1e-3}
        # The MLP has a kernel for these widths. GLA norms what a head reads, so that at the first position the sign of
        # a score is all that is left: with seed 0 that score is -0.0017, and 0.0033 in bfloat16, without kernels, too.
        settings |= {"width": 64, "mlp_width": 64, "seed": 2}
        config = configured(tmp_path, out, **settings, device=world.device.type)
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(config.tokenizer)
        curves.append([train(config, {}, corpus, world, []), read_curve(run_folder(config, {}, corpus.folder.name))])
    (one, rows), (other, others) = curves
    np.testing.assert_allclose([row.loss for row in others], [row.loss for row in rows], rtol=0, atol=0.02)
    assert abs(one["validation_loss"] - other["validation_loss"]) < 0.02


AGENTS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(config: Config, *extra: str) -> None:
    """Run the command in two processes, as ``torchrun --nproc-per-node=2`` does."""
    shape = ("width", "mlp_width", "heads", "layers", "mixer", "parametrisation", "seq_len", "batch_size", "steps")
    other = ("lr", "validation_tokens", "evaluations", "checkpoint_every", "tokenizer", "device", "out")
    arguments = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in (*shape, *other)]
    forks()
    two = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    output = config.out.with_suffix(".txt")
    program = "runners.c4.__main__", [*arguments, "--data", *config.data, *extra], output

    # The agent leaves its handlers of signals behind.
    handlers = {number: signal.getsignal(number) for number in AGENTS_SIGNALS}
    try:
        elastic_launch(two, run_program)(*program)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(texts: Path, tmp_path: Path, parallel: str) -> None:
    authors = {"parametrisation": "authors" if parallel == "fsdp" else "paper"}  # weights computed from shards
    alone, together = (configured(texts, tmp_path / name, steps=4, **authors) for name in ("alone", "together"))
    run(alone)
    launch(together, "--parallel", parallel)
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    folder = folder_of(together)
    (folder / "result.json").unlink()
    (folder / "checkpoints" / "step-00000004.safetensors").unlink()
    launch(together, "--parallel", parallel)  # goes on from step 3
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    one, two = last_tensors(alone), last_tensors(together)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
