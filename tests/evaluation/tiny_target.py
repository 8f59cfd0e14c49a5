"""A tiny random target with a byte tokeniser, for tests of whole tasks."""

import functools

import jax
from flax import linen as nn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax import Target
from specjax.models.config import TransformerConfig
from specjax.models.transformer import TransformerTarget

STOP = 256
_CONFIG = TransformerConfig(
    architecture="llama",
    vocab_size=257,
    width=16,
    mlp_width=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    norm_eps=1e-5,
    max_len=160,
    tied_head=True,
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one that ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    return fast


def tiny_target(dtype: str = "float32", stop_ids: tuple[int, ...] = (STOP,)) -> Target:
    """Random parameters, the same every time, large enough for varied output."""
    model = TransformerTarget(_CONFIG)
    return Target(model, _params(dtype), byte_tokenizer(), stop_ids, "tiny", dtype)


@functools.cache
def _params(dtype: str):
    @jax.jit
    def make(key):
        params = nn.unbox(TransformerTarget(_CONFIG).init_params(key))
        return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, params)

    return make(jax.random.key(0))
