"""What is refused of a layer before it is trained, and that no layer of the project would be."""

import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mixers import MIXERS
from mixers.adapt import adapt
from mixers.base import ContractError, Shape, log_once
from mixers.contract import check_held, check_layer
from mixers.costs import costs
from mixers.registry import find_mixer
from mixers.transformer import Transformer
from runners import records
from runners.ending import run_command
from runners.mad import __main__ as mad
from runners.mad import checks, study
from runners.mad.training.ensemble import Ensemble
from runners.mad.training.protocol import Optimizer, Run
from tests.mixers import strangers
from tests.runners.mad.commands import planned
from tests.runners.processes import forks

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
COMMAND = [
    *("--task", "in-context-recall", "--task.length", "16", "--task.train-examples", "64", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--steps", "3", "--task.eval-examples", "30"),
]


class Faulty(Transformer):
    """A Transformer whose outputs ``fault`` changes."""

    fault: Callable[[Tensor], Any]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return type(self).fault(super().forward(x_BTD))


FAULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "later": (lambda z: z + z.roll(-1, 1), "is not causal"),
    "all positions": (lambda z: z + z.mean(1, keepdim=True), "is not causal"),
    "other sequences": (lambda z: z - z.mean(0), "of another one"),
    "random": (lambda z: F.dropout(z, 0.1), "other outputs when it is called again"),
    "one position less": (lambda z: z[:, :-1], "it returned (2, 15, 16)"),
    "narrower": (lambda z: z[..., :-1], "it returned (2, 16, 15)"),
    "two": (lambda z: (z, z), "it returned tuple"),
    "nothing": (lambda z: None, "it returned NoneType"),
    "float64": (lambda z: z.double(), "it returned torch.float64"),
    "infinite": (
        lambda z: z + torch.exp(torch.arange(z.shape[1]) * 6.0)[:, None],
        "not finite for standard normal inputs, first at position 15 of 16",
    ),
}


def faulty(fault: Callable[[Tensor], Any]) -> type[Faulty]:
    return type("L", (Faulty,), {"fault": staticmethod(fault)})


@pytest.mark.parametrize("name", FAULTS)
def test_a_layer_that_makes_results_wrong_is_refused(name: str) -> None:
    fault, message = FAULTS[name]
    with pytest.raises(ContractError, match=re.escape(message)):
        check_layer("faulty", faulty(fault)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32)), CPU, 16)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_command_refuses_it_in_one_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    fault, message = FAULTS["later"]
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=faulty(fault)))
    command = [*COMMAND, "--mixer", "transformer", "layers_of_others:L", "--mixer.heads", "2"]
    assert message in refused(*command, *more)


class Double(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dim, dtype=torch.float64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.double() @ self.w


class Mapping(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.out(x_BTD)


class Writing(Mapping):
    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD += 1
        return super().forward(x_BTD)


class Moody(Mapping):
    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD) * (1 if self.training else torch.nan)


class Seeding(Moody):
    def __init__(self, dim: int) -> None:
        torch.manual_seed(0)
        super().__init__(dim)


class Late(Mapping):
    """Looks ahead in sequences longer than those of training; no sequence may have more than 80 positions."""

    longest = 80

    def forward(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.shape[1] > self.longest:
            raise IndexError("too long")
        return super().forward(x_BTD) + (x_BTD.flip(1) if x_BTD.shape[1] > 24 else 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Double, "parameter 'mixer.w' is torch.float64, but parameters are torch.float32: give it that dtype"),
        (Writing, "it writes into its inputs, or into a view of them: make new tensors"),
        (Moody, "outputs differ between training and evaluation mode"),
        (Seeding, "it seeds PyTorch's generator itself: remove torch.manual_seed"),
    ],
)
def test_dtypes_writes_modes_and_seeds_that_training_cannot_have_are_refused_in_one_line(
    kind: type[nn.Module], message: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=kind))
    assert message in refused(*COMMAND, "--mixer", "layers_of_others:L")


