"""What the compiler makes of the loop: nothing the size of a cache is copied in it."""

import re

import jax
import jax.numpy as jnp
import pytest

from specjax.checkpoints import load_drafter
from specjax.decoding.loop import _decode, init_decode_state
from specjax.decoding.types import DecodeConfig, SamplingParams
from specjax.drafters import Composed, NoDrafter, PromptLookup, init_dspark
from tests.toys import tiny_target


@pytest.mark.parametrize(
    "acceptance", ["rejection", pytest.param("coupled", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "kind",
    [
        "none",
        "prompt_lookup",
        "early_exit:1",
        "dspark",
        pytest.param("composed", marks=pytest.mark.slow),
    ],
)
def test_no_cache_is_copied_in_the_loop(kind, acceptance):
    target = tiny_target(max_len=4096)
    model, params, draft_len = NoDrafter(), (), 0
    if kind in ("dspark", "composed"):
        model, params = init_dspark(target, jax.random.key(0), num_layers=1, mask_token_id=60)
        draft_len = 3
        if kind == "composed":
            model = Composed(PromptLookup(), model, model_len=2)
    elif kind != "none":
        drafter = load_drafter(kind, target)
        model, params, draft_len = drafter.model, drafter.params, 3
    static = {
        "target": target.model,
        "drafter": model,
        "config": DecodeConfig(draft_len, acceptance=acceptance),
    }

    made = []

    def start():
        state = init_decode_state(
            target.params, params, [[1, 2], [3]], max_new_tokens=8, max_len=2000,
            sampling=SamplingParams(temperature_B=0.7), **static,
        )  # fmt: skip
        made.append((jax.tree.structure(state), state.cache[0].k_BKSH.shape))
        return jax.tree.leaves(state)

    leaves = jax.eval_shape(start)  # without the programs of the prompts
    [(treedef, cache_shape)] = made

    def loop(target_params, drafter_params, leaves):
        state = treedef.unflatten(leaves)
        return jax.tree.leaves(_decode.__wrapped__(target_params, drafter_params, state, **static))

    lowered = jax.jit(loop, donate_argnums=2).lower(target.params, params, leaves)
    program = lowered.compile().as_text()
    shape = ",".join(map(str, cache_shape))
    assert f"f32[{shape}]" in program
    copies = re.findall(rf"= f32\[{shape}\]\S* copy(?:-start)?\(.*", program)
    assert not copies, copies


def test_a_copy_would_be_seen():
    """The same search finds the copy of a value that is kept beside its changed self."""
    shape = (2, 2, 2048, 8)

    def step(_, carry):
        cache, old = carry
        return cache.at[:, :, 3].set(jnp.sum(old)), cache

    program = jax.jit(lambda x: jax.lax.fori_loop(0, 4, step, (x, x * 2.0)))
    text = program.lower(jnp.zeros(shape)).compile().as_text()
    assert re.search(rf"= f32\[{','.join(map(str, shape))}\]\S* copy\(", text)
