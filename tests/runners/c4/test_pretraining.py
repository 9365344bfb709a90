"""The pretraining runner: what a kill, several processes, a bad batch or a full disk change, and what they do not."""

import gzip
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch.nn import functional as F

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretraining")

from mixers.base import Shape  # noqa: E402
from mixers.transformer import Transformer  # noqa: E402
from runners import c4, provenance  # noqa: E402
from runners.c4 import __main__ as command  # noqa: E402
from runners.c4 import checkpoints, identity, search  # noqa: E402
from runners.c4.charts import plot_curves  # noqa: E402
from runners.c4.config import Config  # noqa: E402
from runners.c4.corpus.prepare import Corpus, prepare  # noqa: E402
from runners.c4.corpus.shards import Manifest, Part, write_shard  # noqa: E402
from runners.c4.corpus.sources import SPLITS  # noqa: E402
from runners.c4.corpus.windows import Windows  # noqa: E402
from runners.c4.curve import Row, read_curve, write_curve  # noqa: E402
from runners.c4.distributed import World  # noqa: E402
from runners.c4.errors import BusyError, DivergedError, RunError  # noqa: E402
from runners.c4.evaluation.items import read_items  # noqa: E402
from runners.c4.gpu_peak import peak_flops  # noqa: E402
from runners.c4.identity import run_folder  # noqa: E402
from runners.c4.model import build  # noqa: E402
from runners.c4.step import learning_rate  # noqa: E402
from runners.c4.train import train  # noqa: E402
from runners.c4.watchers import Bar, Watcher  # noqa: E402
from runners.files import DamagedFileError, load_tensors, save_tensors  # noqa: E402
from runners.interrupt import StoppedError  # noqa: E402
from runners.storage import Store  # noqa: E402

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "tu", "se") for b in ("n", "r", "s", "")]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of C4-format files and a tokenizer of its words."""
    pytest.importorskip("datasets", reason="needs the extra pretraining")
    folder, dice = tmp_path_factory.mktemp("texts"), random.Random(0)
    documents = [" ".join(dice.choices(WORDS, k=dice.randint(5, 60))) for _ in range(120)]
    for name, part in {"train.0": documents[:60], "train.1": documents[60:100], "validation": documents[100:]}.items():
        lines = "".join(json.dumps({"text": text, "timestamp": "", "url": ""}) + "\n" for text in part)
        (folder / f"c4-{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "</s>"])
    tokenizer.train_from_iterator(documents, trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder


def configured(texts: Path, out: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "width": 16,
        "mlp_width": 32,
        "heads": 2,
        "layers": 2,
        "mixer": "transformer",
        "seq_len": 12,
        "batch_size": 4,
        "steps": 8,
        "lr": 1e-2,
        "validation_tokens": 48,
        "evaluations": 3,
        "checkpoint_every": 3,
        "tokenizer": str(texts / "tokenizer" / "tokenizer.json"),
        "data": (str(texts),),
        "device": "cpu",
        "out": out,
    }
    return Config(**{**values, **changes})


def corpus_of(config: Config) -> Corpus:
    tokens = config.steps * config.batch_size * config.seq_len + 1
    return prepare(config.out, config.data, config.tokenizer, tokens, config.validation_tokens + 1, Console(quiet=True))


def run(config: Config, watchers: Sequence[Watcher] = ()) -> dict[str, Any]:
    return train(config, {}, corpus_of(config), ALONE, watchers)


def folder_of(config: Config) -> Path:
    return run_folder(config, {}, corpus_of(config))


def losses(config: Config) -> list[float]:
    return [row.loss for row in read_curve(folder_of(config))]


def last_tensors(config: Config) -> dict[str, torch.Tensor]:
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    return load_tensors(path)[0]


class Interruption(Exception):
    pass


class At:
    """Does something when a step is done."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def started(self, name: str, description: dict[str, Any], row: Row | None) -> None: ...

    def stepped(self, row: Row) -> None:
        if row.step == self.step:
            self.act()

    def evaluating(self, name: str, number: int, sets: int) -> None: ...

    def finished(self, result: dict[str, Any]) -> None: ...


def interrupt() -> None:
    raise Interruption


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


