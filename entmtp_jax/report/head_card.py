"""The card of trained heads, written from the files of their run, so that no figure in it is typed by hand."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from entmtp_jax.checkpoints.head_files import DRAFT_IDS, HeadInfo
from entmtp_jax.checkpoints.head_kinds import HeadShape
from entmtp_jax.heads.hydra_layers import HydraConfig
from entmtp_jax.heads.mtp_layers import MTPConfig

BFLOAT16_BYTES = 2
NOT_RECORDED = "not recorded"
LICENCE = "Apache-2.0"

NAMES = {"medusa": "Medusa", "hydra": "Hydra", "hydra++": "Hydra++", "mtp": "MTP"}
ABOUT = {
    "medusa": "Parallel heads: each guesses its own place from the backbone's final hidden state alone.",
    "hydra": "Sequential heads: each reads the backbone's final hidden state and the tokens drafted before its own.",
    "hydra++": (
        "Sequential heads: each reads what a prefix layer makes of the whole text, and the tokens drafted before its "
        "own."
    ),
    "mtp": (
        "A transformer block of the backbone's family with its own keys and values, applied again and again along the "
        "drafted path: it reads the last token's embedding and the hidden state before it."
    ),
}


class TensorSize(NamedTuple):
    """Size of one stored tensor.

    Attributes:
      numbers: how many it holds.
      bytes: that they take in the file.
    """

    numbers: int
    bytes: int


class CardFacts(NamedTuple):
    """What the files of a run say.

    Attributes:
      info: ``head/config.json``.
      tensors: sizes by name in ``head/heads.safetensors``.
      provenance: ``head/provenance.json``.
      recipe: ``run.json``.
      log: lines of ``log.jsonl``.
      picture: path of the training curve, relative to the card.
      note: Markdown to add, or nothing.
    """

    info: HeadInfo
    tensors: Mapping[str, TensorSize]
    provenance: Mapping[str, Any]
    recipe: Mapping[str, Any]
    log: Sequence[Mapping[str, Any]]
    picture: str
    note: str


def render_card(facts: CardFacts) -> str:
    """The card as Markdown; what the run's files do not say is called not recorded."""
    kind, info = full_kind(facts.info), facts.info
    held_out = facts.provenance["result"]["held_out"]
    outside = f"; a token outside the draft vocabulary counts as wrong ({_missed(facts)})"
    held_records = _count(facts.provenance["data"].get("held_out_records"))
    also = " These records also chose the draft vocabulary's size, unless the command gives it."
    parts = [
        f"# {title_of(info)}",
        f"{ABOUT[kind]} They only draft; the backbone verifies, so the text is the backbone's own.",
        _table(("", ""), _summary(facts)),
        f"Accuracy along the text of {held_records} held-out records, whose prompts were not trained on"
        f"{outside if info.shape.draft_vocab_size else ''}:",
        accuracy_table(held_out),
        f"A greedy chain of all {depth_of(info.shape)} keeps {held_out['greedy_chain']:.3f} drafts per step on them."
        f"{also if info.shape.draft_vocab_size else ''}",
        f"![Training loss and held-out accuracy by update]({facts.picture})",
        "The last accuracies in the picture are those of the table; the earlier ones are of a part of the records.",
        "## Recipe",
        _table(("setting", "value"), [(f"`{name}`", text) for name, text in flat_settings(facts.recipe)]),
        f"Made by `{facts.provenance['command']}`; commit, versions and date: `provenance.json`.",
        "## Limits",
        f"For this backbone only. On other weights of its shape, with another fingerprint than "
        f"`{info.backbone_fingerprint}`, decoding warns and acceptance may drop, while the text stays right; models of "
        "another hidden size or vocabulary are refused. Text unlike the training data is drafted less well.",
    ]
    if facts.note:
        parts += ["## Notes", facts.note.strip()]
    return "\n\n".join(parts) + "\n"


def title_of(info: HeadInfo) -> str:
    """What the heads are, for whom."""
    return f"{NAMES[full_kind(info)]} heads for {info.backbone_name}"


def full_kind(info: HeadInfo) -> str:
    """Kind of the heads as ``train.py --heads`` names it."""
    prefix = isinstance(info.shape, HydraConfig) and info.shape.prefix
    return "hydra++" if prefix else info.kind


