"""Tokenising against a plain encoding of the documents; kills, damage and bad input."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from rich.console import Console

from runners.c4.corpus import packing, shards, sources
from runners.c4.corpus import prepare as data
from runners.c4.corpus.prepare import Corpus, prepare
from runners.c4.corpus.shards import open_shard
from runners.c4.corpus.tokenizer import load_tokenizer

datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")
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

    def prepare(self, out: Path, train_tokens: int = ALL, validation_tokens: int = ALL) -> Corpus:
        console = Console(file=io.StringIO())
        return prepare(out, [str(self.folder)], str(self.tokenizer), train_tokens, validation_tokens, console)

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
    monkeypatch.setattr(packing, "BATCH_DOCUMENTS", 7)
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
    assert (train.documents, train.dropped, train.lines, train.complete) == (40, 0, (25, 15), True)
    assert all(shard.tokens == SHARD for shard in train.shards[:-1])
    assert corpus.manifest.vocab_size == 300
    assert open_shard(corpus.folder, train.shards[0])[0].dtype == np.uint16


def test_a_log_counts_the_documents_of_a_batch_that_is_not_used_up(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(data, "SHARD_TOKENS", 10)
    prepare(tmp_path / "out", [str(source.folder)], str(source.tokenizer), 1, 1, Console(file=written))
    tokens = len(source.encode(source.train[:7]))
    assert f"tokenising train: 7 documents, {tokens} tokens\n" in written.getvalue()


def test_each_shard_knows_the_beginnings_of_its_documents(source: Source, tmp_path: Path) -> None:
    corpus = source.prepare(tmp_path / "out")
    lengths = [len(source.encode([text])) for text in source.train]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    begin = 0
    for shard in corpus.manifest.splits["train"].shards:
        documents_D3 = open_shard(corpus.folder, shard)[1]
        inside = [n for n in range(40) if starts[n] < begin + shard.tokens and starts[n + 1] > begin]
        assert documents_D3[:, :2].tolist() == [[starts[n], n] for n in inside]
        begin += shard.tokens


def test_large_vocabularies_take_four_bytes_a_token(source: Source, tmp_path: Path) -> None:
    content = json.loads(source.tokenizer.read_text())
    largest = content["added_tokens"][0]["id"]
    content["model"]["vocab"] |= {f"unused {i}": i for i in range(300, 2**16 + 5)}
    content["model"]["vocab"]["a"], content["model"]["vocab"]["unused 65540"] = 2**16 + 4, largest + 1
    source.tokenizer.write_text(json.dumps(content))
    corpus = source.prepare(tmp_path / "out")
    found = tokens_of(corpus, "train")
    assert corpus.manifest.vocab_size == 2**16 + 5
    assert max(found) == 2**16 + 4
    assert found == source.encode(source.train)
    assert open_shard(corpus.folder, corpus.manifest.splits["train"].shards[0])[0].dtype == np.uint32


def test_no_training_document_has_the_text_of_a_validation_document(source: Source, tmp_path: Path) -> None:
    again = [source.validation[i] for i in range(10)]
    write_documents(source.folder / "more.jsonl", [*again, "new", *again])
    corpus = source.prepare(tmp_path / "out", validation_tokens=SHARD)
    last = open_shard(corpus.folder, corpus.manifest.splits["validation"].shards[-1])[1][-1, 1]
    held_out = source.validation[: last + 1]
    everything = [*source.train, *again, "new", *again]
    assert tokens_of(corpus, "train") == source.encode([text for text in everything if text not in held_out])
    assert len(held_out) < 10  # and the last of them is cut by the end of the shard
    assert corpus.manifest.splits["validation"].tokens < len(source.encode(held_out))
    assert corpus.manifest.splits["train"].dropped == 2 * len(held_out)


def test_asking_for_more_tokens_goes_on_and_leaves_the_shards_alone(source: Source, tmp_path: Path) -> None:
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


def test_more_validation_tokens_never_meet_shards_that_were_not_compared_with_them(
    source: Source, tmp_path: Path
) -> None:
    write_documents(source.folder / "more.json", source.validation)
    few = source.prepare(tmp_path / "out", validation_tokens=SHARD)
    assert source.prepare(tmp_path / "out", validation_tokens=1).folder == few.folder
    all_of_them = source.prepare(tmp_path / "out")
    assert all_of_them.folder != few.folder
    assert tokens_of(all_of_them, "train") == source.encode(source.train)


def test_a_corpus_shows_a_run_the_tokens_it_asked_for_whatever_others_had(source: Source, tmp_path: Path) -> None:
    source.prepare(tmp_path / "out")
    corpus = source.prepare(tmp_path / "out", train_tokens=100, validation_tokens=ALL)
    assert corpus.tokens("train") == 100


def test_nothing_is_tokenised_twice(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.prepare(tmp_path / "out")
    monkeypatch.setattr(data, "read", None)
    source.prepare(tmp_path / "out")


def test_after_a_kill_at_any_moment_the_corpus_is_that_of_an_uninterrupted_run(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SHARD_TOKENS", 2 * SHARD)
    manifests: list[bytes] = []
    write = data.write_manifest

    def spy(folder: Path, manifest: shards.Manifest) -> None:
        write(folder, manifest)
        manifests.append((folder / "manifest.json").read_bytes())

    monkeypatch.setattr(data, "write_manifest", spy)
    folder = source.prepare(tmp_path / "out").folder
    whole = files_of(folder)
    assert len(manifests) > 8
    for manifest in [None, *manifests]:
        # what a kill leaves after this manifest: the next shard whole, torn or half of its files, a temporary file
        named = manifest or b""
        for name, content in whole.items():
            if name.encode().partition(b".")[0] not in named:
                (folder / name).write_bytes(content[: len(content) // 2])
        (folder / ".train-00001.tokens-abc.npy").write_bytes(b"half")
        (folder / "manifest.json").unlink()
        if manifest:
            (folder / "manifest.json").write_bytes(manifest)
        source.prepare(tmp_path / "out")
        assert files_of(folder) == whole


def test_a_real_kill_in_the_middle_of_a_write(source: Source, tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import io, os, signal, sys
        from pathlib import Path
        import numpy as np
        from rich.console import Console
        from runners.c4.corpus import packing, prepare as data

        data.SHARD_TOKENS, packing.BATCH_DOCUMENTS = {SHARD}, 7
        save, calls = np.save, []

        def torn(path, array):
            save(path, array)
            calls.append(path)
            if len(calls) == 9:
                os.truncate(path, 150)
                os.kill(os.getpid(), signal.SIGKILL)

        np.save = torn
        out, folder, tokenizer = sys.argv[1:]
        data.prepare(Path(out), [folder], tokenizer, {ALL}, {ALL}, Console(file=io.StringIO()))
    """)
    out = tmp_path / "killed"
    arguments = [sys.executable, "-c", script, str(out), str(source.folder), str(source.tokenizer)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    root = Path(__file__).parents[4]
    killed = subprocess.run(arguments, cwd=root, env=environment, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (folder,) = (path for path in (out / "corpora").iterdir() if path.is_dir())
    assert any(name.startswith(".") for name in files_of(folder))
    assert files_of(source.prepare(out).folder) == files_of(source.prepare(tmp_path / "whole").folder)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_damage_of_any_file_is_found_and_named(source: Source, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = source.prepare(tmp_path / "out").folder
    for path in sorted(folder.glob("*.npy")):
        content = path.read_bytes()
        damage(path)
        with pytest.raises(ValueError, match=f"{path.name} is (damaged|missing): delete the folder {folder}") as error:
            source.prepare(tmp_path / "out")
        assert len(str(error.value).splitlines()) == 1
        path.write_bytes(content)
    source.prepare(tmp_path / "out")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"splits": {"train": 3}}'])
def test_a_damaged_manifest_is_named(source: Source, tmp_path: Path, content: str) -> None:
    path = source.prepare(tmp_path / "out").folder / "manifest.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is damaged: delete the folder"):
        source.prepare(tmp_path / "out")


def test_other_data_or_another_tokenizer_is_another_corpus(source: Source, tmp_path: Path) -> None:
    folders = [source.prepare(tmp_path / "out", 1).folder]
    source.folder = source.folder.rename(tmp_path / "moved")
    assert source.prepare(tmp_path / "out", 1).folder == folders[0]
    changed = [*source.train[:24], source.train[24][::-1]]
    write_documents(source.folder / "c4-train.00000-of-00002.json.gz", changed)
    folders.append(source.prepare(tmp_path / "out", 1).folder)
    write_documents(source.folder / "plain.json", ["one text"])
    folders.append(source.prepare(tmp_path / "out", 1).folder)
    write_documents(source.folder / "plain.json", ["two text"])
    folders.append(source.prepare(tmp_path / "out", 1).folder)
    write_tokenizer(source.tokenizer, source.train[:5], [END])
    folders.append(source.prepare(tmp_path / "out", 1).folder)
    assert len(set(folders)) == 5


def describe(*files: Path) -> list[dict[str, str]]:
    return sources.describe([str(file) for file in files])


def test_the_same_text_is_the_same_corpus_whatever_packed_it(source: Source, tmp_path: Path) -> None:
    corpus = source.prepare(tmp_path / "out").folder
    for path in source.folder.iterdir():
        content = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(content[:1000], 1, mtime=7) + gzip.compress(content[1000:], 0))
    assert source.prepare(tmp_path / "out").folder == corpus


