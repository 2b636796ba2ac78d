"""What ``head_card`` does once its flags are read: reads the run's files, writes picture and card."""

import argparse
import math
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from entmtp_jax.checkpoints.head_files import PROVENANCE_FILE, WEIGHTS_FILE, HeadInfo, read_head_info
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import read_json
from entmtp_jax.report.head_card import CardFacts, TensorSize, render_card, title_of
from entmtp_jax.report.training_curve import curve_of, draw_curve
from entmtp_jax.training.json_lines import read_json_lines
from entmtp_jax.training.settings import LOG_FILE, RUN_FILE
from entmtp_jax.whole_files import replacing

CARD_FILE = "card.md"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}

# What every version of train.py has written; what later ones add is optional.
RUN_KEYS = ("batch", "accumulate", "learning_rate", "weight_decay")
PROVENANCE_KEYS = ("command", "data", "result")
DATA_KEYS = ("records", "held_out_records", "examples", "mark")
RESULT_KEYS = ("steps", "held_out")
ACCURACY_KEYS = ("top1", "top5", "top10", "greedy_chain")


def run(args: argparse.Namespace) -> int:
    """Writes the picture and the card, and prints their paths."""
    head = args.run / "head"
    if not (head / PROVENANCE_FILE).is_file():
        raise UserError(f"{args.run}: no finished training run, it lacks head/{PROVENANCE_FILE}; finish it first")
    info, folder = read_head_info(head), args.out or head
    if read_head_info(folder).weights_sha256 != info.weights_sha256:
        raise UserError(f"{folder}: holds other heads than {head}; copy those there, or give the run of these")
    picture = args.curve or default_picture(args.run, args.out)
    facts = read_facts(args.run, info, os.path.relpath(picture, folder), args.note)
    result = facts.provenance["result"]
    curve = curve_of(facts.log, result["held_out"]["top1"], result["steps"])
    draw_curve(curve, picture, title=title_of(info))
    card = render_card(facts)
    with replacing(folder / CARD_FILE) as unfinished:
        unfinished.write_text(card, encoding="utf-8")
    print(folder / CARD_FILE)
    print(picture)
    return 0


def default_picture(run: Path, out: Path | None) -> Path:
    """Where the picture goes: beside the folders of heads if they were copied, else into the run."""
    if out is None:
        return run / "curve.png"
    place = out.absolute()
    return place.parent.parent / "curves" / f"{place.name}.png"


def read_facts(run: Path, info: HeadInfo, picture: str, note: Path | None) -> CardFacts:
    """Everything that the card tells.

    Raises:
      UserError: a file is missing, broken, or lacks what every training run writes.
    """
    file = run / "head" / PROVENANCE_FILE
    provenance = _object(read_json(file), str(file), PROVENANCE_KEYS)
    _object(provenance["data"], f"{file}, data", DATA_KEYS)
    result = _object(provenance["result"], f"{file}, result", RESULT_KEYS)
    _object(result["held_out"], f"{file}, result, held_out", ACCURACY_KEYS)
    try:
        text = note.read_text(encoding="utf-8") if note else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {note} as text ({error}); check the path") from None
    return CardFacts(
        info=info,
        tensors=tensor_sizes(run / "head" / WEIGHTS_FILE),
        provenance=provenance,
        recipe=_object(read_json(run / RUN_FILE), str(run / RUN_FILE), RUN_KEYS),
        log=read_json_lines(run / LOG_FILE),
        picture=Path(picture).as_posix(),
        note=text,
    )


def tensor_sizes(file: Path) -> dict[str, TensorSize]:
    """Sizes of all tensors of a safetensors file, from its header alone.

    Raises:
      UserError: it is missing or broken.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            numbers = {name: math.prod(part.get_shape()) for name, part in slices.items()}
            return {name: TensorSize(n, n * ITEM_BYTES[slices[name].get_dtype()]) for name, n in numbers.items()}
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"cannot read {file}: {error}; is the folder complete?") from None


def _object(data: Any, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    for key in keys:
        if not isinstance(data, dict) or key not in data:
            raise UserError(f"{where}: lacks {key!r}, so there is no card to write; was it written by train.py?")
    return data