@pytest.mark.parametrize(("old", "new"), [("0.0", "x"), ("mfu", "share"), ("step", "number"), (",0.5", "")])
def test_a_damaged_curve_is_named(old: str, new: str, tmp_path: Path) -> None:
    row = Row(
        step=1,
        tokens=48,
        loss=2.0,
        lr=1e-2,
        grad_norm=0.0,
        tokens_per_second=9.0,
        mfu=None,
        memory_gib=1.0,
        seconds=3.0,
        validation_loss=0.5,
    )
    write_curve(tmp_path, [row])
    assert read_curve(tmp_path) == [row]
    path = tmp_path / "curve.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DamagedFileError, match=f"^{path} is damaged .*: delete it and run the same command again$"):
        read_curve(tmp_path)


def test_the_validation_loss_is_that_of_the_first_validation_texts_in_order(texts: Path, tmp_path: Path) -> None:
    """Five windows and a rest are asked for, of a corpus with more of them."""
    config = configured(texts, tmp_path, steps=2, validation_tokens=65)
    corpus = prepare(tmp_path, config.data, config.tokenizer, 97, 400, Console(quiet=True))
    result = train(config, {}, corpus, ALONE, [])
    model, tokenizer = checkpoints.load_model(run_folder(config, {}, corpus))
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
    assert "2/2" in out


def test_a_run_of_other_code_is_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])
    monkeypatch.setattr(identity, "run_code", lambda config: "another")
    with pytest.raises(RunError, match=r"^the code of transformer or of its training is not the .* begun with: delete"):
        run(config)
    monkeypatch.undo()
    run(config)


def test_the_code_of_a_run_is_that_which_decides_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    source = provenance._source

    def code(changed: str) -> str:
        def with_more(name: str) -> str | None:
            found = source(name)
            return found if found is None or name != changed else found + "\nX = 1\n"

        monkeypatch.setattr(provenance, "_source", with_more)
        return identity.run_code(Config(mixer="gla"))

    ours = [module.name for module in pkgutil.walk_packages(c4.__path__, "runners.c4.")]
    others = [f"mixers.{name}" for name in ("gla", "lstm", "models", "base", "parts", "ops.numerics")]
    others += [f"runners.{name}" for name in ("device", "cli", "mad.training.loop")]
    unchanged = code("nothing")
    deciding = {
        f"runners.c4.{name}" for name in ("model", "corpus.windows", "distributed", "step", "evaluation.evaluate")
    }
    found = {name for name in [*ours, *others] if code(name) != unchanged}
    assert found == deciding | {
        "mixers.gla",
        "mixers.models",
        "mixers.base",
        "mixers.parts",
        "mixers.ops.numerics",
    }


