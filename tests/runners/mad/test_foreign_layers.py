"""What is refused of a layer before it is trained, and that no layer of the project would be."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mixers import MIXERS
from mixers.base import ContractError, Shape
from mixers.contract import check_held, check_layer
from mixers.costs import costs
from mixers.registry import find_mixer
from mixers.transformer import Transformer
from runners import records
from runners.mad import __main__ as mad
from runners.mad import checks
from tests.mixers import strangers
from tests.runners.mad.commands import planned

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
COMMAND = [
    *("--task", "in-context-recall", "--task.length", "16", "--task.train-examples", "64", "--batch-size", "16"),
    *("--width", "16", "--mlp-width", "32", "--device", "cpu", "--steps", "3"),
]


class Faulty(Transformer):
    """A Transformer whose outputs ``fault`` changes."""

    fault: Callable[[Tensor], Any]

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = type(self).fault(super().forward(x_BTD))
        return result


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
}


def faulty(fault: Callable[[Tensor], Any]) -> type[Faulty]:
    return type("L", (Faulty,), {"fault": staticmethod(fault)})


@pytest.mark.parametrize("name", FAULTS)
def test_a_layer_that_makes_results_wrong_is_refused_in_one_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fault, message = FAULTS[name]
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=faulty(fault)))
    command = [*COMMAND, "--mixer", "transformer", "layers_of_others:L", "--mixer.heads", "2"]
    in_training, in_dry_run = refused(*command), refused(*command, "--dry-run")
    assert message in in_training
    assert in_dry_run == in_training


class Complex(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dim, dtype=torch.complex64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        z_BTD: Tensor = (x_BTD.cumsum(1).to(torch.complex64) @ self.w).real
        return z_BTD


class Double(Complex):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.w = nn.Parameter(torch.randn(dim, dim, dtype=torch.float64))


class Whole(Complex):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.w = nn.Parameter(torch.ones(dim, dim, dtype=torch.int64), requires_grad=False)


class Writing(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD += 1
        z_BTD: Tensor = self.out(x_BTD)
        return z_BTD


class Moody(Writing):
    def forward(self, x_BTD: Tensor) -> Tensor:
        z_BTD: Tensor = self.out(x_BTD)
        return z_BTD if self.training else z_BTD * torch.nan


class Late(Writing):
    """Looks ahead in sequences longer than those of training; no sequence may have more than 80 positions."""

    longest = 80

    def forward(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.shape[1] > self.longest:
            raise IndexError("too long")
        z_BTD: Tensor = self.out(x_BTD)
        return z_BTD + x_BTD.flip(1) if x_BTD.shape[1] > 24 else z_BTD


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Complex, "'mixer.w' is torch.complex64, but parameters are torch.float32: store real and imaginary part"),
        (Double, "parameter 'mixer.w' is torch.float64, but parameters are torch.float32: give it that dtype"),
        (Whole, "parameter 'mixer.w' is torch.int64, but parameters are torch.float32: make it a buffer"),
        (Writing, "it writes into its inputs, or into a view of them: make new tensors"),
        (Moody, "outputs differ between training and evaluation mode"),
    ],
)
def test_dtypes_writes_and_modes_that_training_cannot_have_are_refused_in_one_line(
    kind: type[nn.Module], message: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=kind))
    assert message in refused(*COMMAND, "--mixer", "layers_of_others:L")


def test_a_call_that_fails_outside_of_the_layers_code_is_one_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no line of the user's code to name."""
    forwardless = type("L", (nn.Module,), {"__init__": lambda self, dim: nn.Module.__init__(self)})
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=forwardless))
    error = refused(*COMMAND, "--mixer", "layers_of_others:L")
    assert "mixer 'layers_of_others:L': NotImplementedError while it was called: " in error
    assert 'missing the required "forward"' in error


def test_what_the_layer_raises_is_passed_on_with_its_name() -> None:
    layer = faulty(lambda z: z.no_such_thing)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
    with pytest.raises(AttributeError, match="no_such_thing") as caught:
        check_layer("faulty", layer, CPU)
    assert caught.value.__notes__ == ["while mixer 'faulty' was called"]


def test_so_is_what_its_backward_pass_raises() -> None:
    class Backwardless(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

    layer = faulty(Backwardless.apply)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
    with pytest.raises(NotImplementedError) as caught:
        check_layer("faulty", layer, CPU)
    assert caught.value.__notes__ == ["while mixer 'faulty' was called, and its gradients computed"]


def test_what_fails_backwards_for_all_runs_alone_is_found_before_training(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    class Recomputed(Transformer):
        def forward(self, x_BTD: Tensor) -> Tensor:
            z_BTD: Tensor = checkpoint(super().forward, x_BTD, use_reentrant=False)
            return z_BTD

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Recomputed))
    for more in ([], ["--dry-run"]):
        error = refused(*COMMAND, "--mixer", "transformer", "layers_of_others:L", "--mixer.heads", "2", *more)
        assert error.startswith("error: mixer Recomputed cannot be computed for all runs at once: ")
        assert "recompute nothing by torch.utils.checkpoint" in error


