"""Code in C: compiled once, kept, and replaced if damaged."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from mixers.ops.native import library, norm

needs_compiler = pytest.mark.skipif(norm.norm_library(torch.float64) is None, reason="needs a C compiler")


@needs_compiler
def test_a_file_is_compiled_once_and_replaced_if_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_source(source: Path, command: list[str], path: Path) -> None:
        compiled.append(path.name)
        subprocess.run([*command, "-x", "c", "-", "-o", str(path)], input=b"long three(void) {return 3;}", check=True)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_compile", compile_source)
    source, command = tmp_path / "three.c", library._command(torch.float64, K=4)
    source.write_text("of any content")

    for _ in range(2):
        assert library._loaded(source, command).three() == 3
    assert len(compiled) == 1
    (path,) = (tmp_path / "recurrent-transformer-diagnostics").iterdir()

    # One bit, in a copy: the file itself is in use.
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert library._loaded(source, command).three() == 3
    assert len(compiled) == 2
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == content

    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # no folder can be made there
    assert library._loaded(source, command).three() == 3


@needs_compiler
def test_another_precision_constant_or_source_is_another_library(tmp_path: Path) -> None:
    source = tmp_path / "source.c"
    keys = []
    for text, dtype, K in (("a", torch.float64, 4), ("a", torch.float32, 4), ("a", torch.float64, 8)):
        source.write_text(text)
        keys.append(library._key(source, library._command(dtype, K=K)))
    source.write_text("b")
    assert len({*keys, library._key(source, library._command(torch.float64, K=4))}) == 4


def test_the_fields_of_a_call_are_those_of_the_source() -> None:
    source = Path(norm.__file__).with_suffix(".c").read_text()
    declaration = source.partition("struct call {")[2].partition("};")[0]
    names = re.findall(r"[\w*]+(?=[,;])", re.sub(r"/\*.*?\*/", "", declaration, flags=re.DOTALL))
    assert [name.lstrip("*") for name in names] == [name for name, _ in norm._Call._fields_]
