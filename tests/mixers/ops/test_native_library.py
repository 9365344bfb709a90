"""Code in C: one library for each precision, constant and source."""

import subprocess
from pathlib import Path

import pytest
import torch

from mixers.ops.native import library, norm
from tests.runners.processes import wait_for

needs_compiler = pytest.mark.skipif(norm.norm_library(torch.float64) is None, reason="needs a C compiler")


@needs_compiler
def test_a_file_is_compiled_with_its_constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "constant.c"
    source.write_text("long constant(void) {return K;}")
    for K in (3, 4, 3):
        assert library.compiled(source, torch.float64, K=K).constant() == K
    assert len([*(tmp_path / "recurrent-transformer-diagnostics").iterdir()]) == 2


@needs_compiler
def test_another_precision_constant_or_source_is_another_library(tmp_path: Path) -> None:
    source = tmp_path / "source.c"
    keys = []
    for text, dtype, K in (("a", torch.float64, 4), ("a", torch.float32, 4), ("a", torch.float64, 8)):
        source.write_text(text)
        keys.append(library._key(source, library._command(dtype, K=K)))
    source.write_text("b")
    assert len({*keys, library._key(source, library._command(torch.float64, K=4))}) == 4


def test_a_compiler_that_hangs_is_ended_with_its_children_and_tried_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, child = tmp_path / "cc", tmp_path / "child"
    compiler.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}.new && mv {child}.new {child}\nwait\n")
    compiler.chmod(0o755)
    limits: list[float] = []

    def hang(process: subprocess.Popen[bytes], timeout: float) -> None:
        limits.append(timeout)
        wait_for(child.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", hang)
    monkeypatch.setattr(library, "_hanging", set())
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(norm.__file__).with_suffix(".c")
    assert library.compiled(source, torch.float64) is library.compiled(source, torch.float32) is None
    assert sum(limits) == 30
    working, ended = caplog.messages
    assert working == f"{compiler} compiles C code for this processor, once: 30 s at most"
    assert ended.startswith(f"the C compiler {compiler} has not ended after 30 s: slower plain PyTorch runs")

    # A dead process that nobody has waited for has no words.
    words = Path("/proc") / child.read_text().strip() / "cmdline"
    wait_for(lambda: not (words.exists() and words.read_bytes()))