def test_so_is_what_fails_backwards_only_at_the_length_of_training(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    class Copied(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (dz_BTD,) = gradients
            return dz_BTD if dz_BTD.shape[1] <= 32 else dz_BTD * float(dz_BTD.sum().isfinite())

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=faulty(Copied.apply)))
    command = [*COMMAND, "--mixer", "layers_of_others:L", "--mixer.heads", "2"]
    command[command.index("--task.length") + 1] = "48"
    for more in ([], ["--dry-run"]):
        error = refused(*command, *more)
        assert error.startswith("error: mixer L cannot be computed for all runs at once: ")
        assert "in test_so_is_what_fails_backwards_only_at_the_length_of_training.<locals>.Copied.backward: " in error
        assert "read no value of a tensor in Python" in error


def test_outputs_that_are_not_finite_are_refused() -> None:
    def overflow(z_BTD: Tensor) -> Tensor:
        return z_BTD + torch.exp(torch.arange(z_BTD.shape[1]) * 5.0)[:, None]

    layer = faulty(overflow)(Transformer.Config(heads=2), Shape(width=16, mlp_width=32))
    with pytest.raises(ContractError, match=r"not finite for standard normal inputs, first at position 18 of 32$"):
        check_layer("faulty", layer, CPU)


@pytest.mark.parametrize("name", MIXERS)
def test_no_layer_of_the_project_would_be_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    layer, other = (MIXERS[name](MIXERS[name].Config(), Shape(width=64, mlp_width=128)) for _ in range(2))
    check_held(name, layer, other)
    assert check_layer(name, layer, CPU) == []
    assert caplog.messages == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MIXERS)
def test_nor_would_it_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    layer = MIXERS[name](MIXERS[name].Config(), Shape(width=64, mlp_width=128))
    assert check_layer(name, layer, torch.device("cuda")) == []


EXAMPLES = {"running_mean": "RunningMean", "decaying_mean": "DecayingMean", "parallel_mean": "ParallelMean"}


def test_a_layer_is_tried_on_the_longest_sequences_of_the_test_if_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Late=Late))
    command = ["--mixer", "layers_of_others:Late", "--task", "parity", "--task.length", "20", *COMMAND[6:]]
    command += ["--task.train-examples", "64", "--task.eval-examples", "16"]
    assert "is not causal" in refused(*command, "--task.extrapolation-factors", "4")
    for factors in (["5"], []):  # a layer of limited length has no figures there
        checks.check(planned([*command, "--task.extrapolation-factors", *factors])[1], 6, CPU)


def save_example(module: str, folder: Path) -> str:
    """Save an example of docs/own-layers.md as a module, and return its name on the command line."""
    text = (ROOT / "docs" / "own-layers.md").read_text()
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, flags=re.DOTALL)
    assert [name for name, _ in blocks] == [*EXAMPLES, "count_mod"]
    (folder / f"{module}.py").write_text(dict(blocks)[module])
    return f"{module}:{EXAMPLES[module]}"


@pytest.mark.parametrize("module", EXAMPLES)
@pytest.mark.usefixtures("undiagnosed")
def test_the_layers_that_the_documentation_shows_train(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those with a step form agree with it, or the command would refuse them."""
    monkeypatch.syspath_prepend(tmp_path)
    name = save_example(module, tmp_path)
    option = {"running_mean": ["--mixer.strength", "0.8"], "decaying_mean": ["--mixer.decay", "0.8"]}.get(module, [])
    mad.main([*COMMAND, "--mixer", name, *option, "--lr", "1e-3", "--out", str(tmp_path / "out")])
    label = "-".join([name, *(word.removeprefix("--mixer.") for word in option)])
    assert f"in-context-recall · {label} · custom" in capsys.readouterr().out
    assert (costs(find_mixer(name), find_mixer(name).Config(), Shape(width=16)).state_floats is None) == (
        module == "running_mean"
    )


@pytest.mark.usefixtures("undiagnosed")
def test_a_module_of_another_library_trains_without_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(strangers.__file__), tmp_path / "stranger.py")
    monkeypatch.syspath_prepend(tmp_path)
    command = ["--task", "compression", "--task.train-examples", "64", "--task.eval-examples", "30", *COMMAND[6:]]
    command += ["--mixer", "stranger:GatedToy", "--mixer.num-heads", "2", "--mixer.layer-idx", "3"]
    mad.main([*command, "--mixer.use-gate", "False", "--lr", "1e-3", "--out", str(tmp_path / "results")])
    label = "stranger:GatedToy-num-heads-2-no-use-gate-layer-idx-3"
    assert f"compression · {label} · custom" in capsys.readouterr().out


def test_a_plain_module_reaches_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the class of its settings is made again."""
    monkeypatch.syspath_prepend(tmp_path)
    name = save_example("running_mean", tmp_path)
    _, (experiment,) = planned([*COMMAND, "--mixer", name, "--mixer.strength", "0.8"])
    (tmp_path / "experiment").write_bytes(pickle.dumps(replace(experiment)))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).build().stack[0].mixer.strength)"
    command = [sys.executable, "-c", code, str(tmp_path / "experiment")]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    assert subprocess.run(command, env=os.environ | paths, capture_output=True, check=True, text=True).stdout == "0.8\n"