@pytest.mark.parametrize("mixer", ["rt", "gla"])
def test_a_killed_run_goes_on_bitwise(texts: Path, tmp_path: Path, mixer: str) -> None:
    """Killed two steps after a checkpoint: losses, last checkpoint and result are those of an uninterrupted run."""
    whole = configured(texts, tmp_path / "whole", mixer=mixer)
    killed = replace(whole, out=tmp_path / "killed")
    expected = run(whole)
    with pytest.raises(Interruption):
        run(killed, [At(5, interrupt)])
    got = run(killed)
    assert losses(killed) == losses(whole)
    assert [row.step for row in read_curve(folder_of(killed))] == list(range(1, 9))
    before, after = last_tensors(whole), last_tensors(killed)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert got["validation_loss"] == expected["validation_loss"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_first_signal_saves_and_stops(texts: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    config = configured(texts, tmp_path, checkpoint_every=100)
    before = signal.getsignal(number)
    with pytest.raises(StoppedError, match=r"^stopped after step [45]: the same command goes on from there$") as stop:
        run(config, [At(4, lambda: os.kill(os.getpid(), number))])
    assert stop.value.status == status
    assert signal.getsignal(number) == before
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    saved = load_tensors(path)[1]["step"]
    assert saved in (4, 5)
    seen: list[int] = []
    watcher = At(saved + 1, lambda: seen.append(saved + 1))
    run(config, [watcher, At(saved, interrupt)])
    assert seen == [saved + 1]


def test_a_signal_in_the_last_step_stops_before_anything_else_begins(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(StoppedError, match=r"^stopped after step 8:"):
        run(config, [At(8, lambda: os.kill(os.getpid(), signal.SIGINT))])
    assert not (folder_of(config) / "result.json").exists()
    assert run(config)["validation_loss"] == read_curve(folder_of(config))[-1].validation_loss


def test_a_later_ctrl_c_stops_at_once(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.interrupt.SECONDS_OF_ONE_WISH", -1.0)

    def interrupt_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    config = configured(texts, tmp_path, checkpoint_every=100)
    with pytest.raises(KeyboardInterrupt):
        run(config, [At(4, interrupt_twice)])
    assert checkpoints.newest(folder_of(config)) is None


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


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["rt", "transformer", "gla", "lstm"])
def test_gpu_layers_as_graphs_train_as_on_a_cpu(mixer: str, tmp_path: Path, device: torch.device) -> None:
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
        config = configured(tmp_path, out, mixer=mixer, width=64, micro_batch_size=2, device=world.device.type, lr=1e-3)
        (tmp_path / "tokenizer").mkdir(exist_ok=True)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(config.tokenizer)
        curves.append([train(config, {}, corpus, world, []), read_curve(run_folder(config, {}, corpus))])
    (one, rows), (other, others) = curves
    np.testing.assert_allclose([row.loss for row in others], [row.loss for row in rows], rtol=0, atol=0.02)
    assert abs(one["validation_loss"] - other["validation_loss"]) < 0.02


def launch(config: Config, processes: int, *extra: str) -> subprocess.CompletedProcess[str]:
    shape = ("width", "mlp_width", "heads", "layers", "mixer", "seq_len", "batch_size", "steps", "lr")
    other = ("validation_tokens", "evaluations", "checkpoint_every", "tokenizer", "device", "out")
    arguments = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in (*shape, *other)]
    starter = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, *starter, "-m", "runners.c4", *arguments, "--data", *config.data, *extra],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(texts: Path, tmp_path: Path, parallel: str) -> None:
    alone, together = (configured(texts, tmp_path / name, steps=4) for name in ("alone", "together"))
    run(alone)
    done = launch(together, 2, "--parallel", parallel)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    folder = folder_of(together)
    (folder / "result.json").unlink()
    (folder / "checkpoints" / "step-00000004.safetensors").unlink()
    again = launch(together, 2, "--parallel", parallel)  # goes on from step 3
    assert again.returncode == 0, again.stderr
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-5)
    one, two = last_tensors(alone), last_tensors(together)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_divergence_names_the_step_the_documents_and_the_last_checkpoint(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, lr=1e30, warmup_fraction=0.9)
    with pytest.raises(DivergedError) as error:
        run(config)
    record = json.loads((folder_of(config) / "diverged.json").read_text())
    assert f"step {record['step']}" in str(error.value)
    assert record["documents"]
    assert record["documents"][0] in str(error.value)
    assert "last good checkpoint" in str(error.value)
    with pytest.raises(DivergedError, match="delete"):
        run(config, [At(1, interrupt)])


def test_a_validation_loss_that_is_not_finite_is_divergence(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path, lr=1e30, warmup_fraction=0.0, steps=1)
    with pytest.raises(DivergedError, match="validation loss nan is not finite at step 1"):
        run(config)
    assert checkpoints.newest(folder_of(config)) is None


def test_what_a_kill_left_half_written_is_removed(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    folder = folder_of(config)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])
    for _ in range(2):  # of a run that goes on, and of one that is finished
        for name in ("checkpoints/.tmpAbCdEf", ".result-AbCdEf.json"):
            (folder / name).write_bytes(b"half")
        run(config)
        assert [path.name for path in folder.rglob(".*")] == [".lock"]


def test_how_a_run_is_computed_makes_no_other_run_and_all_else_does(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)
    other = replace(config, recompute=True, data=(f"{texts}/",), micro_batch_size=1, checkpoint_every=7)
    assert folder_of(other) == folder_of(config)
    corpus = corpus_of(config)

    def name(**changes: Any) -> str:
        return run_folder(replace(config, **changes), {}, corpus).name

    changed = {field.name: another(getattr(config, field.name)) for field in fields(Config)}
    same = {option for option, value in changed.items() if name(**{option: value}) == name()}
    computed = {"device", "parallel", "micro_batch_size", "recompute", "checkpoint_every"}
    told_by_the_corpus = {"data", "tokenizer"}
    commanded = {"out", "wandb", "search", "dry_run", "preset", "downstream"}
    assert same == computed | told_by_the_corpus | commanded
    assert run_folder(config, {"heads": 1}, corpus).name != name()


