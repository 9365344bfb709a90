"""Rows of a table at token numbers."""

from torch import Tensor
from torch.nn import functional as F

from mixers.ops.numerics import runs_fused
from mixers.ops.runs import over_runs


def embedding(tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the rows (..., D) of a table at tokens (...), which are below V.

    On a GPU, the gradient of a small table is bitwise reproducible; PyTorch's own gradient uses atomic additions.
    """
    if runs_fused(weight_VD):
        from mixers.ops.kernels.embedding import embedding_method, fits_embedding

        if fits_embedding(*weight_VD.shape):
            return over_runs(embedding_method(), tokens, weight_VD)[0]

    return F.embedding(tokens, weight_VD)
