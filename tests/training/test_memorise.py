"""Training and decoding fit together: what is learnt is what is asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specjax
from specjax.drafters import Drafter, init_dspark, split_params
from specjax.training.anchors import make_blocks, sample_anchors
from specjax.training.losses import LossWeights, dspark_losses
from tests.toys import tiny_target

PROMPT, NEW, STEPS = [5, 6, 7], 60, 400


@pytest.mark.parametrize("head", [pytest.param("vanilla", marks=pytest.mark.slow), "rnn"])
@jax.numpy_dtype_promotion("standard")  # optax mixes floats with its integer step
def test_a_memorised_text_is_accepted_about_always(head):
    target = tiny_target()
    plain = specjax.generate(target, None, [PROMPT], max_new_tokens=NEW)
    text = np.array([PROMPT + plain.tokens[0]], np.int32)
    out = target.forward(text, taps=(-1, 0))
    model, params = init_dspark(
        target, jax.random.key(0), num_layers=1, taps=(-1, 0), mask_token_id=60, markov_rank=8,
        markov_head=head, block_size=5,
    )  # fmt: skip
    params, frozen = split_params(params)
    optimizer = optax.adam(3e-3)
    mask = jnp.asarray(np.arange(text.shape[1]) >= len(PROMPT) - 1)[None]

    def loss(params, key):
        uniform = jax.random.uniform(key, (1, text.shape[1] - 1))
        anchors, keep = sample_anchors(mask, uniform, 16)
        blocks = make_blocks(jnp.asarray(text), mask, anchors, keep, block_size=5, mask_token_id=60)
        drafts = model.forward(
            {**params, **frozen}, out.taps, blocks.tokens_BAG, blocks.previous_BAG, anchors
        )
        probs = jax.nn.softmax(out.logits[0])[blocks.states_BAG]
        return dspark_losses(drafts, blocks, probs, LossWeights()).total

    @jax.jit
    def train(params, state):
        def step(carry, key):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, key)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        keys = jax.random.split(jax.random.key(1), STEPS)
        return jax.lax.scan(step, (params, state), keys)

    (params, _), losses = train(params, jax.jit(optimizer.init)(params))
    losses = np.asarray(losses)
    assert losses[-1] < losses[0] / 2
    drafter = Drafter(model, {**params, **frozen}, "memorised")
    result = specjax.generate(target, drafter, [PROMPT], max_new_tokens=NEW, draft_len=5)
    assert result.tokens == plain.tokens
    # 59 tokens after the prefill's take ten rounds of six.
    assert result.stats.rounds_B[0] <= 13, result.stats.accepted_BG