def another(value: Any) -> Any:
    """Another value of an option."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Path | tuple):
        return value / "other" if isinstance(value, Path) else (*value, "other")
    return f"{value} other" if isinstance(value, str | None) else value + 1


def test_a_full_disk_leaves_the_last_checkpoint(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(texts, tmp_path)
    with pytest.raises(Interruption):
        run(config, [At(4, interrupt)])
    path = checkpoints.newest(folder_of(config))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runners.files.save_file", full)
    with pytest.raises(RunError, match=r"no space for .*step-00000006.*step-00000003"):
        run(config)
    monkeypatch.undo()
    assert checkpoints.newest(folder_of(config)) == path
    assert not list(path.parent.glob(".*")) if path else False
    assert run(config)["step"] == 8


def test_a_checkpoint_of_another_model_is_refused(texts: Path, tmp_path: Path) -> None:
    small, large = (configured(texts, tmp_path, width=width, mlp_width=32) for width in (16, 32))
    run(small)
    folder = folder_of(large) / "checkpoints"
    folder.mkdir(parents=True)
    source = checkpoints.newest(folder_of(small))
    assert source is not None
    (folder / source.name).write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match="checkpoint of another model"):
        run(large)


def test_generating_from_a_checkpoint_of_another_version_is_one_line(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path)
    run(config)
    path = checkpoints.newest(folder_of(config))
    assert path is not None
    tensors, info = load_tensors(path)
    values = info["config"]
    for other in (
        {**info, "config": {**values, "dropout": 0.1}},
        {**info, "config": {name: value for name, value in values.items() if name != "data"}},
        {**info, "config": {**values, "width": 32}},
        {**info, "mixer_options": {"window": 3}},
    ):
        save_tensors(path, tensors, other)
        with pytest.raises(SystemExit) as stop:
            command.main(["generate", str(path), "--device", "cpu"])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} is of another version")
        assert error.count("\n") == 1


def test_a_second_command_leaves_a_running_one_alone(texts: Path, tmp_path: Path) -> None:
    config = configured(texts, tmp_path)

    def second() -> None:
        with pytest.raises(BusyError, match="another process"):
            run(config)

    assert run(config, [At(2, second)])["step"] == 8


def test_the_search_trains_each_point_once_and_goes_on(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second of four points; one point diverges."""
    monkeypatch.setattr(search, "LRS", (1e-2, 1e30))
    config = configured(texts, tmp_path, search=True, warmup_fraction=0.9)
    trained: list[str] = []

    class Count(At):
        def started(self, name: str, description: dict[str, Any], row: Row | None) -> None:
            trained.append(name)
            self.step = 5 if len(trained) == 2 else 0

    def go(watcher: Watcher) -> list[tuple[Config, dict[str, Any] | None]]:
        store = Store(tmp_path, str(search.study_file(tmp_path)))
        try:
            return search.search(config, {}, corpus_of(config), ALONE, [watcher], store)
        finally:
            store.close()

    with pytest.raises(Interruption):
        go(Count(0, interrupt))
    results = go(At(0, interrupt))
    assert [(point.lr, point.beta2) for point, _ in results] == [(1e-2, 0.95), (1e-2, 0.99), (1e30, 0.95), (1e30, 0.99)]
    assert [result is None for _, result in results] == [False, False, True, True]
    chosen = search.best(results)
    assert chosen is not None
    assert chosen[1]["validation_loss"] == min(r["validation_loss"] for _, r in results if r is not None)
    assert go(At(0, interrupt)) == results
    store = Store(tmp_path, str(search.study_file(tmp_path)))
    (name,) = optuna.get_all_study_names(store.storage)
    trials = optuna.load_study(study_name=name, storage=store.storage).trials
    store.close()
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert trials[1].value == results[1][1]["validation_loss"] if results[1][1] else False


