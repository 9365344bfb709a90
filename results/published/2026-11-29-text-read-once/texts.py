"""Fetch packages of Debian and write the English prose in them as text files.

    python texts.py packages.txt texts downloads  # needs mandoc and Debian 12's index: main, contrib, non-free; English
    python build.py packages.txt texts my_corpus  # resiliparse, and this project

A line of ``packages.txt`` has name, version and licence of a package, ``descriptions`` stands for the descriptions of
all packages. The order counts: of two texts that resemble each other the first is kept. A file of a package becomes
``texts/SOURCE/PACKAGE/PATH.txt``. SOURCE, the name of the source package, is the manual.
"""

import lzma
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from extract import PARTS, kind_of, read

from runners.c4.data.cleaning import fault_of, is_prose

LARGEST = 30_000_000
"""Bytes of the largest file that is read."""
ENTRIES = 500
"""Paragraphs of a dictionary that make a document."""


def main(packages: Path, folder: Path, cache: Path) -> None:
    """Write the texts of all packages, in all cores; a package whose table stands in ``folder`` is done."""
    folder.mkdir(exist_ok=True)
    lines = filter(None, packages.read_text().split("\n"))
    with Pool() as workers:
        for name in workers.imap_unordered(partial(write_texts, folder, cache), lines):
            print(name, flush=True)


def write_texts(folder: Path, cache: Path, line: str) -> str:
    """Write the texts of the package of a line of the list, and return its name."""
    name, version, *_ = [*line.split(" "), ""]
    if (folder / f"{name}.tsv").exists():
        return name
    if name == "descriptions":
        describe(folder)
        return name
    if not list(cache.glob(f"{name}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", f"{name}={version}"], cwd=cache, check=True)
    counts = unpack(next(cache.glob(f"{name}_*.deb")), name, folder)
    rows = [f"{kind}\t{n}\t{kept}\t{characters}\n" for kind, (n, kept, characters) in counts.items()]
    (folder / f"{name}.tsv").write_text("".join(rows))
    return name


def describe(folder: Path) -> None:
    """Write the long descriptions of all packages of the index, a text for each source package."""
    index = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    texts: dict[str, dict[str, None]] = defaultdict(dict)
    for entry in index.split("\n\n"):
        fields = dict(re.findall(r"(?m)^(Package|Source|Description-en): (.*(?:\n .*)*)", entry))
        if "Description-en" in fields:
            source = fields.get("Source", fields["Package"]).split()[0]
            lines = ["" if line == " ." else line.removeprefix(" ") for line in fields["Description-en"].split("\n")]
            parts = PARTS.split("\n".join([lines[0], "", *lines[1:]]))
            texts[source] |= dict.fromkeys(part.strip("\n") for part in parts if is_prose(part.strip()))
    for source, kept in texts.items():
        if not fault_of(prose := "\n\n".join(kept)):
            (folder / source / "descriptions").mkdir(parents=True, exist_ok=True)
            (folder / source / "descriptions" / "descriptions.txt").write_text(prose, encoding="utf-8")
    (folder / "descriptions.tsv").write_text("")


def unpack(archive: Path, package: str, folder: Path) -> dict[str, list[int]]:
    """Write the texts of a package; return the number of files, of those kept and of characters, by kind."""
    about = subprocess.run(["dpkg-deb", "-f", archive, "Source", "Version"], capture_output=True, text=True, check=True)
    found = re.search(r"Source: (\S+)", about.stdout)
    target = folder / (found[1] if found else package) / package
    counts: dict[str, list[int]] = {}
    command = ["dpkg-deb", "--fsys-tarfile", archive]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as members,
    ):
        for member in members:
            if member.isfile() and member.name.startswith("./usr/src/") and member.name.endswith(".tar.xz"):
                with tarfile.open(fileobj=lzma.open(members.extractfile(member)), mode="r|") as sources:
                    for source in sources:
                        take(sources, source, target, counts)
            else:
                take(members, member, target, counts)
    return counts


def take(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path, counts: dict[str, list[int]]) -> None:
    """Write the text of one file, if it is prose, and count it."""
    if not member.isfile() or member.size > LARGEST or (kind := kind_of(member.name)) is None:
        return
    try:
        text = read(member.name, members.extractfile(member).read(), kind[1])
    except Exception as error:  # a damaged file is left out
        print(member.name, repr(error)[:100], flush=True)
        return

    count = counts.setdefault(kind[0], [0, 0, 0])
    count[0] += 1
    paragraphs = list(filter(is_prose, PARTS.split(text)))
    size = ENTRIES if kind[0] == "dictionary" else max(1, len(paragraphs))
    for start in range(0, len(paragraphs), size):
        prose = "\n\n".join(paragraphs[start : start + size])
        if not fault_of(prose):
            count[1:] = [count[1] + 1, count[2] + len(prose)]
            part = f".{start // size:04}" if size < len(paragraphs) else ""
            file = target / (member.name.removeprefix("./").replace("/", "_")[-200:] + part + ".txt")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(prose, encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
