"""The training loss."""

from functools import partial

from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from mixers.ops.runs import over_runs
from runners.mad.training.kernels import kernels_run_on
from tasks.base import IGNORE


def mean_cross_entropy(logits_RBTV: Tensor, targets_RBT: Tensor) -> Tensor:
    """Return the cross-entropy (R,) in nats, averaged over the positions of each run that have a target.

    Args:
        logits_RBTV: logits of each run.
        targets_RBT: tokens, int64; ``IGNORE`` where a position has no target.
    """
    if kernels_run_on(logits_RBTV.device):
        from runners.mad.training.kernels.cross_entropy import cross_entropy_method, fits_cross_entropy

        if fits_cross_entropy(logits_RBTV.shape[-1]):
            (loss_R,) = vmap(partial(over_runs, cross_entropy_method()))(logits_RBTV, targets_RBT)
            return loss_R

    losses_N = F.cross_entropy(
        logits_RBTV.float().flatten(0, 2), targets_RBT.flatten(), reduction="none", ignore_index=IGNORE
    )
    targets_R = (targets_RBT != IGNORE).flatten(1).sum(1)
    return losses_N.view(len(targets_RBT), -1).sum(1) / targets_R
