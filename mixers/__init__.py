"""The registry of layers, by family."""

from mixers.base import Layer
from mixers.deltanet import DeltaNet, GatedDeltaNet
from mixers.feedback_transformer import FeedbackTransformer
from mixers.gla import GatedLinearAttention
from mixers.hyena import Hyena
from mixers.linear_attention import LinearAttention
from mixers.lru import LRU
from mixers.lstm import LSTM
from mixers.mamba import Mamba
from mixers.mamba2 import Mamba2
from mixers.retnet import RetNet
from mixers.rmt import RecurrentMemoryTransformer
from mixers.rt.layer import RecurrentTransformer
from mixers.rwkv import RWKV6, RWKV7
from mixers.s5 import S5
from mixers.sliding_attention import SlidingAttention
from mixers.staircase import Staircase
from mixers.transformer import Transformer
from mixers.transformer_fam import TransformerFAM
from mixers.transformer_xl import TransformerXL

MIXERS: dict[str, type[Layer]] = {
    "transformer": Transformer,
    "sliding-attention": SlidingAttention,
    "transformer-xl": TransformerXL,
    "rt": RecurrentTransformer,
    "feedback-transformer": FeedbackTransformer,
    "staircase": Staircase,
    "transformer-fam": TransformerFAM,
    "rmt": RecurrentMemoryTransformer,
    "linear-attention": LinearAttention,
    "retnet": RetNet,
    "gla": GatedLinearAttention,
    "rwkv6": RWKV6,
    "deltanet": DeltaNet,
    "gated-deltanet": GatedDeltaNet,
    "rwkv7": RWKV7,
    "s5": S5,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "lstm": LSTM,
    "lru": LRU,
    "hyena": Hyena,
}
