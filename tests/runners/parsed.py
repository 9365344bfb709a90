"""The code of the programs, parsed when this is imported: ``code_version`` remembers it, also in forked processes."""

from runners.provenance import code_version

code_version("runners.mad.__main__", "runners.c4.__main__", "mixers.registry")