def depth_of(shape: HeadShape) -> int:
    """Tokens that the heads guess ahead."""
    return shape.max_depth if isinstance(shape, MTPConfig) else shape.num_heads


def level_bytes(shape: HeadShape, tensors: Mapping[str, TensorSize]) -> list[int]:
    """Bytes that drafting one more level reads, level by level: its weights as stored, and its output rows.

    Output rows taken from the backbone count as bfloat16, like those that heads own. What runs once per step,
    the prefix layer of Hydra++, is not in it.

    Example: two Medusa heads of 1,000 bytes each over 10 ids of a backbone of width 8: 500 + 160 each if the file
    holds 1,000 bytes for both.

    Args:
      shape: of the heads.
      tensors: sizes by name.
    """
    depth = depth_of(shape)
    rows = 0 if getattr(shape, "own_output", False) else shape.num_scored * shape.hidden_size * BFLOAT16_BYTES
    if isinstance(shape, MTPConfig):
        owners = [f"modules.{min(level, shape.num_modules - 1)}." for level in range(depth)]
    elif isinstance(shape, HydraConfig):
        owners = [f"heads.head_{level}." for level in range(depth)]
    else:
        return [_bytes_of(tensors, "") // depth + rows] * depth
    return [_bytes_of(tensors, owner) + rows for owner in owners]


def _bytes_of(tensors: Mapping[str, TensorSize], owner: str) -> int:
    return sum(size.bytes for name, size in tensors.items() if name.startswith(owner) and name != DRAFT_IDS)


def accuracy_table(held_out: Mapping[str, Any]) -> str:
    """Shares of the true tokens among each depth's first 1, 5 and 10 candidates."""
    rows = zip(held_out["top1"], held_out["top5"], held_out["top10"], strict=True)
    cells = [(str(i), f"t+{i + 2}", *map(_percent, shares)) for i, shares in enumerate(rows)]
    return _table(("depth", "predicts", "top-1", "top-5", "top-10"), cells)


def flat_settings(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings of ``run.json`` by dotted name, without the shape and the subject, which stand elsewhere, or unset ones.

    Example: ``{"loss": {"weights": [1.0, 0.8]}, "batch": 8}`` gives ``loss.weights`` 1, 0.8 and ``batch`` 8.
    """
    found: list[tuple[str, str]] = []
    for name, value in recipe.items():
        if name in ("shape", "subject") or value is None:
            continue
        if isinstance(value, Mapping):
            found += [(f"{name}.{inner}", text) for inner, text in flat_settings(value)]
        else:
            found.append((name, ", ".join(map(_plain, value)) if isinstance(value, list) else _plain(value)))
    return found


def _summary(facts: CardFacts) -> list[tuple[str, str]]:
    info, levels = facts.info, level_bytes(facts.info.shape, facts.tensors)
    weights = {name: size for name, size in facts.tensors.items() if name != DRAFT_IDS}
    parameters = sum(size.numbers for size in weights.values())
    megabytes = _megabytes(sum(size.bytes for size in facts.tensors.values()))
    reads = _megabytes(levels[0])
    if len(set(levels)) > 1:
        reads = f"{_megabytes(min(levels))} to {_megabytes(max(levels))}"
    if prefix := _bytes_of(facts.tensors, "prefix."):
        reads += f", and {_megabytes(prefix)} of prefix layer once per step"
    return [
        ("Shape", f"{_shape_words(info.shape)}; {parameters / 1e6:.1f} M parameters, {megabytes} as stored"),
        ("Read per drafted level", f"{reads}, output rows included, as bfloat16"),
        ("Output", _output_words(info)),
        ("Backbone", f"{info.backbone_name}, fingerprint `{info.backbone_fingerprint}`"),
        ("Data", _data_words(facts.provenance["data"])),
        ("Training", _training_words(facts)),
        ("Throughput", _throughput_words(facts)),
        ("Licence", LICENCE),
    ]


def _shape_words(shape: HeadShape) -> str:
    width = f"{shape.hidden_size} wide"
    if isinstance(shape, MTPConfig):
        modules = f"{shape.num_modules} modules" if shape.num_modules > 1 else "1 module"
        return f"{modules}, {width}, MLP of {shape.intermediate_size:,}; drafts up to {shape.max_depth} tokens"
    if isinstance(shape, HydraConfig):
        prefix = f" and a prefix layer with an MLP of {shape.intermediate_size:,}" if shape.prefix else ""
        return f"{shape.num_heads} heads of {shape.num_layers} layers, {width}{prefix}"
    return f"{shape.num_heads} heads of {shape.num_layers} residual blocks, {width}"


def _output_words(info: HeadInfo) -> str:
    whose = "matrices of their own" if getattr(info.shape, "own_output", False) else "the backbone's own output rows"
    size = info.shape.draft_vocab_size
    return f"{whose}, of {f'a draft vocabulary of {size:,} ids' if size else 'the whole vocabulary'}"


def _data_words(data: Mapping[str, Any]) -> str:
    share = f" of {data['all_records']:,}" if "all_records" in data else ""
    used = data["records"] + data["held_out_records"]
    sources = ", ".join(f"`{name}` {_percent(count / sum(data['sources'].values()))}" for name, count in _sources(data))
    origin = f"; records by source: {sources}" if sources else ""
    return (
        f"{used:,}{share} of the backbone's own answers, {_positions(data):,} positions with their prompts; "
        f"{data['records']:,} records taught, {data['held_out_records']:,} examined; loss on the answers only{origin}"
    )


def _sources(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list(data.get("sources", {}).items())


def _positions(data: Mapping[str, Any]) -> int:
    return data["positions"] if "positions" in data else int(data["mark"].rsplit("-", 1)[1])


def _training_words(facts: CardFacts) -> str:
    recipe, examples = facts.recipe, facts.provenance["data"]["examples"]
    steps = facts.provenance["result"]["steps"]
    length = recipe.get("row_length")
    things = f"rows of {length:,} places" if length else "positions"
    per_update = recipe["batch"] * recipe["accumulate"]
    start = recipe.get("start")
    begun = f"begun from trained heads (weights {start['weights_sha256'][:12]}), " if start else ""
    return (
        f"frozen backbone, {begun}{steps:,} updates of {per_update:,} {things} out of {examples:,}, "
        f"{steps * per_update / examples:.1f} passes over the data; AdamW, peak rate {recipe['learning_rate']:g} after "
        f"warm-up, cosine, weight decay {recipe['weight_decay']:g}"
    )


def _throughput_words(facts: CardFacts) -> str:
    told = facts.provenance.get("throughput", {})
    backbone, training, share = (told.get(name) for name in ("backbone_s", "training_s", "backbone_share"))
    parts = [f"time of the backbone {NOT_RECORDED}"]
    if backbone is not None:
        pace = told["positions"] / backbone
        parts = [f"backbone {told['positions']:,} positions in {backbone / 60:.1f} minutes, {pace:,.0f} per second"]
    if training is not None:
        places = f"{told['trained_positions']:,} places in {training / 60:.1f} minutes"
        parts.append(f"training {places}, {told['trained_positions'] / training:,.0f} per second")
    else:
        last = next((line["steps_per_s"] for line in reversed(facts.log) if "steps_per_s" in line), None)
        pace = NOT_RECORDED if last is None else f"{last:.2f} updates per second"
        parts.append(f"time of the training {NOT_RECORDED}, its pace {pace}")
    if share is not None:
        parts.append(f"{_percent(share)} of both in the backbone")
    return "; ".join(parts)


def _missed(facts: CardFacts) -> str:
    share = facts.provenance["data"].get("scored_share")
    if share is not None:
        return f"{_percent(1 - share)} of them"
    coverage = sorted((int(size), part) for size, part in _coverage(facts.info).items())
    size = facts.info.shape.num_scored
    smaller = [part for known, part in coverage if known <= size]
    return f"at most {_percent(1 - smaller[-1])} of them" if smaller else f"share {NOT_RECORDED}"


def _coverage(info: HeadInfo) -> Mapping[str, float]:
    return info.draft_vocab.get("held_out_coverage_by_size", {})


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", "---", *["--:"] * (len(head) - 2)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _count(value: int | None) -> str:
    return NOT_RECORDED if value is None else f"{value:,}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
