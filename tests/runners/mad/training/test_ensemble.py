"""The ensemble against torch's own optimizer and schedule, and against each of its runs alone."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixers import MIXERS
from mixers.attention_layer import AttentionLayer
from mixers.base import Shape
from mixers.models import Backbone, LanguageModel
from mixers.rt.layer import RecurrentTransformer
from mixers.transformer import Transformer
from runners.mad.training.ensemble import Ensemble, mean_cross_entropy
from runners.mad.training.protocol import Optimizer, Run
from tasks.base import IGNORE
from tasks.recall import InContextRecall

SHAPE = Shape(width=16, mlp_width=32)
VOCAB = 7
STEPS = 12
RUNS = [
    Run(lr=1e-2, weight_decay=0.1, seed=0),
    Run(lr=3e-3, weight_decay=0.0, seed=1),
    Run(lr=1e-3, weight_decay=0.5, seed=2),
]


def build(mixer: str = "transformer") -> Backbone:
    layer = MIXERS[mixer]
    config = layer.Config(heads=2) if hasattr(layer.Config(), "heads") else layer.Config()
    return LanguageModel(layer, config, SHAPE, VOCAB)


def batches(runs: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(VOCAB, (runs, 4, 10), generator=generator) for _ in range(STEPS)]
    return [(tokens[..., :-1], tokens[..., 1:].clone()) for tokens in drawn]


def ensemble(runs: list[Run], mixer: str = "transformer", clip: float = 1.0) -> Ensemble:
    return Ensemble(lambda: build(mixer), runs, Optimizer(clip=clip), STEPS, torch.device("cpu"))


def test_one_run_follows_torch_adamw_with_clipping_and_cosine() -> None:
    run = RUNS[0]
    torch.manual_seed(run.seed)
    model = build()
    gains = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": run.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.lr, betas=(0.9, 0.98), eps=1e-8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-6)
    ours = ensemble([run], clip=0.05)
    for inputs, targets in batches(1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[0]).flatten(0, 1), targets[0].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(ours.train_step(inputs, targets)[0], loss.detach(), rtol=1e-5, atol=1e-6)
    for (name, expected), got in zip(model.named_parameters(), ours.named(ours.params_RP).values(), strict=True):
        torch.testing.assert_close(got[0], expected.detach(), rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("mixer", "left_out"),
    [("transformer", ()), ("rt", ()), ("s5", ("layers.0.B.",)), ("hyena", ("layers.0.filters.",))],
)
def test_weight_decay_shrinks_matrices_but_those_that_the_layer_leaves_out(
    mixer: str, left_out: tuple[str, ...]
) -> None:
    """Without a gradient, decay alone changes parameters: each by the factor 1 - lr decay."""
    members = ensemble(RUNS[:1], mixer)
    before = {name: y.clone() for name, y in members.named(members.params_RP).items()}
    members.optimizer.update(members.params_RP, torch.zeros_like(members.params_RP), torch.zeros(1))

    for name, y in members.named(members.params_RP).items():
        decays = y[0].ndim > 1 and not name.startswith(left_out)
        torch.testing.assert_close(y, before[name] * (1 - 1e-2 * 0.1 * decays), rtol=1e-6, atol=0.0)
    assert all(any(name.startswith(start) for name in before) for start in left_out)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_run_trains_alone_as_in_company_and_again_the_same_to_the_bit(mixer: str) -> None:
    """Batched products of another size may round otherwise: float32 losses agree to 1e-5 relative."""
    runs, drawn = RUNS[:2], batches(2)[:2]  # the second step has moments of the first
    together, again = (ensemble(runs, mixer) for _ in range(2))
    losses, repeated = (torch.stack([members.train_step(*batch) for batch in drawn]) for members in (together, again))
    assert torch.equal(repeated, losses)
    assert torch.equal(again.params_RP, together.params_RP)
    for r, run in enumerate(runs):
        alone = ensemble([run], mixer)
        own = torch.stack([alone.train_step(x[r : r + 1], y[r : r + 1]) for x, y in drawn])
        torch.testing.assert_close(losses[:, r], own[:, 0], rtol=1e-5, atol=1e-6)


def test_a_diverging_run_is_frozen_at_its_step_and_disturbs_no_other() -> None:
    poisoned, healthy = ensemble(RUNS), ensemble(RUNS)
    for step, batch in enumerate(batches(len(RUNS))):
        if step == 4:
            poisoned.params_RP[1, 0] = torch.inf
        before = poisoned.params_RP[1].clone()
        poisoned.train_step(*batch)
        healthy.train_step(*batch)
        if step >= 4:
            assert torch.equal(poisoned.params_RP[1], before)
    assert poisoned.diverged_R.tolist() == [-1, 5, -1]
    assert healthy.diverged_R.tolist() == [-1, -1, -1]
    assert torch.equal(poisoned.params_RP[[0, 2]], healthy.params_RP[[0, 2]])


def test_learning_rate_runs_the_whole_cosine_for_each_run() -> None:
    """A run whose peak lies below the end of the schedule, 1e-6, keeps its peak."""
    members = ensemble([*RUNS, Run(lr=1e-7, weight_decay=0.0, seed=3)])
    peaks, ends = [*(run.lr for run in RUNS), 1e-7], [1e-6, 1e-6, 1e-6, 1e-7]
    middles = [(peak + end) / 2 for peak, end in zip(peaks, ends, strict=True)]
    for step, expected in ((0, peaks), (STEPS // 2, middles), (STEPS, ends)):
        members.optimizer.step.fill_(step)
        assert members.optimizer.learning_rate().squeeze(1).tolist() == pytest.approx(expected)


def test_loss_is_the_mean_over_targets_of_each_run() -> None:
    logits = torch.randn(2, 3, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(VOCAB, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    targets[0, 1:] = IGNORE
    got = mean_cross_entropy(logits, targets)
    for r in range(2):
        expected = nn.functional.cross_entropy(logits[r].flatten(0, 1), targets[r].flatten())
        torch.testing.assert_close(got[r], expected)


def test_initial_parameters_depend_on_the_seed_alone() -> None:
    assert torch.equal(ensemble(RUNS).params_RP[1], ensemble([RUNS[1]]).params_RP[0])
    assert not torch.equal(ensemble(RUNS).params_RP[0], ensemble(RUNS).params_RP[1])
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    ensemble(RUNS)
    assert torch.equal(before, torch.random.get_rng_state())


RECALL = InContextRecall(InContextRecall.Config(vocab_size=8, length=16))
FIVE = [
    Run(lr=3e-3, weight_decay=0.1, seed=0),
    Run(lr=1e-3, weight_decay=0.0, seed=1),
    Run(lr=2e-3, weight_decay=0.1, seed=2),
    Run(lr=5e-4, weight_decay=0.0, seed=3),
    Run(lr=1e-3, weight_decay=0.1, seed=4),
]


def learn_recall(
    runs: list[Run], device: torch.device, layer: type[AttentionLayer] = RecurrentTransformer
) -> tuple[Tensor, Tensor]:
    """Losses (steps, R) and last parameters (R, P) of 200 steps; a run's batches depend on its seed alone."""

    def build() -> Backbone:
        return LanguageModel(layer, layer.Config(heads=4), Shape(width=64, mlp_width=128), RECALL.vocab_size)

    members, losses = Ensemble(build, runs, Optimizer(), 200, device), []
    for step in range(200):
        drawn = [RECALL.sample(np.random.default_rng([run.seed, step]), 16, "train") for run in runs]
        inputs, targets = (
            torch.from_numpy(np.stack(arrays)).to(device)
            for arrays in ([batch.inputs_ST for batch in drawn], [batch.targets_ST for batch in drawn])
        )
        losses.append(members.train_step(inputs, targets))
    return torch.stack(losses).double().cpu(), members.params_RP


