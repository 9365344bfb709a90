"""A model that was exported is the same elsewhere, with this project and without it."""

import errno
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from runners.c4 import exported, load_model
from runners.c4.__main__ import main
from runners.c4.checkpoints import load_config
from runners.c4.export import export
from runners.c4.exported import write_exported
from runners.c4.records import REHEARSAL
from runners.files import DamagedFileError, read_json, write_json
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
    main(["export", str(trained), str(tmp_path / "new" / "my_model")])
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


def test_a_checkpoint_of_other_code_is_loaded_with_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(trained)
    assert capsys.readouterr().err == ""

    monkeypatch.setattr("runners.c4.checkpoints.run_code", lambda config: "another hash")
    file = trained / "checkpoints" / "step-00000002.safetensors"
    line = f"the code of transformer or of its training has changed since {file} was written: results may differ\n"
    load_model(trained)
    assert capsys.readouterr() == ("", line)
    main(["export", str(trained), str(tmp_path / "my_model")])
    out, err = capsys.readouterr()
    assert out.startswith(f"exported: {tmp_path / 'my_model'}\n")
    assert err == line
    main(["generate", str(trained), "--device", "cpu", "--max-new-tokens", "1"])
    assert capsys.readouterr().err == line
    main(["gradients", str(trained), "--device", "cpu", "--sequences", "2", "--targets", "2", "--out", str(tmp_path)])
    assert capsys.readouterr().err == line


def test_code_with_which_the_run_was_continued_is_no_other_code(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    known = read_json(run / REHEARSAL)
    write_json(run / REHEARSAL, known | {"codes": [*known["codes"], "another hash"]})
    monkeypatch.setattr("runners.c4.checkpoints.run_code", lambda config: "another hash")
    load_model(run)
    assert capsys.readouterr().err == ""


def test_the_files_are_read_without_this_project(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "my_model")
    model, tokenizer = load_model(trained)
    weights = load_file(tmp_path / "my_model" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())

    description = json.loads((tmp_path / "my_model" / "config.json").read_text())
    assert description["shape"] == {"width": 16, "mlp_width": 32, "layers": 2}
    assert description["mixer_options"]["heads"] == 2
    assert description["step"] == 2
    assert description["vocab_size"] == tokenizer.get_vocab_size()
    assert str(tmp_path.parent) not in json.dumps(description)  # no path of this machine
    assert Tokenizer.from_file(str(tmp_path / "my_model" / "tokenizer.json")).get_vocab_size() > 0


def test_a_folder_that_exists_is_left_alone(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["export", str(trained), str(tmp_path / "mine")])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'mine'} exists: name a new folder\n"
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_below_a_file_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path / "no run"), str(tmp_path / "mine" / "model")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: FOLDER {tmp_path / 'mine' / 'model'}: ")


class Scaled(nn.Module):
    """A layer with tied parameters, whose code the test changes."""

    scale = 1.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.b(self.scale * torch.tanh(self.a(x_BTD)))


def test_a_layer_with_tied_parameters_is_stored_and_exported_and_a_change_of_its_code_is_said(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "layers_of_others", SimpleNamespace(Scaled=Scaled))
    config = configured(texts, tmp_path, mixer="layers_of_others:Scaled", steps=3, evaluations=1, checkpoint_every=1)
    run(config)
    folder = tmp_path / "exported"
    export(folder_of(config), folder)
    description = read_json(folder / "config.json")
    assert "size" not in description["config"]
    assert len(description["probe"]) == 16

    (model, tokenizer), (other, _) = load_model(folder_of(config)), load_model(folder)
    assert capsys.readouterr().err == ""
    mixer = other.layers[0].mixer
    assert mixer.a.weight is mixer.b.weight
    tokens = torch.tensor([tokenizer.encode("kan lor mis").ids])
    assert torch.equal(other(tokens), model(tokens))

    monkeypatch.setattr("runners.c4.exported.run_code", lambda config: "another hash")
    load_model(folder)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(Scaled, "scale", 1.5)
    load_model(folder)
    what = "computed other outputs when it was exported: the code of layers_of_others:Scaled has changed since"
    assert capsys.readouterr().err == f"{folder} {what}\n"


def test_an_export_that_fails_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    model, _ = load_model(trained)
    with pytest.raises(KeyError):
        write_exported(tmp_path / "my_model", model, b"", {"config": {}, "mixer_options": {}})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_that_names_the_folder(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(exported, "save_tensors", full)
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(trained), str(tmp_path / "mine")])
    line = f"error: no space for {tmp_path / 'mine'}: free some and run the same command again\n"
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_lacks_a_file_or_is_damaged_says_what_to_do(trained: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        folder = tmp_path / name
        export(trained, folder)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-3] + b"x" + content[-2:])
        with pytest.raises(DamagedFileError, match=f"{name} is damaged .*: export the run again$"):
            load_model(folder)

    (tmp_path / "tokenizer.json" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no .*tokenizer.json: export the run again"):
        load_model(tmp_path / "tokenizer.json")


def test_config_files_of_other_programs_are_refused_in_a_line(tmp_path: Path) -> None:
    for content in ("{}", "[]", "null", '{"config": "gpt2"}', '{"model_type": "gpt2"}'):
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (tmp_path / name).write_text(content)
        for load in (load_config, load_model):
            with pytest.raises(ValueError, match="is no export of this version"):
                load(tmp_path)
