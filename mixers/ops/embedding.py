"""Rows of a table at token numbers."""

from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def embedding(tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the rows (..., D) of a table at tokens (...), which are below V.

    The gradient of a small table repeats bitwise on a GPU, where PyTorch's own adds atomically.
    """
    if runs_fused(weight_VD):
        from mixers.ops.kernels.embedding import embedding_method, fits_embedding

        if fits_embedding(*weight_VD.shape):
            return over_runs(embedding_method(), tokens, weight_VD)[0]

    return F.embedding(tokens, weight_VD)
