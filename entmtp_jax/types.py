"""Axis glossary and array aliases: the letters that every signature in the package uses.

==  ==========================================  ==  =======================================
B   batch rows                                  D   hidden size of the backbone
T   query tokens of this call                   H   query heads
S   cache slots                                 G   key/value heads
N   tree rows, the root included (row 0)        C   size of one head
K   MTP heads                                   V   vocabulary
R   candidate ranks kept per head               L   layers
M   topologies in a bank                        Q   number of signals
P   root-to-leaf paths of a topology            W   prefill chunk width
==  ==========================================  ==  =======================================

Vocabulary: the *backbone* verifies; *MTP head* i (0-based) predicts the token at t+2+i; a *topology*
is the static shape of a draft tree; *candidates* are the tokens on its nodes; the *accepted length*
counts drafts kept (the bonus token excluded); the *bonus token* is the backbone's own token after
the accepted path and becomes the next root. Entropies are in nats. ``logits``, ``logprobs`` and
``probs`` are never mixed under one name.

The shapes are ``jaxtyping`` annotations; they are checked in the tests and free in production.
"""

from typing import Any, TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Int

Params: TypeAlias = Any  # a nested dict of arrays, as Flax Linen's ``init`` returns it
PRNGKey: TypeAlias = jax.Array

Tokens: TypeAlias = Int[Array, "B T"]
RowInts: TypeAlias = Int[Array, " B"]
RowFloats: TypeAlias = Float[Array, " B"]
RowBools: TypeAlias = Bool[Array, " B"]

__all__ = ["Array", "Bool", "Float", "Int", "PRNGKey", "Params", "RowBools", "RowFloats", "RowInts", "Tokens"]
