"""Training against AdamW written out; parts of a batch, several processes, and downstream sets."""

import gzip
import json
import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from runners.c4.checkpoints import newest, rows_of  # noqa: E402
from runners.c4.config import Config, identity  # noqa: E402
from runners.c4.costs import peak_flops  # noqa: E402
from runners.c4.data.corpus import (  # noqa: E402
    Corpus,
    Manifest,
    Part,
    Windows,
    write_shard,
)
from runners.c4.data.prepare import prepare  # noqa: E402
from runners.c4.data.sources import SPLITS  # noqa: E402
from runners.c4.distributed import World, require_shared  # noqa: E402
from runners.c4.export import load_model  # noqa: E402
from runners.c4.model import build  # noqa: E402
from runners.c4.progress import Progress  # noqa: E402
from runners.c4.step import learning_rate  # noqa: E402
from runners.c4.train import loss_of, train  # noqa: E402
from runners.files import load_tensors  # noqa: E402
from runners.records import RECORD  # noqa: E402
from tests.runners.c4.runs import (  # noqa: E402
    ALONE,
    At,
    configured,
    corpus_of,
    folder_of,
    interrupt,
    last_tensors,
    losses,
    rows,
    run,
    words_of,
)
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


def test_steps_are_those_of_adamw_written_out(texts: Path, tmp_path: Path) -> None:
    """Gradients longer than ``clip`` are scaled down to it; gains, which a name tells here, do not decay."""
    config = configured(
        *(texts, tmp_path), seed=1, steps=3, beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.3, clip=0.05
    )
    run(config)
    corpus, steps = corpus_of(config), rows(config)
    model, windows = build(config, {}, corpus.manifest.vocab_size), Windows(corpus, "train", 12, seed=1)
    gains = [y for name, y in model.named_parameters() if name.endswith("gain")]
    matrices = [y for name, y in model.named_parameters() if name.endswith("weight")]
    groups = [{"params": gains, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.3}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.99), eps=1e-3)
    for step, row in enumerate(steps):
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
    trained = load_model(folder_of(config))[0].state_dict()
    for name, y in model.state_dict().items():
        torch.testing.assert_close(trained[name], y, rtol=1e-4, atol=1e-5, msg=name)


def test_the_record_states_what_was_trained_and_what_it_took(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, steps=7, lr=3.0)
    record, steps = run(config), rows(config)
    assert [row.lr for row in steps] == [learning_rate(config, step) for step in range(7)]
    assert [row.tokens for row in steps] == [48 * step for step in range(1, 8)]
    evaluated = [row for row in steps if row.validation_loss is not None]
    assert [row.step for row in evaluated] == record.curve["step"] == [1, 3, 7]
    assert [row.loss for row in evaluated] == record.curve["train_loss"]
    assert [row.validation_loss for row in evaluated] == record.curve["loss"]

    per_second = median(row.tokens_per_second for row in steps) / 48
    assert (record.steps_per_second, record.seconds) == (pytest.approx(per_second), steps[-1].seconds)
    assert (record.task, record.layer, record.family, record.width) == (
        "language-model",
        "transformer",
        "attention",
        16,
    )
    assert record.parameters == sum(y.numel() for y in load_model(folder_of(config))[0].parameters())
    # The last losses, although this rate makes them larger than others.
    validation = record.metrics["validation"]
    assert evaluated[-1].validation_loss > min(record.curve["loss"])
    assert steps[-1].loss != steps[0].loss
    assert record.metrics["training"] == {"loss": steps[-1].loss}
    bits = loss_of(record) / math.log(2) / record.task_config["bytes_per_token"]
    assert validation == {"loss": evaluated[-1].validation_loss, "bits_per_byte": bits}


