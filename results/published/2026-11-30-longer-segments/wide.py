r"""RMT and TransformerFAM with longer segments than on the tasks.

    PYTHONPATH=.:results/published/2026-11-30-longer-segments python -m runners.bench layers --width 1024 \
        --layers transformer rmt wide:RMT32 wide:RMT128 transformer-fam wide:FAM32 wide:FAM128
"""

from dataclasses import dataclass

from mixers.rmt import RecurrentMemoryTransformer
from mixers.transformer_fam import TransformerFAM


class RMT32(RecurrentMemoryTransformer):
    """Segments of 32 positions."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentMemoryTransformer.Config):
        segment: int = 32


class RMT128(RecurrentMemoryTransformer):
    """Segments of 128 positions."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrentMemoryTransformer.Config):
        segment: int = 128


class FAM32(TransformerFAM):
    """Blocks of 32 positions."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TransformerFAM.Config):
        block: int = 32


class FAM128(TransformerFAM):
    """Blocks of 128 positions."""

    @dataclass(frozen=True, kw_only=True)
    class Config(TransformerFAM.Config):
        block: int = 128