PYTORCHS = "torch.nn:TransformerEncoderLayer --mixer.nhead 2 --mixer.dropout 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (PYTORCHS, "with the inputs of another one: give --mixer.batch-first True"),
        (f"{PYTORCHS} --mixer.batch-first True", "there: it may need a mask (docs/your-layer.md)"),
        ("torch.nn:GRU --mixer.batch-first True", "the constructor of GRU names no argument for the model width"),
        ("tests.mixers.strangers:GatedToy --mixer.hidden-size 8", "--mixer.hidden-size takes the model width"),
        ("rt --mixer.block None", "block: Input should be a valid integer, not None"),
    ],
)
def test_options_that_do_not_suit_a_layer_are_one_line(words: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(*COMMAND, "--mixer", *words.split())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            type("L", (nn.Module,), {"__init__": lambda self, dim: nn.Module.__init__(self)}),
            'missing the required "forward"',
        ),
        (
            strangers.Attention,
            "arguments: 'angles' and 'mask'; a layer is called with its inputs alone: write one that",
        ),
    ],
)
def test_a_call_that_fails_outside_of_the_layers_code_is_one_line(
    kind: type[nn.Module], message: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no line of the user's code to name."""
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=kind))
    options = ["--mixer.heads", "2"] if kind is strangers.Attention else []
    error = refused(*COMMAND, "--mixer", "layers_of_others:L", *options)
    assert "mixer 'layers_of_others:L': " in error
    assert message in error


def test_what_the_backward_pass_raises_is_passed_on_with_the_layers_name() -> None:
    class Backwardless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

    layer = faulty(Backwardless.apply)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
    with pytest.raises(NotImplementedError) as caught:
        check_layer("faulty", layer, CPU)
    assert caught.value.__notes__ == ["while mixer 'faulty' was called, and its gradients computed"]


class Doubled(torch.autograd.Function):
    """A function without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


class OneByOne(Mapping):
    """What vmap cannot compute, by its name."""

    def __init__(self, dim: int, kind: str = "if") -> None:
        super().__init__(dim)
        self.kind = kind
        self.gru, self.dropout = nn.GRU(dim, dim, batch_first=True), nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.register_buffer("projection", torch.randn(dim, dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.out(x @ self.projection)
        return {
            "gru": lambda: self.gru(z)[0],
            "function": lambda: Doubled.apply(z),
            "dropout": lambda: self.dropout(z),
            "write": lambda: torch.zeros(z.shape).add_(z),
            "if": lambda: z if z.sum() < torch.inf else x,
            "recomputed": lambda: checkpoint(self.out, z, use_reentrant=False),
            "kept": lambda: x @ self.keep() if z.sum() < torch.inf else x,
        }[self.kind]()

    def keep(self) -> Tensor:
        """Return a product of the first call."""
        if "held" not in vars(self):
            self.held = (self.out.weight * self.out.bias).detach()
        return self.held


@pytest.mark.parametrize("kind", ["gru", "function", "dropout", "write", "if", "recomputed"])
def test_what_vmap_cannot_compute_is_trained_one_run_after_another_and_a_line_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run trains as alone, where nothing is shared and nothing is computed at once."""
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=OneByOne))
    lines: list[str] = []
    command = [*COMMAND, "--mixer", "layers_of_others:L", "--mixer.kind", kind]
    (experiment,) = checks.check(planned(command)[1], 6, CPU, lines.append)
    (line,) = lines
    assert line.startswith("layers_of_others:L: runs are trained one after another, which is slower; torch.func.vmap")
    assert "\n" not in line
    assert experiment.one_by_one

    runs = [Run(lr=1e-2, weight_decay=0.1, seed=seed) for seed in (0, 1)]
    tokens_RBT = torch.from_numpy(experiment.instance.split("train").inputs_ST[:8]).view(2, 4, -1)
    together, *alone = (
        Ensemble(experiment.build, members, experiment.protocol.optimizer, 3, CPU) for members in (runs, *zip(runs))
    )
    for _ in range(3):
        losses = together.train_step(tokens_RBT, tokens_RBT)
        own = [one.train_step(x, x) for one, x in zip(alone, tokens_RBT.split(1), strict=True)]
        torch.testing.assert_close(losses, torch.cat(own))
    torch.testing.assert_close(together.params_RP, torch.cat([one.params_RP for one in alone]))


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        ("exit()", "SystemExit: None"),
        ("sys.exit()", "SystemExit"),
        ("quit(0)", "SystemExit: 0"),
        ("return None", "it returned NoneType"),
        ("return self.out(x).half()", "it returned torch.float16"),
        ("return {}", "it returned an empty dict"),
        ("return {'loss': self.out(x).sum()}", "it returned a dict that begins with shape ()"),
        ("return self.out(x).flatten(1)", "it returned (2, 256)"),
    ],
)
def test_however_a_layer_leaves_it_is_one_line_and_status_2(
    leave: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: Callable[..., str]
) -> None:
    lines = ["import sys", "from torch import nn", "class L(nn.Module):", " def __init__(self, dim):"]
    lines += ["  super().__init__()", "  self.out = nn.Linear(dim, dim)", " def forward(self, x):", f"  {leave}"]
    (tmp_path / "leaving.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    with pytest.raises((ValueError, SystemExit)):
        study(
            *("leaving:L", "in-context-recall"),
            task_options={"train_examples": 64, "eval_examples": 30},
            width=16,
            out=tmp_path / "out",
            device="cpu",
        )
    command = [*COMMAND, "--mixer", "leaving:L", "--out", str(tmp_path / "out")]
    error = ended(run_command, lambda: mad.main(command), "interrupted")
    assert error.startswith("error: ")
    assert said in error


def test_a_layer_that_keeps_tensors_from_run_to_run_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=OneByOne))
    error = refused(*COMMAND, "--mixer", "layers_of_others:L", "--mixer.kind", "kept")
    assert "change when another run is computed before it: keep no tensor" in error


