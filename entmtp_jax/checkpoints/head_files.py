"""Trained heads on disk: a folder with ``config.json``, ``heads.safetensors`` and ``provenance.json``.

The tensors of every kind are listed in ``head_kinds``. Matrices are written as bfloat16, biases and the scales
of norms as float32. Heads with a draft vocabulary have one more tensor, ``draft_ids``: int32 ``[scored]``, the
token id of every scored column.

The three files are renamed into place one by one; ``config.json`` comes last and holds the sum of the
weights, so a folder that was cut off half-way is noticed and never read as something else.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # also what lets safetensors return bfloat16 arrays
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from entmtp_jax.backbone.attention import Attend, two_part_attention
from entmtp_jax.backbone.precision import Linear
from entmtp_jax.checkpoints.head_kinds import KINDS, HeadShape, expected_params, flat_names, kind_of, shape_keys
from entmtp_jax.config import BackboneConfig
from entmtp_jax.errors import UserError
from entmtp_jax.heads.interface import Head, Shared
from entmtp_jax.json_files import COUNT, OBJECT, TEXT, Key, check_object, read_json, write_json
from entmtp_jax.types import Params
from entmtp_jax.whole_files import replacing

CONFIG_FILE, WEIGHTS_FILE, PROVENANCE_FILE = "config.json", "heads.safetensors", "provenance.json"
SCHEMA = 1
DRAFT_IDS = "draft_ids"
FLOATS = ("F32", "F16", "BF16")

COMMON_KEYS = {
    "schema": Key(COUNT),
    "kind": Key(TEXT),
    "backbone": Key(OBJECT),
    "weights_sha256": Key(TEXT),
    "shape": Key(OBJECT),
    "draft_vocab": Key(OBJECT, required=False),
}


@dataclasses.dataclass(frozen=True)
class HeadInfo:
    """What ``config.json`` says.

    Attributes:
      kind: one of ``head_kinds.KINDS``.
      shape: config of the heads.
      backbone_name: model that they were trained for.
      backbone_fingerprint: of its weights; see ``fingerprint``.
      weights_sha256: sum of ``heads.safetensors``.
      draft_vocab: how the draft vocabulary was chosen, for the reader.
    """

    kind: str
    shape: HeadShape
    backbone_name: str
    backbone_fingerprint: str
    weights_sha256: str
    draft_vocab: Mapping[str, Any]


def save_head(
    folder: Path,
    *,
    shape: HeadShape,
    backbone: BackboneConfig,
    params: Params,
    draft_ids: np.ndarray | None,
    backbone_name: str,
    backbone_fingerprint: str,
    draft_vocab: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> None:
    """Writes trained heads; other files of the folder, such as the card, stay.

    Args:
      folder: created if need be.
      shape: config of the heads, which tells their kind.
      backbone: shape of the model that they were trained for.
      params: as the kind's ``init`` makes them.
      draft_ids: ``[scored]`` ids, or None where the heads score the whole vocabulary.
      backbone_name: model that they were trained for.
      backbone_fingerprint: of its weights.
      draft_vocab: how the draft vocabulary was chosen.
      provenance: command, versions, data, accuracies.

    Raises:
      UserError: the tensors do not fit the config, or the folder cannot be written.
    """
    tensors = {
        name: np.asarray(value).astype(np.float32 if _keeps_float32(name) else ml_dtypes.bfloat16)
        for name, value in flat_names(params).items()
    }
    if draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(draft_ids, np.int32)
    _check_tensors(shape, backbone, tensors, str(folder))
    data = to_safetensors(tensors)
    with replacing(folder / WEIGHTS_FILE) as unfinished:
        unfinished.write_bytes(data)
    write_json(folder / PROVENANCE_FILE, dict(provenance))
    config = {
        "schema": SCHEMA,
        "kind": kind_of(shape),
        "backbone": {"name": backbone_name, "fingerprint": backbone_fingerprint},
        "shape": dataclasses.asdict(shape),
        "draft_vocab": dict(draft_vocab),
        "weights_sha256": hashlib.sha256(data).hexdigest(),
    }
    write_json(folder / CONFIG_FILE, config)


def read_head_info(folder: Path) -> HeadInfo:
    """Reads and checks ``config.json`` of a folder of heads.

    Raises:
      UserError: it is missing, broken, of an unknown kind or of a newer schema.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of heads; give one that holds {CONFIG_FILE} and {WEIGHTS_FILE}")
    file = folder / CONFIG_FILE
    data = check_object(read_json(file), str(file), COMMON_KEYS)
    if data["kind"] not in KINDS:
        raise UserError(f"{file}: unknown kind of heads {data['kind']!r}; known: {', '.join(KINDS)}")
    if data["schema"] != SCHEMA:
        raise UserError(f"{file}: schema {data['schema']}, but this version reads {SCHEMA}; update the package")
    backbone = check_object(data["backbone"], f"{file}, backbone", {"name": Key(TEXT), "fingerprint": Key(TEXT)})
    kind = KINDS[data["kind"]]
    shape = check_object(data["shape"], f"{file}, shape", shape_keys(kind))
    try:
        config = kind.shape(**shape)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return HeadInfo(
        kind=data["kind"],
        shape=config,
        backbone_name=backbone["name"],
        backbone_fingerprint=backbone["fingerprint"],
        weights_sha256=data["weights_sha256"],
        draft_vocab=data.get("draft_vocab", {}),
    )


class StoredHead(NamedTuple):
    """Trained heads as their folder holds them.

    Attributes:
      info: what ``config.json`` says.
      params: as the kind's ``init`` makes them, in float32.
      draft_ids: ``[scored]`` ids, or None where the heads score the whole vocabulary.
    """

    info: HeadInfo
    params: Params
    draft_ids: np.ndarray | None


