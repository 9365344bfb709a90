"""The best parameters of each run so far."""

import torch
from torch import Tensor


class BestParameters:
    """Parameters (R, P) of the evaluation of each run with the highest score, that score and its step."""

    def __init__(self, params_RP: Tensor) -> None:
        """Begin with the initial parameters, at step 0 and below every score."""
        runs = len(params_RP)
        device = params_RP.device
        self.params_RP = params_RP.clone()
        self.score_R = torch.full((runs,), -torch.inf, dtype=torch.float64, device=device)
        self.step_R = torch.zeros(runs, dtype=torch.int64, device=device)

    @property
    def rows(self) -> dict[str, Tensor]:
        """Tensors with a row for each run; live, so that copying into them restores."""
        return {"best": self.params_RP, "best_score": self.score_R, "best_step": self.step_R}

    def keep_better(self, params_RP: Tensor, score_R: Tensor, alive_R: Tensor, step: int) -> None:
        """Keep the parameters of the runs that are alive and have a higher score than before."""
        better_R = alive_R & (score_R > self.score_R)
        self.params_RP = torch.where(better_R[:, None], params_RP, self.params_RP)
        self.score_R = torch.where(better_R, score_R, self.score_R)
        self.step_R = torch.where(better_R, step, self.step_R)
