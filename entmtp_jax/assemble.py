"""Puts a decoder together from names: the model, its arithmetic, the head that drafts and the bank.

This is what scripts and notebooks start from; everything it returns can also be built by hand.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from entmtp_jax.assets import assets_folder
from entmtp_jax.backbone.attention import Attend, choose_attend, two_part_attention
from entmtp_jax.backbone.precision import Linear, choose_linear, linear_kernel
from entmtp_jax.backbone.transformer import Backbone, build_backbone, stack_layers
from entmtp_jax.bank import Bank, find_bank, load_bank
from entmtp_jax.checkpoints import load_backbone
from entmtp_jax.checkpoints.fingerprint import fingerprint
from entmtp_jax.checkpoints.head_files import load_head, read_head_info
from entmtp_jax.config import BackboneConfig
from entmtp_jax.device import device_name
from entmtp_jax.errors import UserError
from entmtp_jax.heads.hybrid import Pair, build_hybrid
from entmtp_jax.heads.interface import Head, Shared
from entmtp_jax.heads.lookup import NUM_MATCHES, build_lookup
from entmtp_jax.hub import resolve_model
from entmtp_jax.parts import shared_matrices
from entmtp_jax.scheduler import DEFAULT_WINDOW, Policy, Signal, fixed, ladder
from entmtp_jax.text import Text, load_text
from entmtp_jax.topology import autoregressive, chain
from entmtp_jax.types import Params

DTYPES = ("float32", "bfloat16")
HYBRID_KINDS = ("mtp", "hydra", "medusa")  # which shipped heads a hybrid is made with, the best first
HYBRID_MIN_SUFFIX = 2  # a single token has often occurred before by chance
Notify = Callable[[str], None]  # takes one line for the user


class Model(NamedTuple):
    """A backbone ready to run.

    Attributes:
      name: as the user wrote it.
      dtype: of the weights.
      arithmetic: how matrices are multiplied and attention is computed, in words.
      config: shape.
      backbone: pure functions.
      params: on the device.
      linear: the matrix product, for heads too.
      attend: the attention function, for heads too.
      head_dtype: of the matrices of heads.
      text: tokenizer and chat template.
      fingerprint: says which weights these are.
    """

    name: str
    dtype: str
    arithmetic: str
    config: BackboneConfig
    backbone: Backbone
    params: Params
    linear: Linear
    attend: Attend
    head_dtype: str
    text: Text
    fingerprint: str

    @property
    def shared(self) -> Shared:
        """The matrices that heads may read."""
        return shared_matrices(self.params)


class Draft(NamedTuple):
    """A head and the bank whose topologies it drafts.

    Attributes:
      name: of the head's kind or folder.
      head: pure functions.
      params: on the device.
      bank: always holds plain decoding, so that it can be compared with in the same program.
    """

    name: str
    head: Head
    params: Params
    bank: Bank


def load_model(name: str, *, dtype: str, cache: Path, notify: Notify) -> Model:
    """Loads a backbone with its tokenizer.

    Args:
      name: known name, local folder, .gguf file or hub id.
      dtype: of the weights: ``float32`` or ``bfloat16``; sums are float32 in both.
      cache: folder of fetched models and compiled kernels.
      notify: told about downloads and choices.

    Raises:
      UserError: the model cannot be had or read.
    """
    source = resolve_model(name, cache, notify)
    config, params = load_backbone(source, dtype)
    text = load_text(source)
    if text.eos_ids:
        # The tokenizer knows the turn's end too, where a base model's config only knows the text's.
        config = dataclasses.replace(config, eos_ids=tuple(sorted({*config.eos_ids, *text.eos_ids})))
    linear, matrices = choose_linear(dtype, cache)
    attend = choose_attend(cache)
    attention = "xla" if attend is two_part_attention else "kernel"
    if jax.default_backend() != "cpu":
        config = dataclasses.replace(config, scan_layers=True)
        params = stack_layers(params, config.num_layers)
    return Model(
        name=name,
        dtype=dtype,
        arithmetic=f"matrices {matrices}, attention {attention}",
        config=config,
        backbone=build_backbone(config, linear=linear, attend=attend),
        params=jax.tree.map(jnp.asarray, params),
        linear=linear,
        attend=attend,
        # Drafts need no exact arithmetic; a product that takes bfloat16 weights as they are then reads half the bytes.
        head_dtype="bfloat16" if linear is linear_kernel else dtype,
        text=text,
        fingerprint=fingerprint(source),
    )


def load_draft(model: Model, heads: str | None, bank: str | Bank | None, *, notify: Notify) -> Draft:
    """Loads the head and the bank that go with a model.

    Args:
      model: the backbone.
      heads: ``lookup``, a kind shipped for this model such as ``medusa``, ``hybrid`` (lookup and the best shipped
        kind), or a head folder; None takes ``hybrid``, or ``lookup`` for a model without shipped heads.
      bank: a bank, or its file or name; None takes the shipped bank of this model and head, or a small default.
      notify: warned about heads of other weights.

    Raises:
      UserError: head or bank do not exist, are broken or do not fit.
    """
    heads = default_heads(model.name, notify) if heads is None else heads
    chosen = _find_bank(model.name, heads, bank)
    top_k = 1 if chosen is None else max(chosen.max_rank + 1, 1)
    if heads == "lookup":
        head, params = build_lookup(num_matches=max(top_k, NUM_MATCHES)), {}
    elif heads == "hybrid":
        trained, trained_params = _load_trained(model, _best_shipped(model.name), top_k, notify)
        head, params = build_hybrid(build_lookup(min_suffix=HYBRID_MIN_SUFFIX), trained), Pair({}, trained_params)
    else:
        head, params = _load_trained(model, heads, top_k, notify)
    if chosen is None:
        chosen = Bank("default", tuple(chain(length) for length in sorted({min(n, head.max_depth) for n in (3, 7)})))
    if all(topology.depth for topology in chosen.topologies):
        chosen = dataclasses.replace(chosen, topologies=(autoregressive(), *chosen.topologies))
    return Draft(heads, head, jax.tree.map(jnp.asarray, params), chosen)


def default_heads(model_name: str, notify: Notify) -> str:
    """What drafts where nobody says: the hybrid of lookup and shipped heads, or else lookup, with a note."""
    if _shipped_heads(model_name):
        return "hybrid"
    notify(f"note: no heads are shipped for {model_name}; drafting from its own text (--heads lookup)")
    return "lookup"


def _find_bank(model_name: str, heads: str, bank: str | Bank | None) -> Bank | None:
    if isinstance(bank, Bank):
        return bank
    if bank is not None:
        return load_bank(find_bank(bank))
    shipped = assets_folder("trees") / Path(model_name).name / heads / "general.json"
    return load_bank(shipped) if shipped.is_file() else None


def _load_trained(model: Model, heads: str, top_k: int, notify: Notify) -> tuple[Head, Params]:
    folder = head_folder(model.name, heads)
    if read_head_info(folder).backbone_fingerprint != model.fingerprint:
        notify(f"note: {folder} was trained on other weights than {model.name}; the text is right, acceptance may drop")
    how = {"linear": model.linear, "attend": model.attend, "dtype": model.head_dtype}
    return load_head(folder, model.config, model.shared, top_k=top_k, **how)


def _best_shipped(model_name: str) -> str:
    shipped = _shipped_heads(model_name)
    kinds = [kind for kind in HYBRID_KINDS if kind in shipped]
    if not kinds:
        raise UserError(f"heads 'hybrid' need trained heads, but {model_name} ships none; give 'lookup' instead")
    return kinds[0]


def head_folder(model_name: str, heads: str) -> Path:
    """The folder of a shipped kind of heads or of the user's own."""
    own = Path(heads)
    if (own / "config.json").is_file():
        return own
    shipped = _shipped_heads(model_name)
    if heads in shipped:
        return shipped[heads]
    raise UserError(
        f"heads {heads!r}: no such folder with a config.json, and {model_name} ships {', '.join(shipped) or 'none'}; "
        "give 'lookup', 'hybrid', a shipped kind or a head folder"
    )