def test_the_best_point_is_that_of_least_validation_loss() -> None:
    """Not of least loss on the last batch."""
    points = [Config(lr=lr) for lr in (1e-3, 3e-3, 1e-2)]
    low, high = {"validation_loss": 3.0, "loss": 3.5}, {"validation_loss": 3.1, "loss": 2.5}
    assert search.best([(points[0], high), (points[1], None), (points[2], low)]) == (points[2], low)
    assert search.best([(points[1], None)]) is None


def test_the_command_trains_plots_and_generates(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path)
    arguments = [
        "--width=16", "--heads=2", "--layers=2", "--mixer=rt", "--mixer.persistent-norm=False", "--seq-len=12",
        "--batch-size=4", "--steps=4", "--validation-tokens=48", "--device=cpu", f"--out={tmp_path}",
        f"--tokenizer={config.tokenizer}", "--data", *config.data,
    ]  # fmt: skip
    command.main(arguments)
    out = capsys.readouterr().out
    assert "asked for" not in out
    (folder,) = (tmp_path / "c4").iterdir()
    assert "validation cross-entropy" in out
    assert f"generate: python -m runners.c4 generate {folder} --prompt ..." in out
    assert len(list((tmp_path / "figures").glob("c4-*.png"))) == 1
    assert json.loads((folder / "run.json").read_text())["mixer_options"] == {"persistent_norm": False}
    command.main(["generate", str(folder), "--prompt", "kan lor", "--max-new-tokens", "5", "--device", "cpu"])
    assert "kan lor" in capsys.readouterr().out


def test_runs_of_a_chart_are_told_apart_whether_or_not_they_were_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(step=1, tokens=48, loss=3.0, lr=1.0, grad_norm=1.0, tokens_per_second=1.0, mfu=None, memory_gib=0.0,
              seconds=1.0)  # fmt: skip
    folders = [tmp_path / f"run-{i:02}" for i in range(12)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        write_curve(folder, [row, replace(row, step=2, tokens=96, validation_loss=2.0 if i else None)])
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self))
    plot_curves(folders, tmp_path / "chart.png")
    legend = figures[0].axes[0].get_legend()
    *names, validation, training = [text.get_text() for text in legend.get_texts()]
    assert names == [folder.name for folder in folders]
    *lines, thick, thin = legend.get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 12
    assert (validation, training) == ("validation", "training, each step")
    drawn_thin, drawn_thick = figures[0].axes[0].get_lines()[:2]
    for shown, drawn in ((thick, drawn_thick), (thin, drawn_thin)):
        assert (shown.get_linewidth(), shown.get_marker()) == (drawn.get_linewidth(), drawn.get_marker())


def test_a_corpus_that_is_too_small_is_said_and_recorded(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path, batch_size=200, steps=2, validation_tokens=999_999_999)
    corpus = corpus_of(config)
    train_tokens, validation_tokens = (corpus.manifest.splits[split].tokens for split in ("train", "validation"))
    read = (validation_tokens - 1) // 12 * 12
    command.main([
        "--width=16", "--mlp-width=32", "--heads=2", "--layers=2", "--mixer=transformer", "--seq-len=12",
        "--batch-size=200", "--steps=2", "--lr=1e-2", "--validation-tokens=999999999", "--evaluations=3",
        "--checkpoint-every=3", "--device=cpu", f"--out={tmp_path}", f"--tokenizer={config.tokenizer}",
        f"--data={texts}",
    ])  # fmt: skip
    assert (
        f"the train split has {train_tokens:,} tokens: read {4800 / train_tokens:.2f} times; "
        f"validation reads {read:,} tokens of 999,999,999 asked for\n"
    ) in capsys.readouterr().out
    for name in ("run.json", "result.json"):
        record = json.loads((folder_of(config) / name).read_text())
        assert record["config"]["validation_tokens"] == read


def test_a_layer_may_read_values_while_it_is_built(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Decay(Transformer):
        def __init__(self, config: Transformer.Config, shape: Shape) -> None:
            super().__init__(config, shape)
            if shape.layers == 3:
                raise RuntimeError("three are too many")
            self.rates = torch.linspace(0.5, 0.9, shape.width).tolist()

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Decay=Decay))
    arguments = [
        "--mixer=layers_of_others:Decay", "--width=16", "--heads=2", "--seq-len=12", "--batch-size=4", "--steps=2",
        "--validation-tokens=48", "--device=cpu", f"--out={tmp_path}", f"--data={texts}",
        f"--tokenizer={texts / 'tokenizer' / 'tokenizer.json'}",
    ]  # fmt: skip
    command.main([*arguments, "--layers=2", "--dry-run"])
    command.main([*arguments, "--layers=2"])
    assert "validation cross-entropy" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--layers=3"])
    error = "error: cannot build mixer 'layers_of_others:Decay': three are too many\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("form", ["init_state", "step"])