def test_every_byte_of_a_text_counts_in_its_fingerprint(tmp_path: Path) -> None:
    content = bytes(5000)
    contents = [content, content + b"\0", *(content[:at] + b"\1" + content[at + 1 :] for at in (0, 2500, 4999))]
    for n, changed in enumerate(contents):
        (tmp_path / f"{n}.json").write_bytes(changed)
        (tmp_path / f"{n}.json.gz").write_bytes(gzip.compress(changed))
    plain, packed = (describe(*(tmp_path / f"{n}.{ending}" for n in range(5))) for ending in ("json", "json.gz"))
    assert [source["sha256"] for source in packed] == [hashlib.sha256(changed).hexdigest() for changed in contents]
    assert [source["sha256"] for source in plain] == [source["sha256"] for source in packed]


def test_a_text_is_hashed_again_only_if_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c4-train.json"
    hashed: list[str] = []
    digest = sources._digest
    monkeypatch.setattr(sources, "_digest", lambda file: hashed.append(file) or digest(file))
    path.write_text("one text")
    first = describe(path)
    assert describe(path) == first
    assert len(hashed) == 1
    (tmp_path / "new").write_text("two text")
    os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    (tmp_path / "new").replace(path)
    assert describe(path) != first
    sources.DIGESTS.write_text("damaged")
    assert describe(path) != first
    assert len(hashed) == 3


