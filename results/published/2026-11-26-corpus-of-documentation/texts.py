"""Collect the texts of the corpus of documentation: 99 packages of Debian 12, and documents in C4's format.

    python texts.py texts prose/*.json.gz                                  # on Debian 12, needs its package index
    python -m runners.c4 convert my_corpus texts --clean --vocabulary 8000

The corpus of the stored language models was made at commit c026ae9, whose ``convert`` read HTML with code of its own.
Today's ``convert`` reads it by the package resiliparse, which makes another corpus.

All packages are in Debian's section main, that is under free licences. The script needs no other Python package.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = """
linux-doc-6.1 rust-doc python3.11-doc postgresql-doc-15 git-doc erlang-doc nodejs-doc ghc-doc racket-doc cmake-doc
llvm-15-doc apache2-doc exim4-doc-html postfix-doc nginx-doc libvirt-doc qemu-system-data xen-doc docker-doc
slurm-wlm-doc openmpi-doc mpich-doc lammps-doc ns3-doc yade-doc dolfinx-doc gmsh-doc gap-doc maxima-doc octave-doc
gnuplot-doc r-doc-html swi-prolog-doc sbcl-doc guile-3.0-doc haskell98-report golang-1.19-doc tcl8.6-doc pypy3-doc
cython-doc mypy-doc scons-doc sphinx-doc bash-doc elpa-org lilypond-doc-html libstdc++-12-doc xapian-doc
python-scipy-doc python-pandas-doc python-sklearn-doc python-sympy-doc python-mpmath-doc python-xarray-doc
python-dask-doc python-django-doc python-sqlalchemy-doc python-celery-doc python-tornado-doc python-pytest-doc
python-ipython-doc twisted-doc buildbot-doc borgbackup-doc mailman3-doc rt5-doc-html bacula-doc ikiwiki dokuwiki
shorewall-doc selinux-policy-doc user-mode-linux-doc barbican-doc cinder-doc designate-doc glance-doc heat-doc
ironic-doc keystone-doc manila-doc neutron-doc nova-doc swift-doc debian-faq debian-handbook debian-kernel-handbook
debian-policy debian-reference-en debmake-doc developers-reference harden-doc installation-guide-amd64
live-manual-html maint-guide aptitude-doc-en gnome-user-docs gimp-help-en libreoffice-help-en-us anarchism
""".split()  # noqa: SIM905 as a list, one name a line
ENDINGS = tuple(f"{ending}{packed}" for ending in (".html", ".htm", ".md", ".rst", ".txt") for packed in ("", ".gz"))
TRANSLATION = "(ar|ca|cs|da|de|el|es|fa|fr|hr|id|it|ja|ko|nb|nl|pl|pt|ro|ru|sv|tr|vi|zh)([-_][A-Za-z]{2})?"
LEFT_OUT = [
    re.compile(pattern)
    for pattern in (
        r"/_sources/",  # the same text again
        r"^linux-doc-6\.1/.*/Documentation/.*\.rst",  # as HTML, too
        r"^lilypond-doc-html/.*-big-page\.",  # as single pages, too
        # Generated from source code.
        r"^rust-doc/.*/html/(std|core|alloc|proc_macro|test|arch)(/|\.html)",
        r"^ghc-doc/.*/libraries/",
        r"^python-pandas-doc/.*/(reference|generated)/",
        r"^erlang-doc/.*/wx",
        r"^twisted-doc/.*/api/",
        r"^libstdc\+\+-12-doc/.*/user/",
        r"^lilypond-doc-html/.*/(internals|snippets|web)/",
        # Translations.
        r"/translations/",
        r"^dokuwiki/.*/lang/(?!en/)",
        rf"^(apache2-doc|debian-handbook|harden-doc|installation-guide-amd64)/.*/{TRANSLATION}/",
        rf"^(live-manual-html|debmake-doc)/.*\.{TRANSLATION}\.",
    )
]


def main(folder: Path, prose: list[Path]) -> None:
    """Write the texts of the packages and of C4-format files to a new folder, each document as one file.

    A page of pandas that stands in its package plain and packed is the same in both.
    """
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=temporary, check=True)

        folder.mkdir()
        index = 0
        for file in prose:
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                for line in lines:
                    _write(folder / "prose" / f"{index:05}.txt", json.loads(line)["text"].encode())
                    index += 1
        print(f"documents of C4-format files: {index}")

        for package in PACKAGES:
            (archive,) = Path(temporary).glob(f"{package}_*.deb")
            version = archive.name.split("_")[1].replace("%3a", ":")
            print(f"{package} {version}: {_unpack(archive, package, folder)} files")


def _unpack(archive: Path, package: str, folder: Path) -> int:
    """Write those files of a package that are text and are not left out; return their number."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(["dpkg-deb", "--extract", archive, temporary], check=True)
        written = set()
        for place, _, names in os.walk(temporary):
            for source in (Path(place, name) for name in names):
                name = f"{package}/{source.relative_to(temporary)}"
                if source.is_symlink() or not name.endswith(ENDINGS):
                    continue
                if not any(pattern.search(name) for pattern in LEFT_OUT):
                    packed = name.endswith(".gz")
                    content = gzip.decompress(source.read_bytes()) if packed else source.read_bytes()
                    target = folder / "packages" / name.removesuffix(".gz")
                    _write(target, content)
                    written.add(target)
    return len(written)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
