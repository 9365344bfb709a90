"""Continue a prompt with a trained model, one token at a time.

    python -m runners.c4 generate results/c4/<run> --prompt "The history of"
    python -m runners.c4 generate results/c4/<run> --prompt "The history of" --temperature 0 --max-new-tokens 64

In its step form, each layer carries its own state from token to token. The state of attention is the keys and values of
all earlier tokens. On a GPU, models of RT and Transformer layers decode with a static key-value cache, as one CUDA
graph a token. A layer without a step form reads the whole text again for each token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tyro.conf import Positional

from mixers.decoding import Decoder, has_static_cache
from mixers.models import LanguageModel
from runners.c4.data.tokenizer import Tokenizer, end_of_text, vocab_size
from runners.c4.export import load_model
from runners.device import find_devices
from runners.ending import user_errors
from runners.options import parse

LEAST_TEMPERATURE = 1e-6
"""Logits divided by less might be infinite; at this temperature, the most likely token is all but certain."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for drawing the next token.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw only from this number of most likely tokens; from all unless given.
        seed: seed of the random draws.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < float("inf")):
            raise ValueError(f"temperature {self.temperature} must be 0, or {LEAST_TEMPERATURE:g} at least")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k {self.top_k} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """Continue a prompt with a trained model.

    Attributes:
        checkpoint: folder of a run, whose newest checkpoint is read; a checkpoint file; or an exported folder.
        prompt: text to continue; unless given, generation begins at the start of a document.
        max_new_tokens: tokens to generate, unless the text ends earlier.
        device: auto takes the GPU if there is one.
    """

    checkpoint: Positional[Path]
    prompt: str = ""
    max_new_tokens: int = 128
    device: Literal["auto", "cpu", "cuda"] = "auto"


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        options = parse(Options, arguments)
        device = find_devices(options.device)[0]
        model, tokenizer = load_model(options.checkpoint)
        prompt = encode_prompt(tokenizer, options.prompt)
        pieces = generate(model.to(device), tokenizer, prompt, options.max_new_tokens, options)

        # Print each piece at once; an error still ends the line.
        try:
            for piece in chain([options.prompt], pieces):
                print(piece, end="", flush=True)
        finally:
            print()


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a prompt; an empty prompt becomes end-of-text, the token before each training document."""
    return tokenizer.encode(text, add_special_tokens=False).ids or [end_of_text(tokenizer)]


def generate(
    model: LanguageModel, tokenizer: Tokenizer, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """Yield the text after the tokens ``prompt`` in pieces of whole characters.

    Args:
        model: a model in evaluation mode.
        tokenizer: its tokenizer.
        prompt: at least one token.
        max_new_tokens: tokens to generate at most.
        sampling: how the tokens are drawn.

    Raises:
        ValueError: as ``generate_tokens``.
    """
    from tokenizers.decoders import DecodeStream

    # The text of a token depends on whether it is the first one, so the decoder also reads the prompt.
    stream = DecodeStream(skip_special_tokens=True)
    for token in prompt:
        stream.step(tokenizer, token)

    end, known = end_of_text(tokenizer), vocab_size(tokenizer)
    for token in generate_tokens(model, prompt, max_new_tokens, sampling, end, known):
        if piece := stream.step(tokenizer, token):
            yield piece


@torch.no_grad()
def generate_tokens(
    model: LanguageModel, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, end: int, known: int
) -> Iterator[int]:
    """Yield the tokens after ``prompt``, computed in the dtype of the model's weights.

    Args:
        model: a model in evaluation mode.
        prompt: at least one token.
        max_new_tokens: tokens to generate at most.
        sampling: how the tokens are drawn.
        end: token at which to stop; it is not yielded.
        known: size of the tokenizer's vocabulary; further logits are padding and are never drawn.

    Raises:
        ValueError: the model's layers fail at a position, as those of limited length do, or there is too little memory.
    """
    # Draw on the CPU, so that a seed gives the same draws everywhere.
    generator = torch.Generator().manual_seed(sampling.seed)
    text = list(prompt)
    try:
        read = reader(model, len(prompt) + max_new_tokens - 1)  # the last token is not read
        unread = text
        for _ in range(max_new_tokens):
            logits_V = read(unread)[:known].float().cpu()
            if (token := draw(logits_V, sampling, generator)) == end:
                return
            yield token
            text.append(token)
            unread = [token]
    except Exception as error:
        raise ValueError(
            f"{type(model.stack[0]).__name__} cannot generate after {len(text)} tokens ({type(error).__name__}: "
            f"{error}): if that is its limit, lower --max-new-tokens or shorten --prompt"
        ) from error


def reader(model: LanguageModel, capacity: int) -> Callable[[Sequence[int]], Tensor]:
    """Return a function that reads the next tokens and returns the logits (V,) after them.

    It decodes with a static cache for ``capacity`` tokens, if the model's layers can and are on a GPU, otherwise by
    ``model.step``. A model without a step form computes all positions each time.
    """
    device = model.embedding.weight.device
    decoder = Decoder(model, 1, capacity) if device.type == "cuda" and has_static_cache(model) else None
    text: list[int] = []
    states = None
    with device, suppress(NotImplementedError):
        states = model.init_state(1)

    def read(new: Sequence[int]) -> Tensor:
        nonlocal states
        if decoder is None and states is None:
            text.extend(new)
            return model(torch.tensor([text], device=device))[0, -1]
        for token in new:
            token_B = torch.tensor([token], device=device)
            if decoder is not None:
                logits_BV = decoder.step(token_B)
            elif states is not None:
                logits_BV, states = model.step(token_B, states)
        return logits_BV[0]

    return read


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token; ``logits_V`` and ``generator`` are on the CPU."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())

    count = min(sampling.top_k or len(logits_V), len(logits_V))
    largest, tokens = logits_V.topk(count)
    probabilities = (largest / sampling.temperature).softmax(dim=0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