@pytest.mark.parametrize("mixer", ["transformer", "rt", "mamba", "layers_of_others:L"])
def test_one_by_one_and_all_at_once_are_equal(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Random))
    (experiment,) = planned([*COMMAND, "--mixer", mixer, *(["--mixer.heads", "2"] if mixer[0] in "tr" else [])])[1]
    runs = [Run(lr=1e-2, weight_decay=0.1, seed=seed) for seed in (0, 1)]
    tokens_RBT = torch.from_numpy(experiment.instance.split("train").inputs_ST[:8]).view(2, 4, -1)
    losses = []
    for one_by_one in (False, True):
        build = replace(experiment, one_by_one=one_by_one).build
        ensemble = Ensemble(build, runs, experiment.protocol.optimizer, 3, CPU)
        losses.append(torch.stack([ensemble.train_step(tokens_RBT, tokens_RBT) for _ in range(3)]))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


class Random(nn.Module):
    """What packages have: random buffers, frozen tables, scalar, expanded, marked and tied parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(dim, dim))
        self.table = nn.Parameter(torch.arange(dim), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(1).expand(dim))
        self.rate, self.rate_again = (nn.Parameter(self.gain.data[:1]) for _ in range(2))
        self.A_log = nn.Parameter(torch.randn(dim, dim))
        self.A_log._no_weight_decay = True
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.a, self.b = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        z: Tensor = (x @ self.projection + self.table).cumsum(1) / count @ self.A_log
        return z * self.gain * self.rate + self.rate_again + self.temperature * self.b(self.a(x))


@pytest.mark.usefixtures("undrawn")
def test_buffers_and_parameters_of_all_kinds_train_as_each_run_alone_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kept model has the buffers of its seed, or its accuracy would be another."""
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Random))
    command = [*COMMAND, "--mixer", "layers_of_others:L", "--lr", "1e-3", "--weight-decay", "0.1", "--seeds", "2"]
    mad.main([*command, "--out", str(tmp_path)])
    (diagnosis,) = tmp_path.glob("studies/*/diagnosis.json")
    found = records.load(tmp_path)
    assert json.loads(diagnosis.read_text())["accuracy"]["token"] in found["test.token_accuracy"].tolist()
    assert set(found["parameters"]) == {
        costs(adapt(Random), adapt(Random).Config(), Shape(width=16, mlp_width=32)).parameters
    }

    (experiment,) = planned(command)[1]
    runs = [Run(lr=0.1, weight_decay=0.5, seed=seed) for seed in (0, 1)]
    ensemble = Ensemble(experiment.build, runs, experiment.protocol.optimizer, 3, CPU)
    assert [*ensemble.own] == ["layers.0.mixer.projection"]
    assert "layers.0.mixer.table" not in ensemble.shapes
    before = {name: y.clone() for name, y in ensemble.named(ensemble.params_RP).items()}
    ensemble.optimizer.update(ensemble.params_RP, torch.zeros_like(ensemble.params_RP), torch.zeros(2))
    kept = [name for name, y in ensemble.named(ensemble.params_RP).items() if torch.equal(y, before[name])]
    assert "layers.0.mixer.A_log" in kept
    assert "layers.0.mlp.up.weight" not in kept


