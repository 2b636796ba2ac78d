"""Heads that see what they draft, unrolled along the true text as they run along a drafted path.

At level 0 a head reads the backbone's hidden states, at every place of a record. From some places, the
*bases*, it goes on: at level i it reads its own level i - 1 and the true token there, and attends to the
level-0 entries up to the base and to its own entries since, which is what it sees when it drafts (EAGLE-3
calls this training-time test). Levels need not start everywhere, so a few bases per record keep them cheap.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp

from entmtp_jax.backbone.attention import EXACT, MASKED, Attend, two_part_attention
from entmtp_jax.backbone.cache import KVCache
from entmtp_jax.backbone.precision import Linear, linear_highest
from entmtp_jax.config import BackboneConfig
from entmtp_jax.heads.block import one_layer
from entmtp_jax.heads.hydra_layers import HydraConfig, HydraHeads, HydraPrefix
from entmtp_jax.heads.mtp_layers import MTPConfig, MTPModule
from entmtp_jax.training.sequences import SequenceBatch, look_ahead
from entmtp_jax.types import Array, Bool, Float, Int, Params

# ``(params, batch, embedding[V, D]) -> K states [R, M, D]``, one per level, whose products with the output rows
# are the logits of the tokens 2, 3, ... after each base.
States: TypeAlias = Callable[[Params, SequenceBatch, Array], list[Array]]


def record_mask(batch: SequenceBatch) -> Bool[Array, "R L L"]:
    """Each place sees itself and what stands before it in its own record."""
    place = jnp.arange(batch.segment.shape[1])
    same = batch.segment[:, :, None] == batch.segment[:, None, :]
    return same & (place[:, None] >= place)


def no_cache(block: BackboneConfig, rows: int) -> tuple[KVCache, Array]:
    """An empty cache and its lengths: everything that is seen is in the batch."""
    shape = (rows, block.num_kv_heads, 1, block.head_dim)
    return KVCache(jnp.zeros(shape), jnp.zeros(shape)), jnp.zeros(rows, jnp.int32)


def at_bases(values: Float[Array, "R L D"], batch: SequenceBatch) -> Float[Array, "R M D"]:
    """Values at the bases."""
    return jnp.take_along_axis(values, jnp.maximum(batch.base, 0)[:, :, None], axis=1)


class View(NamedTuple):
    """What the bases see.

    Attributes:
      text: ``[R, M, L]`` places of the text up to and with the base.
      before: the same without the base itself.
      position: ``[R, M]`` of the bases.
      alone: ``[1, M, M]``: drafts of different bases do not see each other.
    """

    text: Bool[Array, "R M L"]
    before: Bool[Array, "R M L"]
    position: Int[Array, "R M"]
    alone: Bool[Array, "1 M M"]


def view_from_bases(batch: SequenceBatch, mask: Bool[Array, "R L L"]) -> View:
    """The bases' rows of the text's mask, and their positions."""
    base = jnp.maximum(batch.base, 0)
    text = jnp.take_along_axis(mask, base[:, :, None], axis=1)
    before = text & (jnp.arange(mask.shape[2]) != base[:, :, None])
    position = jnp.take_along_axis(batch.position, base, axis=1)
    return View(text, before, position, jnp.eye(base.shape[1], dtype=bool)[None])


class Entries(NamedTuple):
    """Keys and values of one level.

    Attributes:
      keys: ``[R, G, places, C]``.
      values: like ``keys``.
    """

    keys: Array
    values: Array


def attend_from_bases(text: Entries, visible: Bool[Array, "R M L"], above: list[Entries]) -> Attend:
    """Attention of the entries of one level: to the text up to their base, to their own earlier levels, to themselves.

    Args:
      text: ``[R, G, L, C]`` level-0 entries.
      visible: which of them a base sees.
      above: entries ``[R, G, M, C]`` of levels 1, 2, ... so far.
    """

    def attend(query: Array, keys: Array, values: Array, *unused: Array) -> Array:
        del unused
        rows, bases, heads, size = query.shape
        groups = keys.shape[1]
        grouped = (query * size**-0.5).reshape(rows, bases, groups, heads // groups, size)
        own_keys = jnp.stack([*(entry.keys for entry in above), keys])
        own_values = jnp.stack([*(entry.values for entry in above), values])
        to_text = jnp.einsum("rmgqc,rglc->rgqml", grouped, text.keys, precision=EXACT)
        to_text = jnp.where(visible[:, None, None], to_text, MASKED)
        to_own = jnp.einsum("rmgqc,srgmc->rgqms", grouped, own_keys, precision=EXACT)
        weights = jax.nn.softmax(jnp.concatenate([to_text, to_own], axis=-1), axis=-1)
        of_text, of_own = jnp.split(weights, [text.keys.shape[2]], axis=-1)
        mixed = jnp.einsum("rgqml,rglc->rmgqc", of_text, text.values, precision=EXACT)
        mixed += jnp.einsum("rgqms,srgmc->rmgqc", of_own, own_values, precision=EXACT)
        return mixed.reshape(rows, bases, heads, size)

    return attend


def mtp_states(config: MTPConfig, block: BackboneConfig, levels: int, *, linear: Linear = linear_highest) -> States:
    """States of an MTP head.

    Args:
      config: shape of the head.
      block: shape of its block.
      levels: how deep to unroll; may be less than the head drafts.
      linear: the matrix product.
    """
    last = config.num_modules - 1

    def states(params: Params, batch: SequenceBatch, embedding: Float[Array, "V D"]) -> list[Array]:
        modules = params["modules"]
        cache, empty = no_cache(block, batch.token.shape[0])
        mask = record_mask(batch)
        shifted = jnp.concatenate([batch.token[:, 1:], batch.token[:, :1]], axis=1)
        arguments = (batch.hidden.astype(jnp.float32), embedding[shifted], batch.position, mask, cache, empty)
        text = MTPModule(config, block, linear, two_part_attention)
        # With several modules each keeps entries of the text, from the same inputs as the first one. Only the
        # entries are used, so the compiler drops the rest of the block everywhere but at the bases.
        texts = [_run(text, one, *arguments)[1] for one in modules]
        view = view_from_bases(batch, mask)
        hidden, above, found = at_bases(batch.hidden.astype(jnp.float32), batch), [], []
        for level in range(levels):
            index = min(level, last)
            token = look_ahead(batch, batch.token, batch.base, level + 1, 0)
            attend = attend_from_bases(texts[index], view.text if level else view.before, above)
            module = MTPModule(config, block, linear, attend)
            place = view.position + level
            output, new = _run(module, modules[index], hidden, embedding[token], place, view.alone, cache, empty)
            if level:
                above.append(new)
            found.append(_normed(module, modules[index], output))
            hidden = found[-1] if config.normed_hidden else output
        return found

    return states


def hydra_states(config: HydraConfig, block: BackboneConfig, levels: int, *, linear: Linear = linear_highest) -> States:
    """States of Hydra heads.

    Args:
      config: shape of the heads.
      block: shape of the prefix layer.
      levels: how many heads to run.
      linear: the matrix product.
    """
    heads = HydraHeads(config, linear)

    def states(params: Params, batch: SequenceBatch, embedding: Float[Array, "V D"]) -> list[Array]:
        start = at_bases(batch.hidden.astype(jnp.float32), batch)
        if config.prefix:
            cache, empty = no_cache(block, batch.token.shape[0])
            mask = record_mask(batch)
            arguments = (batch.hidden.astype(jnp.float32), batch.position, mask, cache, empty)
            _, text = _run(HydraPrefix(block, linear, two_part_attention), params["prefix"], *arguments)
            view = view_from_bases(batch, mask)
            module = HydraPrefix(block, linear, attend_from_bases(text, view.before, []))
            start, _ = _run(module, params["prefix"], start, view.position, view.alone, cache, empty)
        path = [embedding[look_ahead(batch, batch.token, batch.base, level + 1, 0)] for level in range(levels)]
        variables = {"params": params["heads"]}
        return [cast(Array, heads.apply(variables, start, jnp.stack(path[: i + 1], axis=-2))) for i in range(levels)]

    return states


def _normed(module: MTPModule, params: Params, output: Float[Array, "R M D"]) -> Float[Array, "R M D"]:
    return cast(Array, module.apply({"params": params}, output, method="normed"))


def _run(module: MTPModule | HydraPrefix, params: Params, *arguments: Array | KVCache) -> tuple[Array, Entries]:
    output, new = cast(tuple[Array, KVCache], module.apply({"params": params}, *arguments))
    return output, Entries(*one_layer(new))