def _shipped_heads(model_name: str) -> dict[str, Path]:
    files = (assets_folder("models") / Path(model_name).name / "heads").glob("*/config.json")
    return {file.parent.name: file.parent for file in sorted(files)}


def make_policy(text: str, bank: Bank, *, dtype: str, batch: int, notify: Notify) -> Policy:
    """The policy that a command line names.

    Args:
      text: ``entropy``, ``fixed:<topology>`` or ``ar``.
      bank: whose topologies the policy picks among.
      dtype: of the weights; thresholds are kept per device, dtype and batch.
      batch: rows per step.
      notify: warned when the bank has no thresholds for this device.

    Raises:
      UserError: no such policy or topology.
    """
    count = len(bank.topologies)
    if text == "ar":
        return fixed(bank.index("ar"), num_topologies=count)
    if text.startswith("fixed:"):
        return fixed(bank.index(text.removeprefix("fixed:")), num_topologies=count)
    if text != "entropy":
        raise UserError(f"policy {text!r} is unknown; give entropy, fixed:<topology> or ar")
    calibration = bank.calibration_for(device_name(), dtype, batch)
    if calibration is None and bank.calibrations:
        calibration = bank.calibrations[0]
        notify(
            f"note: bank {bank.name!r} has no thresholds for {device_name()}, {dtype}, batch {batch}; "
            f"using those of {calibration.device}, {calibration.dtype}, batch {calibration.batch}"
        )
    if calibration is None:
        notify(f"note: bank {bank.name!r} has no entropy thresholds; using evenly spaced ones")
        return _even_ladder(bank)
    if calibration.signal != Signal.ENTROPY_EMA.name.lower():
        raise UserError(f"bank {bank.name!r}: signal {calibration.signal!r} is unknown; calibrate the bank again")
    indices = [bank.index(name) for name in calibration.topology_by_bin]
    return ladder(indices, calibration.edges_nats, num_topologies=count, window=DEFAULT_WINDOW)


def _even_ladder(bank: Bank) -> Policy:
    """Widest tree for confident text, plain decoding for the least confident: EntMTP's ladder without calibration."""
    order = sorted(range(len(bank.topologies)), key=lambda i: -bank.topologies[i].num_rows)[:8]
    step_nats = 1.0
    edges = [step_nats * (i + 1) for i in range(len(order) - 1)]
    return ladder(order, edges, num_topologies=len(bank.topologies))
