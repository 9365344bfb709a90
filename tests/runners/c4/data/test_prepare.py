"""Tokenising against a plain encoding of the documents; kills, damage and bad input."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from rich.console import Console

import runners
from runners.c4.data import prepare as data
from runners.c4.data import sources
from runners.c4.data.corpus import Corpus, Windows, open_shard
from runners.c4.data.prepare import prepare
from runners.c4.data.tokenizer import end_of_text, load_tokenizer
from runners.files import write_json

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

END = "<|endoftext|>"
SHARD = 300
ALL = 10**9


@dataclass
class Source:
    """Documents in files, and a tokenizer."""

    folder: Path
    train: list[str]
    validation: list[str]
    tokenizer: Path

    def prepare(self, out: Path, train_tokens: int = ALL, validation_tokens: int = ALL, seq_len: int = 0) -> Corpus:
        arguments = str(self.tokenizer), train_tokens, validation_tokens, Console(file=io.StringIO()), seq_len
        return prepare(out, [str(self.folder)], *arguments)

    def encode(self, documents: list[str]) -> list[int]:
        """One document after the other, end-of-text after each."""
        tokenizer = tokenizers.Tokenizer.from_file(str(self.tokenizer))
        tokenizer.encode_special_tokens = True
        end = tokenizer.token_to_id(END)
        return [i for text in documents for i in [*tokenizer.encode(text, add_special_tokens=False).ids, end]]


def write_documents(path: Path, documents: list[str]) -> None:
    rows = (json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b"}) for text in documents)
    content = "".join(row + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def write_tokenizer(path: Path, documents: list[str], specials: list[str]) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))


def random_documents(seed: int, count: int) -> list[str]:
    """Texts of 2 to 60 words, and one that is longer than two shards."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(200)]
    lengths = [rng.randint(2, 60) for _ in range(count)]
    lengths[count // 2] = 3 * SHARD
    return [" ".join(rng.choices(words, k=n)) for n in lengths]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(data, "SHARD_TOKENS", SHARD)
    monkeypatch.setattr(data, "BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    train, validation = random_documents(0, 40), random_documents(1, 10)
    train[3], train[7] = f"a {END} in the text é\u2028\U0001f600", ""
    folder = tmp_path / "c4"
    folder.mkdir()
    write_documents(folder / "c4-train.00000-of-00002.json.gz", train[:25])
    write_documents(folder / "c4-train.00001-of-00002.json.gz", train[25:])
    write_documents(folder / "c4-validation.00000-of-00001.json.gz", validation)
    write_tokenizer(tmp_path / "tokenizer.json", train, [END])
    return Source(folder, train, validation, tmp_path / "tokenizer.json")


def tokens_of(corpus: Corpus, split: sources.Split) -> list[int]:
    parts = [open_shard(corpus.folder, shard)[0] for shard in corpus.manifest.splits[split].shards]
    return np.concatenate(parts).tolist()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_shards_hold_every_document_once_with_end_of_text_after_it(source: Source, tmp_path: Path) -> None:
    corpus = source.prepare(tmp_path / "out")
    assert tokens_of(corpus, "train") == source.encode(source.train)
    assert tokens_of(corpus, "validation") == source.encode(source.validation)
    train = corpus.manifest.splits["train"]
    assert (train.dropped, train.lines, train.complete) == (0, (25, 15), True)
    assert all(shard.tokens == SHARD for shard in train.shards[:-1])
    assert corpus.manifest.vocab_size == 300

    # Each shard knows the beginnings of its documents.
    starts = np.cumsum([0, *(len(source.encode([text])) for text in source.train)])
    begin = 0
    for shard in train.shards:
        tokens_N, documents_D3 = open_shard(corpus.folder, shard)
        assert tokens_N.dtype == np.uint16
        inside = [n for n in range(40) if starts[n] < begin + shard.tokens and starts[n + 1] > begin]
        assert documents_D3[:, :2].tolist() == [[starts[n], n] for n in inside]
        begin += shard.tokens


def test_tokens_documents_and_windows_are_those_of_the_stored_results(source: Source, tmp_path: Path) -> None:
    """The digests are of commit 351acc2, with whose corpora the reference language models are comparable."""
    corpus = source.prepare(tmp_path / "out", 3000)
    content = b"".join(path.read_bytes() for path in sorted(corpus.folder.glob("*.npy")))
    windows = [Windows(corpus, "train", 16, seed).batch(step, 8) for seed in (None, 5) for step in range(60)]
    digests = [hashlib.sha256(found).hexdigest()[:16] for found in (content, np.stack(windows).tobytes())]
    assert digests == ["cafca1e705776902", "2622f7edaf1798d3"]


def test_large_vocabularies_take_four_bytes_a_token(source: Source, tmp_path: Path) -> None:
    content = json.loads(source.tokenizer.read_text())
    content["model"]["vocab"] |= {f"unused {i}": i for i in range(300, 2**16 + 5)}
    content["model"]["vocab"]["a"], content["model"]["vocab"]["unused 65540"] = 2**16 + 4, 1
    source.tokenizer.write_text(json.dumps(content))
    corpus = source.prepare(tmp_path / "out")
    assert corpus.manifest.vocab_size == 2**16 + 5
    assert tokens_of(corpus, "train") == source.encode(source.train)
    assert open_shard(corpus.folder, corpus.manifest.splits["train"].shards[0])[0].dtype == np.uint32


def test_no_training_document_has_the_text_of_a_validation_document(source: Source, tmp_path: Path) -> None:
    everything = [*source.train, *source.validation, "new", *source.validation]
    write_documents(source.folder / "more.jsonl", everything[40:])
    corpus = source.prepare(tmp_path / "out", validation_tokens=SHARD)
    last = open_shard(corpus.folder, corpus.manifest.splits["validation"].shards[-1])[1][-1, 1]
    held_out = source.validation[: last + 1]
    assert tokens_of(corpus, "train") == source.encode([text for text in everything if text not in held_out])
    assert len(held_out) < 10  # and the last of them is cut by the end of the shard
    assert corpus.manifest.splits["train"].dropped == 2 * len(held_out)

    # More validation tokens never meet shards that were not compared with them.
    assert source.prepare(tmp_path / "out", validation_tokens=1).folder == corpus.folder
    whole = source.prepare(tmp_path / "out")
    assert whole.folder != corpus.folder
    assert tokens_of(whole, "train") == source.encode([*source.train, "new"])


def test_asking_for_more_tokens_goes_on_and_leaves_the_shards_alone(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = len(source.encode(source.train))
    before: dict[str, bytes] = {}
    for tokens in (1, SHARD, *range(SHARD + 1, total, 2 * SHARD), ALL):
        corpus = source.prepare(tmp_path / "out", train_tokens=tokens)
        now = files_of(corpus.folder)
        assert all(now[name] == content for name, content in before.items() if name.endswith(".npy"))
        assert now == files_of(source.prepare(tmp_path / f"{tokens}", train_tokens=tokens).folder)
        assert corpus.tokens("train") == min(tokens, total)
        assert len(corpus.manifest.splits["train"].shards) == -(-corpus.tokens("train") // SHARD)
        before = now
    assert tokens_of(corpus, "train") == source.encode(source.train)

    # Nothing is tokenised twice, and a run sees the tokens that it asked for.
    monkeypatch.setattr(data, "read", None)
    assert source.prepare(tmp_path / "out", train_tokens=100).tokens("train") == 100


def test_after_a_kill_at_any_moment_the_corpus_is_that_of_an_uninterrupted_run(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD_TOKENS", 2 * SHARD)
    manifests: list[bytes] = []
    write = data.write_manifest

    def spy(folder: Path, manifest: data.Manifest) -> None:
        write(folder, manifest)
        manifests.append((folder / "manifest.json").read_bytes())

    monkeypatch.setattr(data, "write_manifest", spy)
    folder = source.prepare(tmp_path / "out").folder
    whole = files_of(folder)
    assert len(manifests) > 8
    for manifest in [None, *manifests]:
        # What a kill leaves after this manifest: the next shard whole, torn or half of its files, a temporary file.
        for name, content in whole.items():
            if name.encode().partition(b".")[0] not in (manifest or b""):
                (folder / name).write_bytes(content[: len(content) // 2])
        (folder / ".unfinished-abc.npy").write_bytes(b"half")
        (folder / "manifest.json").unlink()
        if manifest:
            (folder / "manifest.json").write_bytes(manifest)
        source.prepare(tmp_path / "out")
        assert files_of(folder) == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_text('{"splits": {"train": 3}}'),
        Path.unlink,
    ],
)
def test_damage_of_any_file_is_found_and_named(source: Source, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    some = tmp_path / "out", 2 * SHARD, SHARD
    folder = source.prepare(*some).folder
    for path in sorted(folder.glob("*.npy" if damage is Path.unlink else "*")):
        content = path.read_bytes()
        damage(path)
        with pytest.raises(ValueError, match=f"{path.name} is damaged .*: delete the folder {folder}"):
            source.prepare(*some)
        path.write_bytes(content)
    source.prepare(*some)


def test_other_data_or_another_tokenizer_is_another_corpus(source: Source, tmp_path: Path) -> None:
    folders = [source.prepare(tmp_path / "out", 1).folder]

    # The same text in another folder, packed by another program.
    source.folder = source.folder.rename(tmp_path / "moved")
    for path in source.folder.iterdir():
        content = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(content[:1000], 1, mtime=7) + gzip.compress(content[1000:], 0))
    assert source.prepare(tmp_path / "out", 1).folder == folders[0]

    write_documents(source.folder / "c4-train.00000-of-00002.json.gz", [*source.train[:24], source.train[24][::-1]])
    folders.append(source.prepare(tmp_path / "out", 1).folder)
    for text in ("one text", "two text"):
        write_documents(source.folder / "plain.json", [text])
        folders.append(source.prepare(tmp_path / "out", 1).folder)
    write_tokenizer(source.tokenizer, source.train[:5], [END])
    folders.append(source.prepare(tmp_path / "out", 1).folder)
    assert len(set(folders)) == 5


def test_a_text_is_hashed_again_only_if_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c4-train.json"
    opened: list[str] = []
    open_file = sources._open
    monkeypatch.setattr(sources, "_open", lambda file: opened.append(file) or open_file(file))

    def digest() -> str:
        return sources.describe([str(path)])[0]["sha256"]

    path.write_text("one text")
    assert digest() == digest() == hashlib.sha256(b"one text").hexdigest()
    assert len(opened) == 1
    (tmp_path / "new").write_text("two text")
    os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    (tmp_path / "new").replace(path)
    assert digest() == hashlib.sha256(b"two text").hexdigest()
    sources.DIGESTS.write_text("damaged")
    assert digest() == hashlib.sha256(b"two text").hexdigest()
    assert len(opened) == 3


def test_a_second_process_waits_and_finds_it_done(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = source.prepare(tmp_path / "whole").folder
    folder = tmp_path / "out" / "corpora" / whole.name
    folder.mkdir(parents=True)
    lock = FileLock(folder.with_suffix(".lock"))

    class Other(Console):
        """The other process goes on when this one says that it waits."""

        def print(self, *objects: object, **_: object) -> None:  # type: ignore[override]
            assert "waiting for another process" in str(objects)
            shutil.copytree(whole, folder, dirs_exist_ok=True)
            lock.release()

    monkeypatch.setattr(data, "read", None)  # this process reads nothing
    with lock:
        arguments = [str(source.folder)], str(source.tokenizer), ALL, ALL
        corpus = prepare(tmp_path / "out", *arguments, Other(file=io.StringIO()))
    assert tokens_of(corpus, "train") == source.encode(source.train)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'{"text": "a"}\n\n{"url": "b"}\n', 'line 3 of .*x.json is no JSON object with a "text".*--data'),
        ("x.json", b'{"text": 3}', "line 1 of"),
        ("x.json", b"plain text", "line 1 of"),
        ("x.json", b'["text"]', "line 1 of"),
        ("x.json", b"[" * 100_000, "line 1 of"),
        ("x.json", b"\xff\xfe", "cannot read .*x.json"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0)[:-1], "cannot read .*x.jsonl.gz .*--data"),
        ("c4-validation.00000-of-00001.json.gz", gzip.compress(b"", mtime=0), "no document for the validation split"),
    ],
)
def test_files_at_fault_are_named_and_leave_other_corpora_alone(
    name: str, content: bytes, message: str, source: Source, tmp_path: Path
) -> None:
    first = source.prepare(tmp_path / "out", train_tokens=SHARD).folder
    before = files_of(first)
    (source.folder / name).write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            source.prepare(tmp_path / "out")
    assert files_of(first) == before


def test_splits_that_are_too_short_are_refused(source: Source, tmp_path: Path) -> None:
    size = len(source.encode(source.validation))
    source.prepare(tmp_path / "out", seq_len=size - 1)
    with pytest.raises(
        ValueError, match=r"the validation split has [\d,]+ tokens, fewer than one window of .*--seq-len"
    ):
        source.prepare(tmp_path / "out", seq_len=size)
    for path in source.folder.glob("*train*"):
        write_documents(path, source.validation[:3])
    with pytest.raises(ValueError, match=r"no document for the train split .* \(6 are validation documents, too\)"):
        source.prepare(tmp_path / "out")


def test_blank_lines_and_byte_order_marks_are_no_documents_but_count_as_lines(source: Source, tmp_path: Path) -> None:
    content = '\ufeff\n{"text": "a"}\r\n \n{"text": "b\\ud800"}\n\n'
    (source.folder / "more.json").write_text(content, newline="")
    corpus = source.prepare(tmp_path / "out")
    assert tokens_of(corpus, "train") == source.encode([*source.train, "a", "b?"])
    numbers = open_shard(corpus.folder, corpus.manifest.splits["train"].shards[-1])[1][-2:, 1]
    assert numbers.tolist() == [41, 43]
    assert corpus.manifest.splits["train"].lines == (25, 15, 5)


def test_missing_data_are_named(source: Source, tmp_path: Path) -> None:
    train, validation = (
        [str(f) for f in sorted(source.folder.glob(f"*{split}*"))] for split in ("train", "validation")
    )
    found = sources.find_files([str(source.folder), *train])
    assert found == {"validation": validation, "train": train}
    (tmp_path / "empty").mkdir()
    for names, message in [
        ([str(tmp_path / "nowhere")], "no file or folder .*nowhere with texts: give --data"),
        ([str(tmp_path / "empty")], "no file or folder .*empty with texts: give --data"),
        (train, r"no validation file among the 2 of --data: files named \*validation\*"),
        (validation, "no train file among the 1 of --data"),
    ]:
        with pytest.raises(ValueError, match=message):
            sources.find_files(names)


def test_the_hub_is_read_as_local_files_are(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, asked = datasets.load_dataset, []
    here = {"validation": "c4-validation.00000-of-00001.json.gz", "train": "c4-train.00000-of-00002.json.gz"}

    def mirrored(builder: str, data_files: list[str], **options: object) -> object:
        asked.extend(data_files)
        local = here["validation" if "validation" in data_files[0] else "train"]
        return load(builder, data_files=[str(source.folder / local)], **options)

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Name or service not known")

    arguments = str(source.tokenizer), 5 * SHARD, SHARD, Console(file=io.StringIO())
    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"cannot read allenai/c4 .*Name or service not known.*--data"):
        prepare(tmp_path / "out", (), *arguments)
    monkeypatch.setattr(datasets, "load_dataset", mirrored)
    corpus = prepare(tmp_path / "out", (), *arguments)
    assert tokens_of(corpus, "train") == source.encode(source.train[:25] * 3)[: 5 * SHARD]
    assert asked[0] == "hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz"


def test_a_tokenizer_reads_all_of_a_text_and_special_tokens_as_text(source: Source) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(source.tokenizer))
    texts = ["a", source.train[0]]
    expected = [tokenizer.encode(text).ids for text in texts]
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=3)
    tokenizer.save(str(source.tokenizer))
    loaded = load_tokenizer(str(source.tokenizer))
    assert [encoding.ids for encoding in loaded.encode_batch(texts)] == expected
    assert end_of_text(loaded) not in loaded.encode(f"a {END} b").ids
    assert loaded.decode(loaded.encode(f"a {END} b").ids) == f"a {END} b"

    # No program loads one in another way.
    sources = [path for path in Path(runners.__file__).parent.rglob("*.py") if "Tokenizer.from_" in path.read_text()]
    assert [path.name for path in sources] == ["tokenizer.py"]


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("name", ["nowhere.json", ".", "some-one/some-thing", "other.json"])
def test_a_tokenizer_that_is_not_there_or_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("other.json"), {"a": 1})
    with pytest.raises(ValueError, match=rf"^no tokenizer '{name}' \(.*give --tokenizer a tokenizer.json"):
        load_tokenizer(name)


def test_a_tokenizer_without_end_of_text(source: Source, tmp_path: Path) -> None:
    write_tokenizer(source.tokenizer, source.train, ["<pad>"])
    with pytest.raises(ValueError, match="has no end-of-text token: give another one, or add one of </s>"):
        source.prepare(tmp_path / "out")