def test_a_second_process_waits_and_finds_it_done(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = source.prepare(tmp_path / "whole").folder
    folder = tmp_path / "out" / "corpora" / whole.name
    folder.mkdir(parents=True)
    lock = FileLock(folder.with_suffix(".lock"))
    said: list[str] = []

    class Other(Console):
        """The other process goes on when this one says that it waits."""

        def print(self, *objects: object, **_: object) -> None:  # type: ignore[override]
            said.append(str(objects))
            shutil.copytree(whole, folder, dirs_exist_ok=True)
            lock.release()

    monkeypatch.setattr(data, "read", None)  # this process reads nothing
    with lock:
        files, tokenizer = [str(source.folder)], str(source.tokenizer)
        corpus = prepare(tmp_path / "out", files, tokenizer, ALL, ALL, Other(file=io.StringIO()))
    assert len(said) == 1
    assert "waiting for another process" in said[0]
    assert tokens_of(corpus, "train") == source.encode(source.train)


def test_a_full_disk_is_one_line_and_damages_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.prepare(tmp_path / "out", train_tokens=SHARD)

    def full(path: Path, array: np.ndarray) -> None:
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    def too_many(*arguments: object, **settings: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(ValueError, match=r"cannot write into .*No space left on device.*free some space"):
            source.prepare(tmp_path / "out")

    # Another reason is told as it is: neither is there too little space, nor is the corpus damaged.
    for function in ("save", "load"):
        with monkeypatch.context() as patch:
            patch.setattr(np, function, too_many)
            with pytest.raises(OSError, match="Too many open files"):
                source.prepare(tmp_path / "out")
    whole = files_of(source.prepare(tmp_path / "whole").folder)
    assert files_of(source.prepare(tmp_path / "out").folder) == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n\n{"url": "b"}\n', 'line 3 of .*x.json is no JSON object with a "text"'),
        (b'{"text": 3}', "line 1 of"),
        (b"plain text", "line 1 of"),
        (b'["text"]', "line 1 of"),
        (b"[" * 100_000, "line 1 of"),
        (b"\xff\xfe", "cannot read .*x.json"),
    ],
)
def test_a_file_that_is_no_c4(source: Source, tmp_path: Path, content: bytes, message: str) -> None:
    (source.folder / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message + ".*--data") as error:
        source.prepare(tmp_path / "out" / "of" / "mine")
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_torn_download_is_named(source: Source, tmp_path: Path) -> None:
    cut(source.folder / "c4-train.00001-of-00002.json.gz")
    with pytest.raises(ValueError, match=r"cannot read .*c4-train.00001-of-00002.json.gz \(.*--data"):
        source.prepare(tmp_path / "out")