class WithLSTM(Transformer):
    """A layer that holds a module of PyTorch without a rule for vmap."""

    def __init__(self, config: Transformer.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.cell = torch.nn.LSTM(shape.width, shape.width, batch_first=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        z_BTD: Tensor = self.cell(x_BTD)[0]
        return z_BTD

    def init_state(self, batch: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_the_error_before_training_names_that_module(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], more: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=WithLSTM))
    error = refused(*COMMAND, "--mixer", "layers_of_others:L", "--mixer.heads", "2", *more)
    assert error.startswith("error: mixer WithLSTM cannot be computed for all runs at once: ")
    assert "vmap has no rule for nn.LSTM (layers.0.cell): write out its gates" in error
    assert "Batching rule not implemented" in error


class Spare(nn.Module):
    """A module with a parameter that it does not use."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(dim))
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        z_BTD: Tensor = self.out(x_BTD)
        return z_BTD


class SpareBranching(Spare):
    """It cannot be computed for several runs at once."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD) if x_BTD.sum() < torch.inf else x_BTD


def test_one_parameter_that_gets_no_gradient_is_said_once_the_layer_has_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: Callable[..., str]
) -> None:
    """Before an error of the same layer, or of another one, it would mislead."""
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(A=Spare, B=SpareBranching))
    for mixers in (["layers_of_others:B"], ["layers_of_others:A", "layers_of_others:B"]):
        assert "mixer SpareBranching cannot be computed" in refused(*COMMAND, "--mixer", *mixers)
        assert caplog.messages == []
    mad.main([*COMMAND, "--mixer", "layers_of_others:A", "--dry-run", "--out", str(tmp_path / "out")])
    said = "mixer 'layers_of_others:A': no gradient reaches mixer.a, which counts as a parameter all the same"
    assert said in caplog.messages


class Usual(Transformer):
    """What many layers have: a scalar parameter, a table that is not trained, one matrix under two names."""

    def __init__(self, config: Transformer.Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.arange(float(shape.width)))
        self.a, self.b = (torch.nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.b.weight = self.a.weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD) + self.temperature * self.b(self.a(x_BTD * self.table))

    def init_state(self, batch: int) -> Any:
        raise NotImplementedError


@pytest.mark.usefixtures("undrawn")
def test_scalars_buffers_and_tied_weights_train_and_are_diagnosed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Usual))
    mad.main([*COMMAND, "--mixer", "layers_of_others:L", "--mixer.heads", "2", "--lr", "1e-3", "--out", str(tmp_path)])
    (diagnosis,) = tmp_path.glob("studies/*/diagnosis.json")
    (figure,) = records.load(tmp_path)["test.token_accuracy"].dropna()
    assert json.loads(diagnosis.read_text())["accuracy"]["token"] == pytest.approx(figure)


class Named(Transformer):
    @dataclass(frozen=True, kw_only=True)
    class Config(Transformer.Config):
        text: str = ""


def test_options_that_are_long_or_look_like_formulas_are_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Named))
    text = r"$\frac{a$ _^" + "é" * 300
    more = ["--mixer.heads", "2", "--mixer.text", text, "--lr", "1e-3", "--out", str(tmp_path)]
    mad.main([*COMMAND, "--mixer", "layers_of_others:L", *more])
    assert "\nchart: " in capsys.readouterr().out
    assert len([*tmp_path.glob("studies/*/diagnosis.png")]) == 1


@pytest.mark.usefixtures("undrawn")
def test_a_layer_of_bounded_length_trains_and_the_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bounded(Usual):
        longest = 16

        def forward(self, x_BTD: Tensor) -> Tensor:
            if x_BTD.shape[1] > self.longest:
                raise KeyError(f"at most [{self.longest}] positions")
            return super().forward(x_BTD)

    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(L=Bounded))
    command = ["--mixer", "layers_of_others:L", "transformer", "--mixer.heads", "2", "--lr", "1e-3"]
    command += [*COMMAND, "--task", "parity", "--task.eval-examples", "30", "--out", str(tmp_path)]
    del command[command.index("--task") : command.index("--task") + 2]
    without = "'{}': layers_of_others:L on parity (custom) cannot be read there: KeyError: 'at most [16] positions'\n"
    for _ in range(2):
        mad.main(command)
        text = capsys.readouterr().out
        assert all(f"diagnosis without {without}".format(f"length {length}") in text for length in (32, 64))
        assert text.count("\ndiagnosis of the chosen model: ") == 2
        assert "\nchart: " in text
    for diagnosis in tmp_path.glob("studies/layers_of_others*/diagnosis.json"):
        diagnosis.unlink()
    monkeypatch.setattr(Bounded, "longest", 0)
    monkeypatch.setattr(mad, "check", lambda *_: None)
    mad.main(command)
    text = capsys.readouterr().out
    assert "no diagnosis: KeyError: 'at most [0] positions'" in text
    assert "\nchart: " in text
