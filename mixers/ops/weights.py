"""Weights of a whole layer with softmax attention, for the operations that compute whole layers."""

from typing import NamedTuple

from torch import Tensor


class LayerWeights(NamedTuple):
    """All weights of a layer, with linear maps as (outputs, inputs); the gains of QK-norm are None without QK-norm.

    Inside an operation, every tensor has a leading axis of runs or of layers.

    Attributes:
        norm_D: gain of the norm of the inputs, and in the Recurrent Transformer of the outputs before persistent pairs.
        wq_DD: map to queries.
        wk_DD: map to keys.
        wv_DD: map to values.
        q_norm_D: gain of the norm of queries.
        k_norm_D: gain of the norm of keys.
        wo_DD: output map of attention.
        mlp_norm_D: gain of the norm before the MLP.
        up_FD: first map of the MLP.
        down_DF: second map of the MLP.
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
