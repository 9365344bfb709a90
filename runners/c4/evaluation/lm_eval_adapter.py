"""Checkpoints in lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), version 0.4.

    from pathlib import Path
    from lm_eval import simple_evaluate
    from runners.c4.evaluation.lm_eval_adapter import language_model

    simple_evaluate(language_model(Path("results/c4/<run>")), tasks=["piqa", "hellaswag", "arc_easy"])

The harness is not a dependency of this project: ``pip install lm-eval``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mixers.models import LanguageModel
from runners.c4.checkpoints import load_config, load_model
from runners.c4.corpus.tokenizer import end_of_text
from runners.c4.evaluation.evaluate import Likelihood, Pair, encode_pair, log_likelihoods
from runners.c4.evaluation.generate import Sampling, encode_prompt, generate
from runners.device import find_devices

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = 256
"""Tokens generated for a request that names no number; the harness's own models do the same."""
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
"""Settings of a request to generate."""


def language_model(checkpoint: Path, batch_size: int = 16, device: Literal["auto", "cpu", "cuda"] = "auto") -> Any:
    """Return an ``lm_eval.api.model.LM`` of a run.

    Args:
        checkpoint: folder of the run, of which the newest checkpoint is read, or a checkpoint file.
        batch_size: texts in one forward pass.
        device: auto takes the GPU if there is one.

    Raises:
        ValueError: lm-evaluation-harness is not installed, or there is no such checkpoint.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm-eval") from error

    place = find_devices(device)[0]
    model, tokenizer = load_model(checkpoint)
    seq_len = load_config(checkpoint).seq_len

    # The harness is imported here, so the class that inherits from it is made here, too.
    adapter = type("CheckpointLM", (Requests, LM), {"__module__": __name__})
    return adapter(model.to(place), tokenizer, seq_len, batch_size)


class Requests:
    """The harness's three kinds of requests; ``language_model`` combines it with the harness's abstract class."""

    def __init__(self, model: LanguageModel, tokenizer: "Tokenizer", seq_len: int, batch_size: int) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.end = end_of_text(tokenizer)

    def loglikelihood(self, requests: "Sequence[Instance]") -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether greedy decoding gives it."""
        texts = (request.args for request in requests)
        pairs = [encode_pair(self.tokenizer, context, continuation, self.end) for context, continuation in texts]
        return [(answer.log_probability, answer.greedy) for answer in self._score(pairs)]

    def loglikelihood_rolling(self, requests: "Sequence[Instance]") -> list[float]:
        """Return the log-probability of each whole text after end-of-text; a long text is read in parts."""
        texts = (self.tokenizer.encode(request.args[0], add_special_tokens=False).ids for request in requests)
        return [answer.log_probability for answer in self._score([Pair([self.end], text) for text in texts])]

    def generate_until(self, requests: "Sequence[Instance]") -> list[str]:
        """Return the continuation of each context up to its first stop text, the end of the text or the longest length.

        Raises:
            ValueError: a setting is not one of ``GENERATION``.
        """
        return [self._generate(*request.args) for request in requests]

    def _score(self, pairs: list[Pair]) -> list[Likelihood]:
        """Return the likelihoods of ``pairs``."""
        device = self.model.embedding.weight.device
        return log_likelihoods(self.model, pairs, self.batch_size, self.seq_len, device)

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        """Return the continuation of one context."""
        if unknown := settings.keys() - GENERATION:
            raise ValueError(f"generation knows no {', '.join(sorted(unknown))}: its settings are {sorted(GENERATION)}")

        # The harness gives one stop text or several, and means greedy decoding unless it says otherwise.
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        length = settings.get("max_gen_toks", MAX_NEW_TOKENS)
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample", False) else 0.0
        sampling = Sampling(temperature=temperature, top_k=settings.get("top_k"))
        sampling.check()

        # Leave room for the continuation, and keep the end of the context.
        prompt = encode_prompt(self.tokenizer, context)[-max(1, self.seq_len - length) :]
        return read_until(generate(self.model, self.tokenizer, prompt, length, sampling), stops)


def read_until(pieces: Iterable[str], stops: Sequence[str]) -> str:
    """Join ``pieces`` up to the first occurrence of any of ``stops``; take no more pieces than needed."""
    text = ""
    for piece in pieces:
        text += piece
        if found := [place for stop in stops if (place := text.find(stop)) >= 0]:
            return text[: min(found)]
    return text
