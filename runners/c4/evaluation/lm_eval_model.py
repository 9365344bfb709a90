"""The model ``rt-c4`` of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), version 0.4.

Importing this file needs the harness (the extra ``eval``) and registers the model with it. Versions of the harness with
plugins (0.4.14 and later) import it by themselves, by the entry point ``lm_eval.models`` in ``pyproject.toml``. For
earlier versions, ``runners.c4.evaluation.lm_eval_adapter`` imports it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from runners.c4.data.tokenizer import end_of_text
from runners.c4.evaluation.downstream import Pair, encode_pair, log_likelihoods
from runners.c4.evaluation.generate import Sampling, encode_prompt, generate
from runners.c4.export import load_config, load_model
from runners.device import find_devices

MAX_NEW_TOKENS = 256
"""Number of tokens generated for a request that does not name one; the harness's own models use the same number."""
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
"""Settings of a request to generate."""
OTHER_SAMPLING = {"top_p", "min_p", "typical_p"}
"""Settings of sampling that are not supported here; greedy decoding ignores them."""


@register_model("rt-c4")
class CheckpointLM(LM):
    """The harness's three kinds of requests, answered by a trained model.

    Args:
        checkpoint: folder of a run, whose newest checkpoint is read; a checkpoint file; or an exported folder.
        batch_size: texts per forward pass.
        max_batch_size: not used; the harness passes it to every model.
        device: ``auto``, or PyTorch's name of a device. The harness passes ``cuda:0`` unless ``--device`` is given;
            without a GPU it means the CPU, as for the harness's own models.

    Raises:
        ValueError: there is no such checkpoint, or the batch size is no number.
        RuntimeError: there is no such device.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str = "auto",
    ) -> None:
        super().__init__()
        is_missing = device.startswith("cuda") and not torch.cuda.is_available()
        self._device = find_devices("auto")[0] if device == "auto" or is_missing else torch.device(device)
        model, self.tokenizer = load_model(checkpoint)
        self.model = model.to(self._device)
        self.seq_len = load_config(checkpoint).seq_len
        self.batch_size = int(batch_size)
        self.end = end_of_text(self.tokenizer)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability after its context, and whether greedy decoding generates it."""
        texts = (request.args for request in requests)
        return self._score([encode_pair(self.tokenizer, context, rest, self.end) for context, rest in texts])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-probability of each whole text after end-of-text; a long text is read in parts."""
        texts = (self.tokenizer.encode(request.args[0], add_special_tokens=False).ids for request in requests)
        return [total for total, _ in self._score([Pair([self.end], text) for text in texts])]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the continuation of each context up to its first stop text, the end of the text or the longest length.

        Raises:
            ValueError: a setting is neither of ``GENERATION`` nor to be ignored.
        """
        return [self._generate(*request.args) for request in requests]

    def _score(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Return what ``log_likelihoods`` does."""
        return log_likelihoods(self.model, pairs, self.batch_size, self.seq_len, self._device)

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """Return the continuation of one context."""
        # As in the harness: sample if the request says so, or if it gives a temperature and does not say.
        temperature = settings.get("temperature", 1.0 if settings.get("do_sample") else 0.0)
        greedy = temperature == 0.0 or settings.get("do_sample") is False
        known = GENERATION | OTHER_SAMPLING if greedy else GENERATION
        if unknown := settings.keys() - known:
            raise ValueError(f"generation knows no {', '.join(sorted(unknown))}: its settings are {sorted(GENERATION)}")
        sampling = (
            Sampling(temperature=0.0) if greedy else Sampling(temperature=temperature, top_k=settings.get("top_k"))
        )

        # Leave room for the continuation, and keep the end of the context.
        length = settings.get("max_gen_toks", MAX_NEW_TOKENS)
        prompt = encode_prompt(self.tokenizer, context)[-max(1, self.seq_len - length) :]

        # The harness passes one stop text or several; read no further than the first one.
        until = settings.get("until") or []
        text = ""
        for piece in generate(self.model, self.tokenizer, prompt, length, sampling):
            text += piece
            if found := [text.find(stop) for stop in ([until] if isinstance(until, str) else until) if stop in text]:
                return text[: min(found)]
        return text
