"""Weights of a layer, for the implementations that compute all of it."""

from typing import NamedTuple

from torch import Tensor


class LayerWeights(NamedTuple):
    """All weights of a layer, linear maps as (outputs, inputs); queries' and keys' norms may both be absent.

    Inside an implementation every tensor has a leading axis of runs, or of layers.
    """

    norm_D: Tensor
    wq_DD: Tensor
    wk_DD: Tensor
    wv_DD: Tensor
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    wo_DD: Tensor
    mlp_norm_D: Tensor
    up_FD: Tensor
    down_DF: Tensor
