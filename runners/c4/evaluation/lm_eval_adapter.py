"""Checkpoints in lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), version 0.4.

    from pathlib import Path
    from lm_eval import simple_evaluate
    from runners.c4.lm_eval_adapter import language_model

    simple_evaluate(language_model(Path("results/c4/<run>")), tasks=["piqa", "hellaswag", "arc_easy"])

The harness is no dependency of this project: ``pip install lm-eval``.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mixers.models import LanguageModel
from runners.c4.checkpoints import load_model
from runners.c4.corpus.prepare import end_of_text
from runners.c4.evaluation.evaluate import Likelihood, Pair, encode_pair, log_likelihoods
from runners.c4.evaluation.generate import Sampling, encode_prompt, generate
from runners.device import find_devices

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from tokenizers import Tokenizer

MAX_NEW_TOKENS = 256
"""Tokens generated for a request that names no number; the harness's own models do the same."""
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}


def language_model(checkpoint: Path, batch_size: int = 16, device: Literal["auto", "cpu", "cuda"] = "auto") -> Any:
    """An ``lm_eval.api.model.LM`` of a run's newest checkpoint, or of a checkpoint file.

    Raises:
        ValueError: lm-evaluation-harness is not installed, or there is no such checkpoint.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm-eval") from error
    model, config, tokenizer = load_model(checkpoint, find_devices(device)[0])
    adapter = type("CheckpointLM", (Requests, LM), {"__module__": __name__})
    return adapter(model, tokenizer, config.seq_len, batch_size)


class Requests:
    """The harness's three kinds of requests; ``language_model`` joins it with the harness's abstract class."""

    def __init__(self, model: LanguageModel, tokenizer: "Tokenizer", seq_len: int, batch_size: int) -> None:
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        self.seq_len, self.batch_size = seq_len, batch_size
        self.end = end_of_text(tokenizer)

    def loglikelihood(self, requests: "Sequence[Instance]") -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether greedy decoding would give it."""
        texts = (request.args for request in requests)
        pairs = [encode_pair(self.tokenizer, context, continuation, self.end) for context, continuation in texts]
        return [(answer.log_probability, answer.greedy) for answer in self._score(pairs)]

    def loglikelihood_rolling(self, requests: "Sequence[Instance]") -> list[float]:
        """Log-probability of each whole text after an end of text, read in parts where it is long."""
        texts = (self.tokenizer.encode(request.args[0], add_special_tokens=False).ids for request in requests)
        return [answer.log_probability for answer in self._score([Pair([self.end], text) for text in texts])]

    def generate_until(self, requests: "Sequence[Instance]") -> list[str]:
        """Continuation of each context up to the first of its stop texts, to the end of the text or to its length.

        Raises:
            ValueError: a setting that is not one of ``GENERATION``.
        """
        return [self._generate(*request.args) for request in requests]

    def _score(self, pairs: list[Pair]) -> list[Likelihood]:
        device = self.model.embedding.weight.device
        return log_likelihoods(self.model, pairs, self.batch_size, self.seq_len, device)

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if unknown := settings.keys() - GENERATION:
            raise ValueError(f"generation knows no {', '.join(sorted(unknown))}: its settings are {sorted(GENERATION)}")
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        length = settings.get("max_gen_toks", MAX_NEW_TOKENS)
        temperature = settings.get("temperature", 1.0) if settings.get("do_sample", False) else 0.0
        sampling = Sampling(temperature=temperature, top_k=settings.get("top_k"))
        sampling.check()
        prompt = encode_prompt(self.tokenizer, context)[-max(1, self.seq_len - length) :]
        return read_until(generate(self.model, self.tokenizer, prompt, length, sampling), stops)


def read_until(pieces: Iterable[str], stops: Sequence[str]) -> str:
    """Text of ``pieces``, of which no more are taken than needed, before the first occurrence of any of ``stops``."""
    text = ""
    for piece in pieces:
        text += piece
        if found := [place for stop in stops if (place := text.find(stop)) >= 0]:
            return text[: min(found)]
    return text
