"""Work that ``pretraining`` times beside layers: training steps as ``runners.c4`` takes them, and decoding."""

import torch

from mixers.decoding import Decoder
from runners.bench.work import Work
from runners.c4.config import Config
from runners.c4.distributed import World
from runners.c4.model import build
from runners.c4.step import Stepper


class TrainingWork(Work):
    """Optimizer steps in one process on random tokens.

    The layers run as CUDA graphs where ``runners.c4`` captures them.

    Args:
        config: the model and its batch.
        options: settings of the layer.
        vocab_size: tokens of the vocabulary.
        device: where to train.
    """

    def __init__(self, config: Config, options: dict[str, str], vocab_size: int, device: torch.device) -> None:
        # The model and its optimizer.
        self.config = config
        model = build(config, options, vocab_size).to(device)
        self.stepper = Stepper(model, config, World(rank=0, size=1, device=device))

        # Random tokens.
        generator = torch.Generator().manual_seed(0)
        shape = (config.batch_size, config.seq_len + 1)
        self.tokens_BT = torch.randint(vocab_size, shape, generator=generator).to(device)

        self.loss = torch.zeros((), device=device)
        self.facts = {"parameters": sum(p.numel() for p in model.parameters())}
        self.stepper.keep_gradients()

    def run_eagerly(self) -> None:
        self.loss, _ = self.stepper.step(self.tokens_BT)

    def is_finite(self) -> bool:
        return bool(self.loss.isfinite())


class DecodeWork(Work):
    """One decoding step of each sequence after random keys and values, in float32 as in ``generate``.

    Args:
        config: the model, and the number of sequences as its batch size.
        vocab_size: tokens of the vocabulary.
        context: position of the token, from 1; ``context - 1`` positions are in the cache.
        device: where to decode.
    """

    def __init__(self, config: Config, vocab_size: int, context: int, device: torch.device) -> None:
        with torch.device(device):
            self.model = build(config, {}, vocab_size).requires_grad_(False)
            self.tokens_B = torch.zeros(config.batch_size, dtype=torch.long)

            # Random keys and values of the earlier positions.
            self.states = self.model.init_state(config.batch_size)
            for state in self.states:
                for name in ("k", "v"):
                    batch, _, width = state[name].shape
                    state[name] = torch.randn(batch, context - 1, width)

        self.logits_BV, states_after = self.model.step(self.tokens_B, self.states)
        self.facts = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "cache_bytes": sum(y.nbytes for state in states_after for y in state.values()),
        }

    def run_eagerly(self) -> None:
        self.logits_BV, _ = self.model.step(self.tokens_B, self.states)

    def is_finite(self) -> bool:
        return bool(self.logits_BV.isfinite().all())


class CachedDecodeWork(Work):
    """``DecodeWork`` with a static key-value cache.

    All passes compute the same position. In RT, the pair of the position before is then that of the last pass.

    Args:
        config: the model, and the number of sequences as its batch size.
        vocab_size: tokens of the vocabulary.
        context: position of the token, from 1, and the last that the cache holds.
        device: where to decode.
    """

    def __init__(self, config: Config, vocab_size: int, context: int, device: torch.device) -> None:
        with torch.device(device):
            model = build(config, {}, vocab_size).requires_grad_(False)
        self.decoder = Decoder(model, config.batch_size, context)
        self.context = context

        # Random keys and values of the earlier positions.
        for layer in self.decoder.layers:
            layer.cache_2BJD.normal_()
            if layer.last_2BD is not None:
                layer.last_2BD.normal_()

        self.facts = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "cache_bytes": self.decoder.nbytes,
        }

    @torch.no_grad()
    def run_eagerly(self) -> None:
        self.decoder.position.fill_(self.context - 1)
        self.decoder.compute()

    def is_finite(self) -> bool:
        return bool(self.decoder.logits_BV.isfinite().all())
