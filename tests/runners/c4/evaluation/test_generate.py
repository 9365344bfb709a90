"""Generation by steps against the parallel pass over the growing sequence, and the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mixers import MIXERS
from mixers.base import Shape
from mixers.models import LanguageModel
from runners.c4.data.convert import train_tokenizer
from runners.c4.evaluation import generate as module
from runners.c4.evaluation.generate import Sampling, draw, encode_prompt, generate, generate_tokens, main

VOCAB, PADDED = 40, 48
NONE = -1
"""A token that ends no text."""


def build(mixer: str = "transformer", vocab_size: int = PADDED) -> LanguageModel:
    torch.manual_seed(0)
    layer = MIXERS[mixer]
    return LanguageModel(layer, layer.Config(), Shape(width=32, mlp_width=48, layers=2), vocab_size).eval()


def tokens(model: LanguageModel, prompt: list[int], count: int, end: int = NONE, **sampling: Any) -> list[int]:
    return list(generate_tokens(model, prompt, count, Sampling(**sampling), end, VOCAB))


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize("mixer", ["transformer", "rt", "mamba2", "feedback-transformer"])
def test_greedy_is_the_largest_logit_of_the_parallel_pass(
    mixer: str, has_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> Any:
        raise NotImplementedError

    model, prompt = build(mixer), [5, 17, 3, 3, 30]
    expected = list(prompt)
    for _ in range(13):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([expected]))[0, -1, :VOCAB].argmax()))
    if not has_steps:
        monkeypatch.setattr(LanguageModel, "init_state", none)
    assert tokens(model, prompt, 13, temperature=0.0) == expected[len(prompt) :]
    assert tokens(model, prompt, 13, temperature=5.0, top_k=1) == expected[len(prompt) :]


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["transformer", "rt", "mamba2"])
def test_a_gpu_gives_the_tokens_of_a_cpu(mixer: str) -> None:
    """RT and Transformer decode in memory there, and other layers by steps."""
    prompt = [5, 17, 3, 3, 30]
    expected = [tokens(build(mixer), prompt, 20, **way) for way in ({"temperature": 0.0}, {"seed": 3})]
    model = build(mixer).cuda()
    assert [tokens(model, prompt, 20, **way) for way in ({"temperature": 0.0}, {"seed": 3})] == expected


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 100)])
def test_draws_follow_the_tempered_softmax(temperature: float, top_k: int | None) -> None:
    logits_V = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.9])
    weights_V = (logits_V.double() / temperature).exp()
    if top_k is not None:
        weights_V[logits_V.argsort(descending=True)[top_k:]] = 0
    expected_V = weights_V / weights_V.sum()
    generator, count = torch.Generator().manual_seed(0), 3000
    sampling = Sampling(temperature=temperature, top_k=top_k)
    drawn = torch.tensor([draw(logits_V, sampling, generator) for _ in range(count)])
    shares_V = torch.bincount(drawn, minlength=5) / count
    deviation_V = (expected_V * (1 - expected_V) / count).sqrt()
    assert ((shares_V - expected_V).abs() <= 4 * deviation_V).all()


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_the_least_temperature_takes_the_most_likely_token_whatever_the_logits(scale: float) -> None:
    """Also logits that are larger than any layer has; divided by a smaller temperature, they would be infinite."""
    sampling = Sampling(temperature=module.LEAST_TEMPERATURE)
    assert draw(scale * torch.tensor([-1.0, 3.0, 2.0]), sampling, torch.Generator().manual_seed(0)) == 1


def test_it_stops_at_the_end_of_text_and_draws_no_padding_of_the_vocabulary() -> None:
    model = build()
    with torch.no_grad():
        model.readout.weight[VOCAB:] = 50 * model.readout.weight[:8]  # the largest logits, half of the time
    text = tokens(model, [7], 100, temperature=2.0)
    assert max(text) < VOCAB
    end = text[12]
    assert tokens(model, [7], 100, end, temperature=2.0) == text[: text.index(end)]


# Texts.
class Recital(torch.nn.Module):
    """Gives every next token of a text its turn, then the end of text."""

    def __init__(self, text: list[int], end: int, vocab_size: int) -> None:
        super().__init__()
        self.text, self.read = [*text, end], list[int]()
        self.embedding = torch.nn.Embedding(vocab_size, 1)

    def init_state(self, batch: int) -> list[Any]:
        return []

    def step(self, tokens_B: torch.Tensor, states: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        self.read.append(int(tokens_B))
        following = torch.tensor([self.text[len(self.read)]])
        return torch.nn.functional.one_hot(following, self.embedding.num_embeddings).float(), states


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes as tokens, so that a character may take several of them."""
    return train_tokenizer(["the cat sat on the mat, über Öl"], 300)