def read_head(folder: Path, backbone_config: BackboneConfig) -> StoredHead:
    """Reads trained heads to be trained further.

    Args:
      folder: from ``save_head``.
      backbone_config: of the backbone that they are for.

    Raises:
      UserError: as ``load_head`` does.
    """
    info, tensors, draft_ids = _read_folder(folder, backbone_config)
    return StoredHead(info, _as_params(info, backbone_config, tensors, jnp.float32), draft_ids)


def load_head(
    folder: Path,
    backbone_config: BackboneConfig,
    shared: Shared,
    *,
    top_k: int,
    linear: Linear,
    attend: Attend = two_part_attention,
    dtype: DTypeLike | None = None,
) -> tuple[Head, Params]:
    """Loads trained heads for a backbone.

    Args:
      folder: from ``save_head``.
      backbone_config: of the backbone that will verify.
      shared: its matrices; heads without output matrices take their rows from it.
      top_k: candidates ranked per head; fewer if the heads score fewer ids.
      linear: the matrix product.
      attend: the attention function.
      dtype: of the head's matrices, taken-over rows included; None is that of ``shared``. Biases and scales are
        float32.

    Returns:
      The head and its parameters.

    Raises:
      UserError: heads of another backbone shape or of an unknown kind; a tensor that is missing, extra,
        misshapen or not finite; a damaged file.
    """
    info, tensors, draft_ids = _read_folder(folder, backbone_config)
    matrices = jnp.dtype(dtype or shared.output.dtype)
    kind = KINDS[info.kind]
    params = kind.prepare(info.shape, _as_params(info, backbone_config, tensors, matrices), draft_ids, shared)
    if "output" in params:
        params["output"] = params["output"].astype(matrices)
    top_k = min(top_k, info.shape.num_scored)
    return kind.build(info.shape, backbone_config, top_k=top_k, linear=linear, attend=attend), params


def _read_folder(folder: Path, backbone: BackboneConfig) -> tuple[HeadInfo, dict[str, np.ndarray], np.ndarray | None]:
    """What the config says, the checked tensors by name, and the ids of the draft vocabulary if there is one."""
    info = read_head_info(folder)
    _check_backbone(info, backbone, folder)
    tensors = _read_tensors(folder / WEIGHTS_FILE, info, backbone)
    return info, tensors, tensors.pop(DRAFT_IDS, None)


def _as_params(
    info: HeadInfo, backbone: BackboneConfig, tensors: Mapping[str, np.ndarray], matrices: DTypeLike
) -> Params:
    expected = expected_params(info.shape, backbone)
    leaves = [jnp.asarray(tensors[n], jnp.float32 if _keeps_float32(n) else matrices) for n in flat_names(expected)]
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def _keeps_float32(name: str) -> bool:
    return name.endswith(("bias", "scale"))


def _check_backbone(info: HeadInfo, config: BackboneConfig, folder: Path) -> None:
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(info.shape, name), getattr(config, name)
        if theirs != ours:
            raise UserError(
                f"{folder}: these {info.kind} heads were trained for {info.backbone_name} with {name} {theirs}, but "
                f"the model has {ours}; choose heads that were trained for it"
            )


def _read_tensors(file: Path, info: HeadInfo, backbone: BackboneConfig) -> dict[str, np.ndarray]:
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        with safe_open(file, framework="numpy") as opened:
            names = list(opened.keys())
            _check_dtypes({name: opened.get_slice(name).get_dtype() for name in names}, str(file))
            tensors = {name: opened.get_tensor(name) for name in names}
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; is the folder complete?") from None
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or no safetensors file: {error}") from None
    _check_tensors(info.shape, backbone, tensors, f"{file} ({info.kind} heads for {info.backbone_name})")
    if digest != info.weights_sha256:
        raise UserError(f"{file} is not the file that {CONFIG_FILE} describes (sha256 differs); copy both again")
    return tensors


def _check_dtypes(dtypes: Mapping[str, str], where: str) -> None:
    for name, dtype in dtypes.items():
        readable = ("I32",) if name == DRAFT_IDS else FLOATS
        if dtype not in readable:
            raise UserError(f"{where}: tensor {name} has dtype {dtype}; readable: {', '.join(readable)}")


def _check_tensors(shape: HeadShape, backbone: BackboneConfig, tensors: Mapping[str, np.ndarray], where: str) -> None:
    """Every tensor is accounted for, of the right shape, and holds usable values."""
    expected = {name: leaf.shape for name, leaf in flat_names(expected_params(shape, backbone)).items()}
    if shape.draft_vocab_size is not None:
        expected[DRAFT_IDS] = (shape.draft_vocab_size,)
    for name, wanted in expected.items():
        if name not in tensors:
            raise UserError(f"{where}: tensor {name} of shape {wanted} is missing; {kind_of(shape)} heads have it")
        if tensors[name].shape != wanted:
            what = f"tensor {name} has shape {tensors[name].shape}"
            raise UserError(f"{where}: {what}, but the config and the backbone ask for {wanted}")
        _check_values(name, tensors[name], shape, where)
    if extra := sorted(set(tensors) - set(expected)):
        raise UserError(f"{where}: tensor {extra[0]} has no place in {kind_of(shape)} heads of this config")


def _check_values(name: str, tensor: np.ndarray, shape: HeadShape, where: str) -> None:
    if name == DRAFT_IDS:
        if len(np.unique(tensor)) < len(tensor) or tensor.min() < 0 or tensor.max() >= shape.vocab_size:
            raise UserError(f"{where}: tensor {name} must hold different token ids below {shape.vocab_size}")
    elif not np.isfinite(tensor.astype(np.float32)).all():
        raise UserError(f"{where}: tensor {name} holds NaN or infinity; train the heads again")