def test_blank_lines_are_no_documents_but_count_as_lines(source: Source, tmp_path: Path) -> None:
    (source.folder / "more.json").write_text('\n{"text": "a"}\n \n{"text": "b"}\n\n')
    corpus = source.prepare(tmp_path / "out")
    assert tokens_of(corpus, "train") == source.encode([*source.train, "a", "b"])
    numbers = open_shard(corpus.folder, corpus.manifest.splits["train"].shards[-1])[1][-2:, 1]
    assert numbers.tolist() == [41, 43]
    assert corpus.manifest.splits["train"].lines == (25, 15, 5)


def test_missing_data_are_named(source: Source, tmp_path: Path) -> None:
    def find(*names: Path) -> dict[sources.Split, list[str]]:
        return sources.find_files([str(name) for name in names])

    train, validation = sorted(source.folder.glob("*train*")), sorted(source.folder.glob("*validation*"))
    assert find(source.folder, *train) == {"validation": [str(f) for f in validation], "train": [str(f) for f in train]}
    (tmp_path / "empty").mkdir()
    for names, message in [
        ([tmp_path / "nowhere"], "no file or folder .*nowhere: give --data"),
        ([tmp_path / "empty"], "no .*json.gz.* in the folder .*empty: give --data"),
        (train, r"no validation file among the 2 of --data: files named \*validation\*"),
        (validation, "no train file among the 1 of --data"),
    ]:
        with pytest.raises(ValueError, match=message):
            find(*names)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_without_a_document(source: Source, tmp_path: Path, split: str) -> None:
    for path in source.folder.glob(f"*{split}*"):
        write_documents(path, [])
    for _ in range(2):
        with pytest.raises(ValueError, match=f"no document for the {split} split in .*--data"):
            source.prepare(tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_training_documents_that_are_all_validation_documents(source: Source, tmp_path: Path) -> None:
    for path in source.folder.glob("*train*"):
        write_documents(path, source.validation[:3])
    words = r"all training documents \(\d+\) are validation documents, too, and are left out: give --data with other"
    with pytest.raises(ValueError, match=words):
        source.prepare(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_byte_order_mark_of_a_file_is_no_text(source: Source, tmp_path: Path) -> None:
    (source.folder / "more.json").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    corpus = source.prepare(tmp_path / "out")
    assert tokens_of(corpus, "train") == source.encode([*source.train, "a", "b"])


def test_data_at_fault_leave_other_corpora_and_earlier_work_alone(source: Source, tmp_path: Path) -> None:
    first = source.prepare(tmp_path / "out", train_tokens=SHARD)
    before = files_of(first.folder)
    cut(source.folder / "c4-train.00001-of-00002.json.gz")
    with pytest.raises(ValueError, match="cannot read"):
        source.prepare(tmp_path / "out")
    assert files_of(first.folder) == before
    assert {path.stem for path in (tmp_path / "out" / "corpora").iterdir()} == {first.folder.name}


def test_without_a_network_the_error_says_what_to_give(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def offline(_builder: str, data_files: list[str], **_: object) -> None:
        asked.append(data_files)
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"cannot read allenai/c4 .*Name or service not known.*--data") as error:
        prepare(tmp_path / "out", (), str(source.tokenizer), 1, 1, Console(file=io.StringIO()))
    assert len(str(error.value).splitlines()) == 1
    assert asked == [["hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz"]]


def test_the_hub_is_read_as_local_files_are(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = datasets.load_dataset
    here = {"validation": "c4-validation.00000-of-00001.json.gz", "train": "c4-train.00000-of-00002.json.gz"}

    def mirrored(builder: str, data_files: list[str], **options: object) -> object:
        (name,) = data_files
        local = here["validation" if "validation" in name else "train"]
        return load(builder, data_files=[str(source.folder / local)], **options)

    monkeypatch.setattr(datasets, "load_dataset", mirrored)
    arguments = str(source.tokenizer), 5 * SHARD, SHARD, Console(file=io.StringIO())
    corpus = prepare(tmp_path / "out", (), *arguments)
    expected = source.encode(source.train[:25] * 3)
    assert tokens_of(corpus, "train") == expected[: 5 * SHARD]


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.json", "no tokenizer file nowhere.json: give --tokenizer"),
        (".", "no tokenizer file .: give --tokenizer"),
        (
            "some-one/some-thing",
            "no tokenizer 'some-one/some-thing' on the hub, or no network .*give --tokenizer .* convert makes",
        ),
    ],
)
def test_a_tokenizer_that_is_not_there(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        @staticmethod
        def from_pretrained(_name: str) -> None:
            raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tokenizers, "Tokenizer", Hub)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(name)


def test_without_a_network_the_hub_is_asked_once_and_a_tokenizer_in_the_cache_is_read(
    source: Source, tmp_path: Path, unreachable: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer 'a/b' .*no network \(.*Name or service not known\)"):
        load_tokenizer("a/b")
    assert len(unreachable) == 1
    folder, commit = tmp_path / "hub" / "models--a--b", "0" * 40
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    shutil.copy(source.tokenizer, folder / "snapshots" / commit)
    assert load_tokenizer("a/b").to_str() == load_tokenizer(str(source.tokenizer)).to_str()
    assert len(unreachable) == 2
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not huggingface_hub.is_offline_mode()


def test_a_tokenizer_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"no tokenizer '.*tokenizer.json' file \(.*give --tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_without_end_of_text(source: Source, tmp_path: Path) -> None:
    write_tokenizer(source.tokenizer, source.train, ["<pad>"])
    with pytest.raises(ValueError, match="has no end-of-text token: give another one, or add one of </s>"):
        source.prepare(tmp_path / "out")


def test_a_tokenizer_does_not_truncate(source: Source) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(source.tokenizer))
    expected = [tokenizer.encode(text).ids for text in ("a", source.train[0])]
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=3)
    tokenizer.save(str(source.tokenizer))
    loaded = load_tokenizer(str(source.tokenizer))
    assert [encoding.ids for encoding in loaded.encode_batch(["a", source.train[0]])] == expected


def test_a_missing_library_names_the_extra(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files need the tokenizer's library alone."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    source.prepare(tmp_path / "local")
    with pytest.raises(ValueError, match=r"datasets: pip install -e '.\[pretraining\]', or give --data"):
        prepare(tmp_path / "out", (), str(source.tokenizer), 1, 1, Console(file=io.StringIO()))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install -e '.\[pretraining\]'"):
        source.prepare(tmp_path / "out")
