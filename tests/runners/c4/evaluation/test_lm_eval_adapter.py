"""The adapter under a stand-in of the harness's abstract class, against next-token probabilities of single prefixes."""

import importlib.metadata
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
from runners.c4.evaluation.lm_eval_adapter import main, register

MODULE = "runners.c4.evaluation.lm_eval_model"
NAME = "rt-c4"
LENGTH = 8
TEXT = "the cat sat on the mat with a hat"


class LM(ABC):
    """What ``lm_eval.api.model.LM`` (version 0.4.13) asks of a model."""

    def __init__(self) -> None:
        self._rank = 0

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
    forget_the_model(monkeypatch)
    return found


def forget_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model's file be imported afresh, also by the next test."""
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    del sys.modules[MODULE]


@pytest.fixture
def adapter(
    registered: dict[str, type],
    model: LanguageModel,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    register()
    loaded = {"load_model": (model, tokenizer), "load_config": SimpleNamespace(seq_len=LENGTH)}
    for name, value in loaded.items():

        def load(path: Path, value: Any = value) -> Any:
            assert path == tmp_path
            return value

        monkeypatch.setattr(sys.modules[MODULE], name, load)
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


def test_it_is_a_model_of_the_harness(adapter: Any) -> None:
    assert isinstance(adapter, LM)
    assert adapter._rank == 0  # the harness's own constructor ran


def test_log_likelihoods_are_in_the_order_of_the_requests(
    adapter: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    words = TEXT.split()
    pairs = [("the cat ", "sat on"), ("", "mat"), *((a, f" {b}") for a in words for b in words)]
    answers = adapter.loglikelihood([Instance(pair) for pair in pairs])
    for (context, continuation), answer in zip(pairs, answers, strict=True):
        tokens = tokenizer.encode(context + continuation).ids
        given = len(tokenizer.encode(context.rstrip()).ids)
        expected = sums(model, tokens, given) if given else sums(model, [0, *tokens], 1)
        assert answer == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert {greedy for _, greedy in answers} == {True, False}


def test_a_long_context_is_cut_on_the_left(adapter: Any, model: LanguageModel, tokenizer: Tokenizer) -> None:
    tokens, rest = (tokenizer.encode(text).ids for text in (TEXT, " cat"))
    [(answer, _)] = adapter.loglikelihood([Instance((TEXT, " cat"))])
    kept = [*tokens, *rest][-LENGTH - 1 :]
    assert len(tokens) > LENGTH
    assert answer == pytest.approx(sums(model, kept, len(kept) - len(rest))[0], rel=1e-5)


def test_a_whole_text_is_predicted_after_an_end_of_text_in_parts(
    adapter: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    """As in the harness's documentation: parts of as many tokens as the model reads, of which the last two overlap."""
    long = f"{TEXT} {TEXT}"
    tokens = [0, *tokenizer.encode(long).ids]
    assert 2 * LENGTH < len(tokens) - 1 < 3 * LENGTH
    left = len(tokens) - 1 - 2 * LENGTH
    parts = [
        (tokens[: LENGTH + 1], 1),
        (tokens[LENGTH : 2 * LENGTH + 1], 1),
        (tokens[-LENGTH - 1 :], LENGTH + 1 - left),
    ]
    expected = sum(sums(model, part, given)[0] for part, given in parts)
    answers = adapter.loglikelihood_rolling([Instance(("the",)), Instance((long,)), Instance(("",))])
    short = sums(model, [0, *tokenizer.encode("the").ids], 1)[0]
    assert answers == pytest.approx([short, expected, 0.0], rel=1e-5)


def decoded(model: LanguageModel, tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (token := int(following(model, tokens).argmax())) != 0:
        tokens.append(token)
    return tokenizer.decode(tokens)[len(tokenizer.decode(prompt)) :]


def test_generation_is_greedy_and_ends_before_a_stop_text(
    adapter: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("the").ids
    text = decoded(model, tokenizer, prompt, 30)
    stop = text[len(text) // 2 :][:3]
    settings = [{"max_gen_toks": 30}, {"max_gen_toks": 30, "until": ["never seen", stop], "do_sample": False}]
    answers = adapter.generate_until([Instance(("the", setting)) for setting in settings])
    assert answers == [text, text[: text.index(stop)]]


def test_a_context_is_cut_to_leave_room_for_what_is_generated(
    adapter: Any, model: LanguageModel, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(TEXT).ids
    for count, kept in ((LENGTH - 3, 3), (LENGTH + 5, 1)):
        [text] = adapter.generate_until([Instance((TEXT, {"max_gen_toks": count, "until": "never seen"}))])
        assert text == decoded(model, tokenizer, prompt[-kept:], count)


def test_sampling_is_seeded(adapter: Any) -> None:
    settings = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 20}
    first, second, greedy = adapter.generate_until(
        [Instance(("the", setting)) for setting in (settings, settings, {"max_gen_toks": 20})]
    )
    assert first == second != greedy


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "temperature": 0.7, "top_k": 0, "top_p": 0.9},
        {"temperature": 0.0, "min_p": 0.1},
        {"do_sample": True, "temperature": 0.0, "typical_p": 0.5},
    ],
)
def test_greedy_decoding_ignores_settings_of_sampling(adapter: Any, settings: dict[str, Any]) -> None:
    requests = [Instance(("the", {**more, "max_gen_toks": 20})) for more in ({}, settings)]
    plain, other = adapter.generate_until(requests)
    assert other == plain != ""


def test_a_temperature_alone_asks_for_sampling(adapter: Any) -> None:
    settings = {"temperature": 2.0, "max_gen_toks": 20}
    requests = [Instance(("the", {**settings, **more})) for more in ({}, {"do_sample": True}, {"do_sample": False})]
    alone, sampled, greedy = adapter.generate_until(requests)
    assert alone == sampled != greedy


@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"do_sample": True, "top_p": 0.9}])
def test_a_setting_that_would_count_and_is_not_known_is_refused(adapter: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"generation knows no (num_beams|top_p)"):
        adapter.generate_until([Instance(("the", settings))])


