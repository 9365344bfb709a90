"""Continue a prompt with a trained model, one token at a time.

    python -m runners.c4 generate results/c4/<run> --prompt "The history of"
    python -m runners.c4 generate results/c4/<run> --prompt "The history of" --temperature 0 --max-new-tokens 64

In its step form, each layer carries its own state from token to token. The state of attention is the keys and values of
all earlier tokens. On a GPU, models of RT and Transformer layers decode with a static key-value cache, as one CUDA
graph a token. A layer without a step form reads the whole text again for each token.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import tyro
from torch import Tensor

from mixers.decoding import Decoder, has_static_cache
from mixers.models import LanguageModel
from runners.c4.checkpoints import load_model
from runners.c4.corpus.tokenizer import end_of_text, vocab_size
from runners.cli import check_seed, cli, shown_as
from runners.device import find_devices
from runners.ending import user_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEAST_TEMPERATURE = 1e-6
"""Logits divided by less might be infinite; at this temperature, the most likely token is all but certain."""
MOST_POSITIONS = 2**31 - 1
"""Positions that a decoder can count: more than any GPU has memory for, and fewer than PyTorch can count bytes of."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for drawing the next token.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw only from this number of most likely tokens; from all unless given.
        seed: seed of the random draws.
    """

    temperature: float = 1.0
    top_k: Annotated[int | None, shown_as("INT")] = None
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for a value out of range."""
        if not (math.isfinite(self.temperature) and (self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE)):
            raise ValueError(f"temperature {self.temperature} must be 0, or {LEAST_TEMPERATURE:g} at least")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k {self.top_k} must be 1 or more")
        check_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """Continue a prompt with a trained model.

    Attributes:
        checkpoint: folder of a run, whose newest checkpoint is read; a checkpoint file; or an exported folder.
        prompt: text to continue; unless given, generation begins at the start of a document.
        max_new_tokens: tokens to generate, unless the text ends earlier.
        device: auto takes the GPU if there is one.
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], shown_as("MODEL")]
    prompt: Annotated[str, shown_as()] = ""
    max_new_tokens: int = 128
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def check(self) -> None:
        """Raise ValueError for a value out of range."""
        super().check()
        if self.max_new_tokens < 1:
            raise ValueError(f"max-new-tokens {self.max_new_tokens} must be 1 or more")
        try:
            self.prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt {self.prompt!a} is no text in UTF-8: write it in UTF-8") from error


def main(arguments: Sequence[str]) -> None:
    """Run the command line; an error is one line and exit status 2."""
    with user_errors(ValueError, OSError):
        default = Options(checkpoint=tyro.MISSING)
        options = cli(Options, default, arguments, "generate")
        options.check()

        device = find_devices(options.device)[0]
        model, tokenizer = load_model(options.checkpoint)
        model.to(device)
        if not has_steps(model):
            name = type(model.stack[0]).__name__
            print(f"{name} has no step form: it reads the whole text again for each token", file=sys.stderr)

        # Print each piece at once; an error still ends the line.
        pieces = generate(model, tokenizer, encode_prompt(tokenizer, options.prompt), options.max_new_tokens, options)
        sys.stdout.write(options.prompt)
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:
            sys.stdout.write("\n")


def has_steps(model: LanguageModel) -> bool:
    """Return whether the layers of a model have a step form."""
    try:
        model.init_state(1)
    except NotImplementedError:
        return False
    return True


def encode_prompt(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Encode a prompt; an empty prompt becomes end-of-text, the token before each training document."""
    return tokenizer.encode(text, add_special_tokens=False).ids or [end_of_text(tokenizer)]


def generate(
    model: LanguageModel, tokenizer: "Tokenizer", prompt: Sequence[int], max_new_tokens: int, sampling: Sampling
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
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    steps = has_steps(model)
    unread = list(prompt if steps else prompt[-1:])
    position = len(prompt) - len(unread)
    capacity = len(prompt) + max_new_tokens - 1  # the last token is not read
    read = reader(model, capacity) if steps else rereader(model, prompt[:-1])
    for _ in range(max_new_tokens):
        # Read the prompt in the first round, the last token in later rounds.
        for token in unread:
            try:
                logits_BV = read(torch.tensor([token], device=device))
            except Exception as error:
                name = type(model.stack[0]).__name__
                raise ValueError(
                    f"{name} cannot generate at position {position} ({type(error).__name__}: {error}): if that is its "
                    "limit, lower --max-new-tokens or shorten --prompt"
                ) from error
            position += 1

        # Draw the next token.
        token = draw(logits_BV[0, :known].float().cpu(), sampling, generator)
        if token == end:
            return
        yield token
        unread = [token]


def reader(model: LanguageModel, capacity: int) -> Callable[[Tensor], Tensor]:
    """Return a function that reads the next token (1,) and returns the logits (1, V) after it.

    It decodes with a static cache for all positions, if the model's layers can and are on a GPU, otherwise by
    ``model.step``.

    Args:
        model: a model in evaluation mode.
        capacity: number of tokens to read at most.

    Raises:
        ValueError: the GPU has too little memory for that number of tokens.
    """
    device = model.embedding.weight.device
    if device.type == "cuda" and has_static_cache(model):
        try:
            return Decoder(model, 1, min(capacity, MOST_POSITIONS)).step
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU has too little memory for {capacity} tokens: lower --max-new-tokens or shorten --prompt"
            ) from error

    with device:
        states = model.init_state(1)

    def read(tokens_B: Tensor) -> Tensor:
        nonlocal states
        logits_BV, states = model.step(tokens_B, states)
        return logits_BV

    return read


def rereader(model: LanguageModel, before: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function as ``reader`` does, for a model without a step form: it computes all positions each time.

    Args:
        model: a model in evaluation mode.
        before: tokens before the first one that is read.
    """
    tokens = [*before]

    def read(tokens_B: Tensor) -> Tensor:
        tokens.append(int(tokens_B))
        return model(torch.tensor([tokens], device=tokens_B.device))[:, -1]

    return read


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token; ``logits_V`` and ``generator`` are on the CPU, so that a seed gives the same draws everywhere."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())

    count = min(sampling.top_k or len(logits_V), len(logits_V))
    largest, tokens = logits_V.topk(count)
    probabilities = (largest / sampling.temperature).softmax(dim=0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