def test_a_layer_without_steps_gets_no_hint_to_generate(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    def none(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setitem(
        sys.modules, "layers_of_others", SimpleNamespace(Whole=type("Whole", (Transformer,), {form: none}))
    )
    command.main([
        "--mixer=layers_of_others:Whole", "--width=16", "--heads=2", "--layers=2", "--seq-len=12", "--batch-size=4",
        "--steps=2", "--validation-tokens=48", "--device=cpu", f"--out={tmp_path}", f"--data={texts}",
        f"--tokenizer={texts / 'tokenizer' / 'tokenizer.json'}",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert "curves: " in out
    assert "generate" not in out


@pytest.mark.usefixtures("logged_out")
def test_wandb_online_without_a_login_is_one_line_before_anything_is_written(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = texts / "tokenizer" / "tokenizer.json", tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        command.main([
            "--preset=tiny", "--device=cpu", f"--data={texts}", f"--tokenizer={tokenizer}", f"--out={out}",
            "--wandb=online",
        ])  # fmt: skip
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "run wandb login, or give --wandb offline" in error
    assert not out.exists()


def test_a_dry_run_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--layers", "6", "--dry-run"])
    out = capsys.readouterr().out
    for word in ("parameters", "FLOPs", "tokens", "GiB"):
        assert word in out
    assert "search" not in out


def test_a_dry_run_refuses_data_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--preset", "tiny", "--dry-run", "--data", str(tmp_path / "none")])
    assert f"error: no file or folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_downstream_sets_that_cannot_be_read_are_found_before_anything_is_tokenised(
    texts: Path, tmp_path: Path, unreachable: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(texts, tmp_path)
    given = ["--preset", "tiny", "--device", "cpu", "--downstream", "hub", "--out", str(tmp_path / "out")]
    given += ["--tokenizer", config.tokenizer, "--data", *config.data]
    command.main([*given, "--dry-run"])
    assert not unreachable
    with pytest.raises(SystemExit) as stop:
        command.main(given)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: baber/piqa cannot be read from the hub (")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_a_search_counts_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--preset", "tiny", "--search", "--dry-run"])
    assert capsys.readouterr().out.endswith("the search trains 6 such runs\n")  # 3 learning rates, 2 values of beta2


@pytest.mark.parametrize("further", [[], ["--dry-run"]])
def test_a_layer_that_sees_later_positions_is_refused_before_data_are_prepared(
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    further: list[str],
) -> None:
    class Peeking(Transformer):
        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return super().forward(x_BTD.roll(-1, 1))

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Peeking=Peeking))
    config = configured(texts, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command.main([
            "--preset", "tiny", "--mixer", "layers_of_others:Peeking", "--tokenizer", config.tokenizer,
            "--data", *config.data, "--out", str(tmp_path), "--device", "cpu", *further,
        ])  # fmt: skip
    assert capsys.readouterr().err.startswith("error: mixer 'layers_of_others:Peeking' is not causal")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "7"], "6, 12"),
        (["--steps", "0"], "steps"),
        (["--mixer", "nope"], "no mixer 'nope'"),
        (["--mixer", "rt", "lstm"], "no option takes lstm: see --help"),
        (["--mixer"], "Missing value for argument '--mixer'"),
        (["--preset"], "Missing value for argument '--preset'"),
        (["--mixer", "transformer", "--mixer.block", "3"], "does not apply"),
        (["--validation-tokens", "10"], "fill no sequence"),
        (["--search", "--lr", "0.1"], "leave --lr"),
        (["--search", f"--beta2={Config.beta2}"], "leave --lr"),
        (["--heads", "3"], "heads: 3"),
        (["--downstream", "/nowhere"], "nowhere"),
        (["--data", "/nowhere/at/all", "--tokenizer", "nowhere.json"], "no file or folder /nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main([*arguments, "--out", str(tmp_path), "--device", "cpu"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "c4").exists()
