"""The model of the harness under a stand-in of its abstract class, against probabilities of single prefixes."""

import importlib.metadata
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mixers.base import Shape
from mixers.models import LanguageModel
from mixers.transformer import Transformer
from runners.c4.evaluation.lm_eval_adapter import main

MODULE = "runners.c4.evaluation.lm_eval_model"
NAME = "rt-c4"
LENGTH = 8
TEXT = "the cat sat on the mat with a hat"


class LM(ABC):
    """What ``lm_eval.api.model.LM`` (version 0.4.13) asks of a model."""

    def __init__(self) -> None:
        self._rank = 0
        self._device: Any = None

    @property
    def device(self) -> Any:
        return self._device

    @abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]: ...

    @abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]: ...


@dataclass
class Instance:
    """A request, as ``lm_eval.api.instance.Instance`` shows it to a model."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], vocab_size=60, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LanguageModel:
    torch.manual_seed(0)
    shape = Shape(width=16, mlp_width=32, layers=2)
    return LanguageModel(Transformer, Transformer.Config(heads=2), shape, tokenizer.get_vocab_size()).eval()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Stand-in of the harness; returns its registry of models."""
    found: dict[str, type] = {}

    def register_model(name: str) -> Callable[[type], type]:
        return lambda model: found.setdefault(name, model)

    contents = {"lm_eval": {}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": LM}}
    contents |= {"lm_eval.api.registry": {"register_model": register_model}}
    contents |= {"lm_eval.api.instance": {"Instance": Instance}}
    contents |= {"lm_eval.__main__": {"cli_evaluate": lambda: print(*sys.argv, *found)}}
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    # The model's file is imported afresh, also by the next test.
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    del sys.modules[MODULE]
    return found


@pytest.fixture
def adapter(
    registered: dict[str, type],
    model: LanguageModel,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "load_model", {tmp_path: (model, tokenizer)}.__getitem__)
    monkeypatch.setattr(module, "load_config", {tmp_path: SimpleNamespace(seq_len=LENGTH)}.__getitem__)
    return registered[NAME](checkpoint=tmp_path, batch_size="2", max_batch_size=None, device="cpu")


def following(model: LanguageModel, context: list[int]) -> torch.Tensor:
    """Log-probabilities (V,) of the next token, float64."""
    with torch.no_grad():
        return model(torch.tensor([context]))[0, -1].double().log_softmax(dim=0)


def sums(model: LanguageModel, tokens: list[int], given: int) -> tuple[float, bool]:
    """Log-probability of the tokens after the first ``given``, and whether each is the likeliest."""
    rows = [following(model, tokens[:place]) for place in range(given, len(tokens))]
    total = sum(row[token].item() for row, token in zip(rows, tokens[given:], strict=True))
    return total, all(int(row.argmax()) == token for row, token in zip(rows, tokens[given:], strict=True))


def test_log_likelihoods_are_in_the_order_of_the_requests(
    adapter: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    """A long context is cut on the left."""
    words = TEXT.split()
    pairs = [("the cat ", "sat on"), ("", "mat"), (TEXT, " cat"), *((a, f" {b}") for a in words for b in words)]
    answers = adapter.loglikelihood([Instance(pair) for pair in pairs])
    for (context, continuation), answer in zip(pairs, answers, strict=True):
        given = tokenizer.encode(context.rstrip()).ids or [0]
        rest = tokenizer.encode(context + continuation).ids[len(tokenizer.encode(context.rstrip()).ids) :]
        kept = [*given, *rest][-LENGTH - 1 :]
        expected = sums(model, kept, len(kept) - len(rest))
        assert answer == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert {greedy for _, greedy in answers} == {True, False}

    # A whole text is predicted after an end of text.
    whole = sums(model, [0, *tokenizer.encode("the cat").ids], 1)[0]
    assert adapter.loglikelihood_rolling([Instance(("the cat",)), Instance(("",))]) == pytest.approx([whole, 0.0])
    assert isinstance(adapter, LM)
    assert adapter._rank == 0  # the harness's own constructor ran


def decoded(model: LanguageModel, tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (token := int(following(model, tokens).argmax())) != 0:
        tokens.append(token)
    return tokenizer.decode(tokens)[len(tokenizer.decode(prompt)) :]


def test_generation_is_greedy_and_ends_before_the_first_stop_text(
    adapter: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    text = decoded(model, tokenizer, tokenizer.encode("the").ids, 30)
    stop = text[len(text) // 2 :][:3]
    until = ["never seen", text[-2:], stop]
    settings = [{"max_gen_toks": 30}, {"max_gen_toks": 30, "until": until, "do_sample": False}]
    answers = adapter.generate_until([Instance(("the", setting)) for setting in settings])
    assert answers == [text, text[: min(text.index(stop), text.index(text[-2:]))]]

    # A context is cut to leave room for what is generated.
    prompt = tokenizer.encode(TEXT).ids
    for count, kept in ((LENGTH - 3, 3), (LENGTH + 5, 1)):
        [text] = adapter.generate_until([Instance((TEXT, {"max_gen_toks": count, "until": "never seen"}))])
        assert text == decoded(model, tokenizer, prompt[-kept:], count)


@pytest.mark.parametrize(
    ("settings", "is_greedy"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_k": 0, "top_p": 0.9}, True),
        ({"temperature": 0.0, "min_p": 0.1}, True),
        ({"do_sample": True, "temperature": 0.0, "typical_p": 0.5}, True),
        ({"do_sample": True, "temperature": 2.0}, False),
        ({"temperature": 2.0}, False),  # a temperature alone asks for sampling
    ],
)
def test_sampling_is_seeded_and_greedy_decoding_ignores_its_settings(
    adapter: Any, settings: dict[str, Any], is_greedy: bool
) -> None:
    requests = [Instance(("the", {**more, "max_gen_toks": 20})) for more in ({}, settings, settings)]
    greedy, first, second = adapter.generate_until(requests)
    assert first == second
    assert (first == greedy) == is_greedy


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"do_sample": True, "top_p": 0.9}])
def test_a_setting_that_would_count_and_is_not_known_is_refused(adapter: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"generation knows no (num_beams|top_p)"):
        adapter.generate_until([Instance(("the", settings))])


def test_the_command_is_the_harness_own_with_the_model_registered(
    registered: dict[str, type],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ended: Callable[..., str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["anything"])
    main(["--model", NAME, "--tasks", "piqa"])
    assert capsys.readouterr().out == f"lm_eval --model {NAME} --tasks piqa {NAME}\n"

    # A harness with plugins finds it by the group and the form of a value of its docs/plugins.md (from 0.4.14 on).
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["lm_eval.models"].items()
    found = importlib.metadata.EntryPoint(name, value, "lm_eval.models").load()
    assert registered == {NAME: found}

    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert ended(main, ["--tasks", "piqa"]).endswith("pip install -e '.[eval]'\n")


def test_the_gpu_that_the_harness_names_by_itself_may_be_missing(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(adapter)(checkpoint=tmp_path, device="cuda:0").model.embedding.weight.device.type == "cpu"
