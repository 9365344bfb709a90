"""The registry of layers."""

from mixers.attention import Transformer
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
from mixers.transformer_fam import TransformerFAM
from mixers.transformer_xl import TransformerXL

MIXERS: dict[str, type[Layer]] = {
    "transformer": Transformer,
    "rt": RecurrentTransformer,
    "linear-attention": LinearAttention,
    "retnet": RetNet,
    "gla": GatedLinearAttention,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated-deltanet": GatedDeltaNet,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "sliding-attention": SlidingAttention,
    "transformer-xl": TransformerXL,
    "feedback-transformer": FeedbackTransformer,
    "staircase": Staircase,
    "transformer-fam": TransformerFAM,
    "rmt": RecurrentMemoryTransformer,
    "mamba": Mamba,
    "s5": S5,
    "lru": LRU,
    "lstm": LSTM,
    "hyena": Hyena,
}
