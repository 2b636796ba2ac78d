"""What the decoding tests share: one bank, the tiny model, and runs compared with the reference decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from entmtp_jax.backbone.attention import causal_mask
from entmtp_jax.backbone.cache import init_cache
from entmtp_jax.backbone.transformer import Backbone
from entmtp_jax.bank import Bank
from entmtp_jax.decode import DecodeConfig, Decoder, ModelParams, build_decoder
from entmtp_jax.generation import Generation, generate
from entmtp_jax.heads.interface import Head
from entmtp_jax.heads.lookup import build_lookup
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa
from entmtp_jax.scheduler import Policy, fixed
from entmtp_jax.state import Request
from entmtp_jax.testing.heads import replay_head, replay_params
from entmtp_jax.testing.reference import Reference, reference_decode
from entmtp_jax.testing.tiny import TINY_CONFIG, tiny_backbone
from entmtp_jax.topology import Topology, autoregressive, chain, k_ary
from entmtp_jax.types import Params

CAPACITY, CHUNK, SLOTS = 96, 8, 128

# Depth 0, a single node, a chain, full layers, and a bushy tree in a shuffled row order.
BANK = Bank(
    "test",
    (
        autoregressive(),
        chain(1),
        chain(4),
        k_ary((3, 2)),
        Topology("shuffled", parents=(-1, 0, 0, 2, 0, 2, 1, 3, 3), ranks=(0, 2, 0, 1, 1, 0, 0, 1, 0)),
    ),
)
NUM_TOPOLOGIES = len(BANK.topologies)
PROMPTS = [[3, 1, 4, 1, 5, 9], [7], list(range(2, 21)), [8, 8, 8, 8, 8, 8, 8, 8], [11, 12, 13, 11, 12, 13, 11]]


@functools.cache
def tiny():
    """The tiny backbone and its parameters."""
    return tiny_backbone(seed=6)  # no near-ties in the texts of PROMPTS; a test holds it


def logits_of(backbone: Backbone, params: Params, tokens: np.ndarray) -> np.ndarray:
    """Logits of one pass over whole texts with an empty cache."""
    batch, length = tokens.shape
    cache = init_cache(backbone.config, batch=batch, slots=1, dtype=jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    zeros = jnp.zeros(batch, jnp.int32)
    out = backbone.forward(params, jnp.asarray(tokens), positions, causal_mask(length), cache, zeros)
    return np.asarray(backbone.unembed(params, out.normed))


@functools.cache
def reference(prompt: tuple[int, ...], max_new_tokens: int = 40) -> Reference:
    """Plain text of a prompt by the NumPy decoder."""
    _, params = tiny()
    return reference_decode(TINY_CONFIG, params, prompt, max_new_tokens=max_new_tokens)


def continuation(prompt: list[int], length: int) -> list[int]:
    """The first tokens of a prompt's plain text; one long decode serves every length."""
    return reference(tuple(prompt), 80).tokens[:length]


@functools.cache
def medusa_head() -> Head:
    """Random Medusa heads of the tiny model's shape."""
    shape = MedusaConfig(TINY_CONFIG.hidden_size, TINY_CONFIG.vocab_size, num_heads=4, num_layers=2)
    return build_medusa(shape, top_k=4)


@functools.cache
def decoder(kind: str = "replay", batch: int = 1, capacity: int = CAPACITY, fresh: bool = False) -> Decoder:
    """A decoder of the test bank; cached, since compiling is what takes time."""
    backbone, _ = tiny()
    heads = {
        "replay": lambda: replay_head(vocab_size=TINY_CONFIG.vocab_size),
        "lookup": build_lookup,
        "medusa": medusa_head,
    }
    config = DecodeConfig(batch=batch, capacity=capacity, chunk=CHUNK, fresh_signals=fresh)
    return build_decoder(backbone, heads[kind](), BANK, config)


def model_params(kind: str, prompts: list[list[int]], true_rank: np.ndarray | int = 0) -> ModelParams:
    """Parameters for a decoder of that kind; the replaying head gets the prompts' plain texts."""
    _, backbone = tiny()
    if kind == "replay":
        texts = [prompt + continuation(prompt, 80) for prompt in prompts]
        return ModelParams(backbone, replay_params(texts, true_rank, slots=SLOTS))
    if kind == "medusa":
        params = medusa_head().init(jax.random.key(5))
        noise = jax.random.normal(jax.random.key(6), params["blocks"]["kernel"].shape)
        return ModelParams(backbone, {"blocks": params["blocks"] | {"kernel": 0.3 * noise}})
    return ModelParams(backbone, {})


def decode(
    prompts: list[list[int]],
    policy: Policy,
    *,
    kind: str = "replay",
    true_rank: np.ndarray | int = 0,
    max_new_tokens: int = 40,
    eos_ids: tuple[int, ...] = (),
    batch: int = 1,
    capacity: int = CAPACITY,
    fresh: bool = False,
) -> Generation:
    """One batch through the real loop."""
    padded = prompts + [prompts[-1]] * (batch - len(prompts))
    params = model_params(kind, padded, true_rank)
    requests = [Request(prompt, max_new_tokens, eos_ids) for prompt in prompts]
    return generate(decoder(kind, batch, capacity, fresh), params, requests, policy)


def fixed_policy(index: int) -> Policy:
    """Always topology ``index`` of the test bank."""
    return fixed(index, num_topologies=NUM_TOPOLOGIES)


def noisy_ranks(seed: int = 0) -> np.ndarray:
    """Where a noisy oracle puts the true token of each position: ranks -1 (nowhere) to 2."""
    return np.random.default_rng(seed).integers(-1, 3, SLOTS)


def prefilled(kind: str, prompts: list[list[int]], policy: Policy, true_rank: np.ndarray | int = 0, batch: int = 1):
    """A decoder, its parameters and the state right after the prefill."""
    built, params = decoder(kind, batch), model_params(kind, prompts, true_rank)
    state = built.prefill(params, built.start([Request(p, 60) for p in prompts]), policy)
    return built, params, state
