"""Tests of Triton kernels, of which each case runs either in the interpreter or on a GPU: where, and marks."""

import pytest
import torch
import triton

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
