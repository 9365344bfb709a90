"""The model ``rt-c4`` of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), version 0.4.

Importing this file needs the harness (the extra ``eval``) and registers the model with it. Versions of the harness with
plugins (0.4.14 and later) import it by themselves, by the entry point ``lm_eval.models`` in ``pyproject.toml``. For
earlier versions, ``runners.c4.evaluation.lm_eval_adapter`` imports it.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from runners.c4.checkpoints import load_config, load_model
from runners.c4.corpus.tokenizer import end_of_text
from runners.c4.evaluation.evaluate import Likelihood, Pair, encode_pair, log_likelihoods
from runners.c4.evaluation.generate import Sampling, encode_prompt, generate
from runners.device import find_devices

NAME = "rt-c4"
"""Name of the model in the harness."""
MAX_NEW_TOKENS = 256
"""Number of tokens generated for a request that does not name one; the harness's own models use the same number."""
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
"""Settings of a request to generate."""
OTHER_SAMPLING = {"top_p", "min_p", "typical_p"}
"""Settings of sampling that are not supported here; greedy decoding ignores them."""


@register_model(NAME)
class CheckpointLM(LM):
    """The harness's three kinds of requests, answered by a trained model.

    Args:
        checkpoint: folder of a run, whose newest checkpoint is read; a checkpoint file; or an exported folder.
        batch_size: texts per forward pass.
        max_batch_size: not used; the harness passes it to every model.
        device: ``auto``, or PyTorch's name of a device; the harness passes ``cuda:0`` unless ``--device`` is given.
        **unknown: other ``--model_args``, which are refused.

    Raises:
        ValueError: there is no such argument, checkpoint or kind of device, or the batch size is no number.
    """

    def __init__(
        self,
        checkpoint: str | Path = "",
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str = "auto",
        **unknown: object,
    ) -> None:
        super().__init__()
        if unknown or not checkpoint:
            wrong = f"{NAME} knows no {', '.join(unknown)}" if unknown else "the checkpoint is missing"
            raise ValueError(f"{wrong}: give --model_args checkpoint=FOLDER, and batch_size or device if you like")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch size {batch_size} must be a whole number of at least 1")
        place = find_place(device)

        model, self.tokenizer = load_model(checkpoint)
        self.model = model.to(place)
        self.seq_len = load_config(checkpoint).seq_len
        self.batch_size = int(batch_size)
        self.end = end_of_text(self.tokenizer)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability after its context, and whether greedy decoding generates it."""
        texts = (request.args for request in requests)
        pairs = [encode_pair(self.tokenizer, context, continuation, self.end) for context, continuation in texts]
        return [(answer.log_probability, answer.greedy) for answer in self._score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-probability of each whole text after end-of-text; a long text is read in parts."""
        texts = (self.tokenizer.encode(request.args[0], add_special_tokens=False).ids for request in requests)
        return [answer.log_probability for answer in self._score([Pair([self.end], text) for text in texts])]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the continuation of each context up to its first stop text, the end of the text or the longest length.

        Raises:
            ValueError: a setting is neither of ``GENERATION`` nor to be ignored.
        """
        return [self._generate(*request.args) for request in requests]

    def _score(self, pairs: list[Pair]) -> list[Likelihood]:
        """Return the likelihoods of ``pairs``."""
        device = self.model.embedding.weight.device
        return log_likelihoods(self.model, pairs, self.batch_size, self.seq_len, device)

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """Return the continuation of one context."""
        # As in the harness: sample if the request says so, or if it gives a temperature and does not say.
        temperature = settings.get("temperature", 1.0 if settings.get("do_sample") else 0.0)
        greedy = temperature == 0.0 or settings.get("do_sample") is False
        known = GENERATION | OTHER_SAMPLING if greedy else GENERATION
        if unknown := settings.keys() - known:
            raise ValueError(f"generation knows no {', '.join(sorted(unknown))}: its settings are {sorted(GENERATION)}")

        # Greedy decoding ignores the settings of sampling.
        sampling = (
            Sampling(temperature=0.0) if greedy else Sampling(temperature=temperature, top_k=settings.get("top_k"))
        )
        sampling.check()

        # The harness passes one stop text or several.
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        length = settings.get("max_gen_toks", MAX_NEW_TOKENS)

        # Leave room for the continuation, and keep the end of the context.
        prompt = encode_prompt(self.tokenizer, context)[-max(1, self.seq_len - length) :]
        return read_until(generate(self.model, self.tokenizer, prompt, length, sampling), stops)


def find_place(device: str) -> torch.device:
    """Return a device by name; if a GPU is named and there is none, return the CPU, as the harness's own models do.

    Args:
        device: ``auto``, which takes the GPU if there is one, or PyTorch's name of a device.

    Raises:
        ValueError: PyTorch has no device of this name.
    """
    if device == "auto":
        return find_devices(device)[0]
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"no device {device!r}: give auto, cpu, cuda or cuda:0, for example") from error

    if place.type == "cuda" and not torch.cuda.is_available():
        logging.getLogger(__name__).warning("PyTorch sees no GPU: the model runs on the CPU")
        return torch.device("cpu")
    return place


def read_until(pieces: Iterable[str], stops: Sequence[str]) -> str:
    """Join ``pieces`` up to the first occurrence of any of ``stops``; read no more pieces than needed."""
    text = ""
    for piece in pieces:
        text += piece
        if found := [place for stop in stops if (place := text.find(stop)) >= 0]:
            return text[: min(found)]
    return text