@pytest.mark.parametrize("name", MIXERS)
def test_no_layer_of_the_project_would_be_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    layer, other = (MIXERS[name](MIXERS[name].Config(), Shape(width=64, mlp_width=128)) for _ in range(2))
    check_held(name, layer, other)
    assert check_layer(name, layer, CPU, positions=20) == []
    assert [message for message in caplog.messages if "compiles C code" not in message] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MIXERS)
def test_nor_would_it_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    layer = MIXERS[name](MIXERS[name].Config(), Shape(width=64, mlp_width=128))
    assert check_layer(name, layer, torch.device("cuda")) == []


DOCUMENTED = ROOT / "docs" / "examples"
EXAMPLES = {"running_mean": "RunningMean", "decaying_mean": "DecayingMean", "parallel_mean": "ParallelMean"}


def test_a_layer_is_tried_on_the_longest_sequences_of_the_test_if_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Late=Late))
    command = ["--mixer", "layers_of_others:Late", "--task", "parity", "--task.length", "20", *COMMAND[6:]]
    command += ["--task.train-examples", "64"]
    assert "is not causal" in refused(*command, "--task.extrapolation-factors", "4")
    for factors in (["5"], []):  # a layer of limited length has no figures there
        checks.check(planned([*command, "--task.extrapolation-factors", *factors])[1], 6, CPU)


PACKAGES = {"with_config": [], "recurrent": ["torch.func.vmap cannot"], "with_rotary": [], "block": []}
"""Examples for layers of packages, with what is said of them."""