def test_text_is_read_no_further_than_its_first_stop(registered: dict[str, type]) -> None:
    register()
    read_until = sys.modules[MODULE].read_until
    taken = []

    def pieces() -> Iterator[str]:
        for piece in ("one t", "wo, ", "three"):
            taken.append(piece)
            yield piece

    assert read_until(pieces(), [",", "two", "three"]) == "one "
    assert taken == ["one t", "wo, "]
    assert read_until(pieces(), []) == "one two, three"


def test_the_command_is_the_harness_own_with_the_model_registered(
    registered: dict[str, type], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["anything"])
    main(["--model", NAME, "--tasks", "piqa"])
    assert capsys.readouterr().out == f"lm_eval --model {NAME} --tasks piqa {NAME}\n"


def test_a_harness_with_plugins_finds_the_model_by_its_entry_point(registered: dict[str, type]) -> None:
    """By the group and the form of a value that its docs/plugins.md asks for (from version 0.4.14 on)."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    group = "lm_eval.models"
    [(name, value)] = project["entry-points"][group].items()
    found = importlib.metadata.EntryPoint(name, value, group).load()
    assert name == NAME
    assert registered == {NAME: found}
    assert issubclass(found, LM)


def test_a_batch_size_that_is_no_number_is_refused(adapter: Any, tmp_path: Path) -> None:
    for wrong in ("auto", 0, "-1"):
        with pytest.raises(ValueError, match="must be a whole number"):
            type(adapter)(checkpoint=tmp_path, batch_size=wrong, device="cpu")


def test_other_arguments_and_none_are_refused(adapter: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{NAME} knows no batch: give --model_args checkpoint=FOLDER"):
        type(adapter)(checkpoint=tmp_path, batch="3")
    with pytest.raises(ValueError, match="the checkpoint is missing"):
        type(adapter)(batch_size=3)


def test_the_gpu_that_the_harness_names_by_itself_may_be_missing(
    adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = type(adapter)(checkpoint=tmp_path, device="cuda:0")
    assert made.model.embedding.weight.device.type == "cpu"
    assert caplog.messages == ["PyTorch sees no GPU: the model runs on the CPU"]
    with pytest.raises(ValueError, match="no device 'gpu'"):
        type(adapter)(checkpoint=tmp_path, device="gpu")


def test_without_the_harness_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_the_model(monkeypatch)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as stop:
        main(["--tasks", "piqa"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: lm-evaluation-harness is not installed: pip install -e '.[eval]'\n"
