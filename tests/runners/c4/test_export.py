"""A model that was exported is the same elsewhere, with this project and without it."""

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from runners.c4 import export as module
from runners.c4 import load_model
from runners.c4.export import export, load_config, main
from runners.files import DamagedFileError
from tests.runners.c4.runs import configured, folder_of, run


@pytest.fixture(scope="module")
def trained(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run whose results folder is gone but for itself."""
    config = configured(texts, tmp_path_factory.mktemp("out"), steps=2, evaluations=1)
    run(config)
    moved = tmp_path_factory.mktemp("moved") / "run"
    shutil.move(folder_of(config), moved)
    return moved


def test_an_exported_model_computes_what_the_checkpoint_does(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(trained), str(tmp_path / "new" / "my_model")])
    folder = tmp_path / "new" / "my_model"
    hint = f"generate: python -m runners.c4 generate {folder} --prompt ...\n"
    assert capsys.readouterr().out == f"exported: {folder}\n{hint}"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["my_model"]

    (model, tokenizer), (other, other_tokenizer) = load_model(trained), load_model(folder)
    tokens = torch.tensor([tokenizer.encode("kan lor mis").ids])
    assert torch.equal(other(tokens), model(tokens))
    assert other_tokenizer.to_str() == tokenizer.to_str()
    assert load_config(folder).seq_len == load_config(trained).seq_len

    # Without this project.
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    description = json.loads((folder / "config.json").read_text())
    assert description["shape"] == {"width": 16, "mlp_width": 32, "layers": 2}
    assert (description["mixer_options"]["heads"], description["step"]) == (2, 2)
    assert description["vocab_size"] == Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert str(tmp_path.parent) not in json.dumps(description)  # no path of this machine


class Tied(nn.Module):
    """A layer with tied parameters, a frozen one, and a random buffer that no file keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.table = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("gain", torch.randn(width), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x_BTD * self.gain + self.table)))


def test_a_layer_with_tied_parameters_and_random_tables_is_stored_and_exported(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Tied=Tied))
    config = configured(texts, tmp_path, mixer="layers_of_others:Tied", steps=3, evaluations=1, checkpoint_every=1)
    run(config)
    export(folder_of(config), tmp_path / "exported")
    (model, tokenizer), (other, _) = load_model(folder_of(config)), load_model(tmp_path / "exported")
    assert other.layers[0].mixer.a.weight is other.layers[0].mixer.b.weight
    tokens = torch.tensor([tokenizer.encode("kan lor mis").ids])
    assert torch.equal(other(tokens), model(tokens))


def test_an_export_that_fails_is_one_line_and_leaves_nothing(
    trained: Path, tmp_path: Path, ended: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(module, "save_tensors", full)
    for name, words in (
        ("mine", "mine exists: name a new folder"),
        ("other", "free some space, then the same command resumes"),
    ):
        assert words in ended(main, [str(trained), str(tmp_path / name)])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "mine")]


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "config.json"])
def test_an_export_that_is_damaged_is_named(name: str, trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "model")
    file = tmp_path / "model" / name
    content = file.read_bytes()
    file.write_bytes(content[:-3] + b"x" + content[-2:])
    with pytest.raises(DamagedFileError, match=f"{name} is damaged"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"config": "gpt2"}', '{"model_type": "gpt2"}'])
def test_config_files_of_other_programs_are_refused_in_a_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    for load in (load_config, load_model):
        with pytest.raises(ValueError, match="is no export of this version"):
            load(tmp_path)
