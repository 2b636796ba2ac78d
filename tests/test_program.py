"""The compiled loop: one program whatever the data, a real conditional, nothing on the host, no copy of the cache."""

import jax
import jax.numpy as jnp
import pytest

from entmtp_jax.report.compiled import cache_sized_copies, conditionals, host_transfers
from entmtp_jax.scheduler import force, hysteresis, ladder
from entmtp_jax.state import Request
from tests.decoding import NUM_TOPOLOGIES, PROMPTS, decoder, fixed_policy, model_params, noisy_ranks


@pytest.fixture(scope="module", params=["replay", "medusa", "lookup"])
def compiled_run(request):
    built, params = decoder(request.param), model_params(request.param, [PROMPTS[0]])
    state = built.start([Request(PROMPTS[0], 20)])
    program = built.run.lower(params, state, fixed_policy(0), jnp.int32(5)).compile()
    return program.as_text(), state.cache


def test_the_switch_is_a_conditional_over_the_bank(compiled_run):
    assert NUM_TOPOLOGIES in conditionals(compiled_run[0])


def test_nothing_leaves_the_device(compiled_run):
    assert host_transfers(compiled_run[0]) == []


def test_the_cache_is_never_copied(compiled_run):
    text, cache = compiled_run
    assert cache_sized_copies(text, cache) == []


def test_one_program_serves_all_policies_prompts_seeds_and_limits():
    built = decoder.__wrapped__()  # its own: other tests may have called the shared one with weakly typed weights
    policies = [
        fixed_policy(0),
        fixed_policy(3),
        ladder([4, 0], [0.7], num_topologies=NUM_TOPOLOGIES),
        ladder([1, 2, 3], [0.1, 5.0], num_topologies=NUM_TOPOLOGIES, window=16),
        hysteresis([[0, 1]] * NUM_TOPOLOGIES, [2.0]),
        force(fixed_policy(0), [4, 3, 2, 1]),
    ]
    for seed, policy in enumerate(policies):
        for prompt in (PROMPTS[seed % len(PROMPTS)], [1] * (5 + 7 * seed)):
            params = model_params("replay", [PROMPTS[0]], noisy_ranks(seed))
            state = built.start([Request(prompt, 5 + seed, (seed,), seed)])
            state = built.prefill(params, state, policy)
            built.run(params, state, policy, 3 + seed)
    assert built.prefill._cache_size() == 1
    assert built.run._cache_size() == 1


def test_donation_leaves_no_warning_and_consumes_the_state():
    """Warnings are errors in this suite; a donated buffer that cannot be used would warn."""
    built, params = decoder(), model_params("replay", [PROMPTS[0]])
    state = built.prefill(params, built.start([Request(PROMPTS[0], 10)]), fixed_policy(2))
    built.run(params, state, fixed_policy(2), 1)
    assert jax.tree.leaves(state.cache)[0].is_deleted()