@pytest.mark.parametrize("module", PACKAGES)
def test_layers_from_packages_train_as_the_documentation_shows(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    monkeypatch.syspath_prepend(DOCUMENTED)
    monkeypatch.setitem(sys.modules, "package", strangers)
    lines: list[str] = []
    name = f"{module}:{module.title().replace('_', '')}"
    (experiment,) = checks.check(planned([*COMMAND, "--mixer", name])[1], 6, CPU, lines.append)
    assert [part in line for part, line in zip(PACKAGES[module], lines, strict=True)] == [True] * len(lines)
    assert caplog.messages == []

    ensemble = Ensemble(experiment.build, [Run(lr=1e-2, weight_decay=0.1, seed=0)], Optimizer(), 3, CPU)
    tokens_RBT = torch.from_numpy(experiment.instance.split("train").inputs_ST[None, :8])
    first, *_, last = [float(ensemble.train_step(tokens_RBT, tokens_RBT)) for _ in range(3)]
    assert last < first


@pytest.mark.parametrize("module", EXAMPLES)
@pytest.mark.usefixtures("undiagnosed")
def test_the_layers_that_the_documentation_shows_train(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those with a step form agree with it, or the command would refuse them."""
    monkeypatch.syspath_prepend(DOCUMENTED)
    name = f"{module}:{EXAMPLES[module]}"
    option = {"running_mean": ["--mixer.strength", "0.8"], "decaying_mean": ["--mixer.decay", "0.8"]}.get(module, [])
    mad.main([*COMMAND, "--mixer", name, *option, "--lr", "1e-3", "--out", str(tmp_path / "out")])
    label = "-".join([name, *(word.removeprefix("--mixer.") for word in option)])
    assert f"{label} on in-context-recall (custom): " in capsys.readouterr().out
    assert (costs(find_mixer(name), find_mixer(name).Config(), Shape(width=16)).state_floats is None) == (
        module == "running_mean"
    )


def write_strength(folder: Path) -> None:
    """Body of a process: build the model of a pickled experiment, and write its option to a file."""
    sys.path.insert(0, str(DOCUMENTED))
    model = pickle.loads((folder / "experiment").read_bytes()).build()
    (folder / "strength").write_text(str(model.stack[0].mixer.strength))


def test_a_plain_module_reaches_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the class of its settings is made again."""
    monkeypatch.syspath_prepend(DOCUMENTED)
    name = "running_mean:RunningMean"
    _, (experiment,) = planned([*COMMAND, "--mixer", name, "--mixer.strength", "0.8"])
    (tmp_path / "experiment").write_bytes(pickle.dumps(replace(experiment)))
    process = forks().Process(target=write_strength, args=(tmp_path,), daemon=True)
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert (tmp_path / "strength").read_text() == "0.8"


class Spare(Mapping):
    """A module with a parameter that it does not use."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.a = nn.Parameter(torch.zeros(dim))


def test_a_parameter_that_gets_no_gradient_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(A=Spare, C=OfOneSeed))
    mad.main([*COMMAND, "--mixer", "layers_of_others:A", "--dry-run", "--out", str(tmp_path / "out")])
    said = "mixer 'layers_of_others:A': no gradient reaches mixer.a, which counts as a parameter all the same"
    assert said in caplog.messages
    mad.main([*COMMAND, "--mixer", "layers_of_others:C", "--dry-run", "--out", str(tmp_path / "out")])
    assert "no parameter depends on the seed, not even mixer.w: if it is drawn at random" in caplog.text


class OfOneSeed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dim, generator=torch.Generator().manual_seed(0)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD @ self.w


@pytest.mark.usefixtures("undrawn")
def test_a_layer_of_bounded_length_trains_and_the_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bounded(MIXERS["gla"]):  # type: ignore[misc]  # its state has one size, and is counted at once
        longest = 16

        def forward(self, x_BTD: Tensor) -> Tensor:
            if x_BTD.shape[1] > self.longest:
                raise KeyError(f"at most [{self.longest}] positions")
            return super().forward(x_BTD)

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Bounded))
    command = ["--mixer", "layers_of_others:L", "transformer", "--mixer.heads", "2", "--lr", "1e-3"]
    command += [*COMMAND, "--task", "parity", "--out", str(tmp_path)]
    del command[command.index("--task") : command.index("--task") + 2]
    without = (
        "'{}': layers_of_others:L-heads-2 on parity (custom) cannot be read there: KeyError: 'at most [16] positions'\n"
    )
    for _ in range(2):
        mad.main(command)
        text = capsys.readouterr().out
        assert all(f"diagnosis without {without}".format(f"length {length}") in text for length in (32, 64))
        assert "\nchart: " in text
    for diagnosis in tmp_path.glob("studies/layers_of_others*/diagnosis.json"):
        diagnosis.unlink()
    monkeypatch.setattr(Bounded, "longest", 0)
    monkeypatch.setattr("runners.mad.search.check", lambda experiments, *_: experiments)
    mad.main(command)
    text = capsys.readouterr().out
    assert "no diagnosis: KeyError: 'at most [0] positions'" in text
    assert "\nchart: " in text