def test_the_validation_loss_is_that_of_the_first_validation_texts_in_order(texts: Path, tmp_path: Path) -> None:
    """Five windows and a rest are asked for, of a corpus with more of them."""
    config = configured(texts, tmp_path, steps=2, validation_tokens=65)
    corpus = prepare(tmp_path, config.data, config.tokenizer, 97, 400, Console(quiet=True))
    record = train(config, {}, corpus, ALONE, Progress(Console(quiet=True), config))
    model, tokenizer = load_model(identity(config, {}, corpus.folder.name).folder)
    with gzip.open(texts / "c4-validation.json.gz", "rt") as file:
        documents = [json.loads(line)["text"] for line in file]
    end = tokenizer.token_to_id("</s>")
    tokens_BT = torch.tensor([i for text in documents for i in [*tokenizer.encode(text).ids, end]]).unfold(0, 13, 12)
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens_BT[:5, :-1]).flatten(0, 1), tokens_BT[:5, 1:].flatten())
    assert loss_of(record) == pytest.approx(loss.item(), rel=1e-5)


def test_questions_are_asked_of_a_finished_run_once(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    record, asked = run(config), replace(config, downstream=str(tmp_path / "items"))
    (tmp_path / "items").mkdir()

    def scores(*golds: int) -> dict[str, float | None]:
        choices = {"contexts": ["ka", "ka"], "continuations": [" lo", " mi"]}
        lines = [json.dumps({"id": i, "gold": gold, **choices}) + "\n" for i, gold in enumerate(golds)]
        (tmp_path / "items" / "pairs.jsonl").write_text("".join(lines))
        found = run(asked, At(1, interrupt)).metrics
        assert {name: found[name] for name in record.metrics} == record.metrics
        return found["pairs"]

    first = scores(0)
    assert first["items"] == 1
    written = (folder_of(config) / RECORD).stat().st_mtime_ns
    assert scores(0) == first
    assert (folder_of(config) / RECORD).stat().st_mtime_ns == written
    assert scores(1)["accuracy"] == 1 - (first["accuracy"] or 0.0)
    assert scores(0, 1)["accuracy"] == 0.5


@pytest.mark.parametrize("settings", [{"micro_batch_size": 1}, {"recompute": True}], ids=str)
def test_accumulated_gradients_and_recomputed_activations_change_nothing(
    settings: dict[str, int], texts: Path, tmp_path: Path
) -> None:
    whole, other = configured(texts, tmp_path / "whole"), configured(texts, tmp_path / "other", **settings)
    run(whole)
    run(other)
    np.testing.assert_allclose(losses(whole), losses(other), rtol=1e-5)


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
        split: Part(shards=(write_shard(tmp_path, split, tokens_N.astype(np.uint16), documents_D3),))
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
        record = train(config, {}, corpus, world, Progress(Console(quiet=True), config))
        tensors, _ = load_tensors(newest(identity(config, {}, corpus.folder.name).folder) or tmp_path)
        curves.append((record, rows_of(tensors)))
    (one, rows), (other, others) = curves
    np.testing.assert_allclose([row.loss for row in others], [row.loss for row in rows], rtol=0, atol=0.02)
    assert abs(loss_of(one) - loss_of(other)) < 0.02


AGENTS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(config: Config, *extra: str) -> None:
    """Run the command in two processes, as ``torchrun --nproc-per-node=2`` does."""
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
    program = "runners.c4.__main__", [*words_of(config), *extra], output

    # The agent leaves its handlers of signals behind.
    handlers = {number: signal.getsignal(number) for number in AGENTS_SIGNALS}
    try:
        with patch.object(dynamic_rendezvous, "construct_and_record_rdzv_event"):  # it reads the source of all callers
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
    if parallel == "fsdp":  # goes on from step 3, whose tensors are spread over the processes again
        folder = folder_of(together)
        (folder / RECORD).unlink()
        (folder / "checkpoints" / "step-00000004.safetensors").unlink()
        launch(together, "--parallel", parallel)
        np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    one, two = last_tensors(alone), last_tensors(together)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_results_folder_that_a_process_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes, the other one sees none of the files that this one writes."""
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda values: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    two = World(rank=0, size=2, device=torch.device("cpu"))
    for other, refused in ((0.0, False), (1.0, True)):
        monkeypatch.setattr("torch.distributed.all_reduce", lambda values, other=other: values.add_(other))
        with pytest.raises(ValueError, match="is not one folder for all processes") if refused else nullcontext():
            require_shared(tmp_path / "out", two)
        assert list((tmp_path / "out").iterdir()) == []
    require_shared(tmp_path / "alone", ALONE)
    assert not (tmp_path / "alone").exists()