def test_pieces_are_whole_characters_and_make_up_the_text(tokenizer: Tokenizer) -> None:
    """A model that writes what comes next in a text with characters of several bytes."""
    text = " über Öl, the cat 🙂 on Öl"
    prompt, rest = (tokenizer.encode(part).ids for part in ("the mat", text))
    model = Recital([*prompt, *rest], tokenizer.token_to_id("</s>"), tokenizer.get_vocab_size())
    pieces = list(generate(model, tokenizer, prompt, 200, Sampling(temperature=0.0)))  # type: ignore[arg-type]
    assert "".join(pieces) == text
    assert 1 < len(pieces) < len(rest)
    assert not any("\ufffd" in piece for piece in pieces)
    assert model.read[-1] == rest[-1]


def test_spaces_that_a_decoder_takes_off_the_first_word_are_kept_after_a_prompt() -> None:
    """T5's decoder drops the space of the first word; the continuation's first word is not the first."""
    t5 = Tokenizer(models.WordLevel({"</s>": 0, "▁the": 1, "▁cat": 2, "▁sat": 3}, unk_token="</s>"))
    t5.add_special_tokens(["</s>"])
    t5.pre_tokenizer, t5.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model = Recital([1, 2, 3], 0, 4)
    assert list(generate(model, t5, [1], 9, Sampling(temperature=0.0))) == [" cat", " sat"]  # type: ignore[arg-type]


# The command.
@pytest.fixture
def checkpoint(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "load_model", {tmp_path: (build(vocab_size=384), tokenizer)}.__getitem__)
    return tmp_path


@pytest.mark.parametrize("prompt", ["the cat", ""])
def test_the_command_prints_prompt_and_continuation(
    prompt: str, checkpoint: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(checkpoint), "--prompt", prompt, "--max-new-tokens", "12", "--device", "cpu"]
    main(arguments)
    first = capsys.readouterr().out
    ids = tokenizer.encode(prompt).ids or [tokenizer.token_to_id("</s>")]  # the start of a document
    assert encode_prompt(tokenizer, prompt) == ids
    pieces = generate(build(vocab_size=384), tokenizer, ids, 12, Sampling())
    assert first == f"{prompt}{''.join(pieces)}\n"
    before = torch.get_rng_state()
    main([*arguments, "--seed", "1"])
    assert capsys.readouterr().out != first
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--temperature", "-1"], "temperature -1.0 must be"),
        (["--temperature", "nan"], "temperature nan must be"),
        (["--temperature", "1e-40"], "temperature 1e-40 must be 0, or 1e-06 at least"),
        (["--top-k", "0"], "top-k 0 must be"),
        (["--topk", "3"], "--topk"),
        (["--top-k", "many"], "top-k"),
    ],
)
def test_what_cannot_be_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(checkpoint), "--device", "cpu", *arguments])
    output, error = capsys.readouterr()
    assert output == ""
    assert reason in error


def test_the_limit_of_a_layer_is_one_line_after_the_text(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, table_PD = LanguageModel.step, torch.zeros(10, 32)

    def limited(self: LanguageModel, tokens_B: torch.Tensor, states: list[Any]) -> Any:
        table_PD[states[0]["k"].shape[1]]
        return step(self, tokens_B, states)

    monkeypatch.setattr(LanguageModel, "step", limited)
    with pytest.raises(SystemExit, match="2"):
        main([str(checkpoint), "--prompt", "the", "--device", "cpu", "--max-new-tokens", "60"])
    output, error = capsys.readouterr()
    assert output.startswith("the")
    assert output.endswith("\n")
    assert error.startswith("error: Transformer cannot generate after 11 tokens (IndexError: index 10 is out of bounds")
    assert error.count("\n") == 1