@pytest.mark.gpu
def test_gpu_a_run_learns_alone_as_in_company(device: torch.device) -> None:
    """Loss curves in bfloat16. Products of another size may round otherwise, and 200 steps carry that on; so what is
    right is the curve in float32, and company may add no more to the distance from it than bfloat16 itself does.
    """

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a - b).square().mean().sqrt())

    exact, _ = learn_recall(FIVE, torch.device("cpu"))
    together, _ = learn_recall(FIVE, device)
    alone = torch.cat([learn_recall([run], device)[0] for run in FIVE], dim=1)
    assert (exact[-20:].mean(0) < 0.7 * exact[0]).all()
    rounding = distance(alone, exact)  # 6e-4 with the tiled algorithm in bfloat16 on a CPU
    assert rounding <= 5e-3
    assert distance(together, exact) <= 2 * rounding
    assert distance(together, alone) <= 2 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("lr", [10.0, 1e38], ids=["far too high", "not finite"])
def test_gpu_a_diverging_run_changes_no_bit_of_the_others(device: torch.device, lr: float) -> None:
    wild = [FIVE[0], Run(lr=lr, weight_decay=0.0, seed=1), *FIVE[2:]]
    (healthy, params), (disturbed, beside) = learn_recall(FIVE, device), learn_recall(wild, device)
    assert not disturbed[-20:, 1].mean() < 1.5 * healthy[-20:, 1].mean()
    for r in (0, 2, 3, 4):
        assert torch.equal(healthy[:, r], disturbed[:, r])
        assert torch.equal(params[r], beside[r])


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [RecurrentTransformer, Transformer])
def test_gpu_training_is_bitwise_repeatable(layer: type[AttentionLayer], device: torch.device) -> None:
    (_, first), (_, second) = (learn_recall(FIVE, device, layer) for _ in range(2))
    assert torch.equal(first, second)
