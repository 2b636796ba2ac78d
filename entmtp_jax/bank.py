"""Banks: the topologies that one compiled loop can switch between, and their files.

A bank file is JSON (schema 1). Parents and ranks say all about a shape, so they are all that is stored;
what was measured on one device (costs and thresholds) stands beside them as calibrations. The command
line finds banks by path, or by their name below ``trees/``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from entmtp_jax import json_files as kinds
from entmtp_jax.assets import assets_folder
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import Key, check_object, list_of, object_of, read_json, write_json
from entmtp_jax.topology import Topology, autoregressive

SCHEMA = 1
_PUBLISHED = "published"
_PLAIN = autoregressive().name

_BANK_KEYS = {
    "schema": Key(kinds.INTEGER),
    "name": Key(kinds.TEXT),
    "max_nodes": Key(kinds.COUNT, required=False),
    "topologies": Key(list_of(kinds.OBJECT)),
    "calibrations": Key(list_of(kinds.OBJECT), required=False),
    "path_counts": Key(object_of(kinds.COUNT), required=False),
    "expected_accepted": Key(object_of(kinds.NUMBER), required=False),
    "made_by": Key(kinds.OBJECT, required=False),
}
_TOPOLOGY_KEYS = {"name": Key(kinds.TEXT), "parents": Key(list_of(kinds.INTEGER)), "ranks": Key(list_of(kinds.INTEGER))}
_CALIBRATION_KEYS = {
    "device": Key(kinds.TEXT),
    "dtype": Key(kinds.TEXT),
    "batch": Key(kinds.INTEGER),
    "signal": Key(kinds.TEXT),
    "edges_nats": Key(list_of(kinds.NUMBER)),
    "topology_by_bin": Key(list_of(kinds.TEXT)),
    "step_ms": Key(object_of(kinds.NUMBER)),
}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Thresholds and costs of a bank, fitted for one device, dtype and batch size.

    Attributes:
      device: the device's own name, as JAX reports it.
      dtype: dtype of the backbone's weights.
      batch: batch rows per step.
      signal: what the thresholds are compared with; "entropy_ema" is in nats.
      edges_nats: ascending thresholds between neighbouring bins of the signal.
      topology_by_bin: the topology for each bin, by name, lowest signal first; one more than the edges.
      step_ms: (topology, measured milliseconds per step); plain decoding ("ar") may be listed although
        the bank lacks it, because the break-even figures need it.
    """

    device: str
    dtype: str
    batch: int
    signal: str
    edges_nats: tuple[float, ...]
    topology_by_bin: tuple[str, ...]
    step_ms: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        where = f"calibration for {self.device}, {self.dtype}, batch {self.batch}"
        if self.batch < 1:
            raise UserError(f"{where}: batch must be at least 1")
        if any(high <= low for low, high in zip(self.edges_nats, self.edges_nats[1:], strict=False)):
            raise UserError(f"{where}: edges_nats must ascend, got {self.edges_nats}")
        if len(self.topology_by_bin) != len(self.edges_nats) + 1:
            bins = f"{len(self.edges_nats)} edges_nats make {len(self.edges_nats) + 1} bins"
            raise UserError(f"{where}: {bins}, but topology_by_bin has {len(self.topology_by_bin)} entries")
        bad = [name for name, milliseconds in self.step_ms if milliseconds <= 0]
        if bad:
            raise UserError(f"{where}: step_ms must be positive, see {bad}")


@dataclasses.dataclass(frozen=True)
class Bank:
    """An ordered set of topologies with distinct names; the scheduler's choice is an index into it.

    A compiled program depends on ``topologies`` alone: pass that statically, not the bank, and new
    thresholds compile nothing. The last three fields are records: they do not count in comparisons.

    Attributes:
      name: what the bank is called; a published bank is named like its only topology.
      topologies: at least one.
      calibrations: at most one per device, dtype and batch.
      made_by: provenance; any JSON object.
      path_counts: how often each path was met while the bank was fitted.
      expected_accepted: drafts kept per step on the calibration text, by topology.
    """

    name: str
    topologies: tuple[Topology, ...]
    calibrations: tuple[Calibration, ...] = ()
    made_by: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    path_counts: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)
    expected_accepted: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.topologies:
            raise UserError(f"bank {self.name!r} has no topologies; it needs at least one")
        names = [topology.name for topology in self.topologies]
        _refuse_repeats(names, f"bank {self.name!r}: topologies: name")
        _refuse_repeats(
            [(fit.device, fit.dtype, fit.batch) for fit in self.calibrations], f"bank {self.name!r}: calibrations: key"
        )
        for fit in self.calibrations:
            _refuse_unknown(fit.topology_by_bin, names, f"bank {self.name!r}: calibrations: topology_by_bin")
            _refuse_unknown(dict(fit.step_ms), [*names, _PLAIN], f"bank {self.name!r}: calibrations: step_ms")
        _refuse_unknown(self.expected_accepted, names, f"bank {self.name!r}: expected_accepted")

    @property
    def depth(self) -> int:
        """Depth of the deepest topology."""
        return max(topology.depth for topology in self.topologies)

    @property
    def max_rank(self) -> int:
        """Highest rank of any topology; -1 if there is no node at all."""
        return max(topology.max_rank for topology in self.topologies)

    @property
    def max_rows(self) -> int:
        """Rows of the widest topology, the root included."""
        return max(topology.num_rows for topology in self.topologies)

    def index(self, name: str) -> int:
        """Place of a topology in the bank, by name."""
        names = [topology.name for topology in self.topologies]
        _refuse_unknown([name], names, f"bank {self.name!r}")
        return names.index(name)

    def calibration_for(self, device: str, dtype: str, batch: int) -> Calibration | None:
        """The calibration that was fitted for exactly this device, dtype and batch size."""
        key = (device, dtype, batch)
        return next((fit for fit in self.calibrations if (fit.device, fit.dtype, fit.batch) == key), None)

    def restrict(self, max_rows: int) -> Bank:
        """The bank without topologies of more than ``max_rows`` rows.

        Bins whose topology is dropped get the widest that remains (the first of them, if several are).

        Raises:
          UserError: no topology is that narrow.
        """
        kept = tuple(topology for topology in self.topologies if topology.num_rows <= max_rows)
        if not kept:
            narrowest = min(topology.num_rows for topology in self.topologies)
            raise UserError(f"bank {self.name!r} has no topology of at most {max_rows} rows; allow {narrowest} or more")
        names = {topology.name for topology in kept}
        widest = max(kept, key=lambda topology: topology.num_rows).name
        mended = tuple(
            dataclasses.replace(
                fit, topology_by_bin=tuple(name if name in names else widest for name in fit.topology_by_bin)
            )
            for fit in self.calibrations
        )
        return dataclasses.replace(self, calibrations=mended).select(
            [index for index, topology in enumerate(self.topologies) if topology.name in names]
        )

    def select(self, indices: Sequence[int]) -> Bank:
        """The bank of some of its topologies, in this order; calibrations that name others are left out."""
        kept = tuple(self.topologies[index] for index in indices)
        names = {topology.name for topology in kept}
        fits = tuple(
            dataclasses.replace(fit, step_ms=tuple(pair for pair in fit.step_ms if pair[0] in names | {_PLAIN}))
            for fit in self.calibrations
            if names.issuperset(fit.topology_by_bin)
        )
        expected = {name: value for name, value in self.expected_accepted.items() if name in names}
        return dataclasses.replace(self, topologies=kept, calibrations=fits, expected_accepted=expected)


def bank_of(topology: Topology) -> Bank:
    """A bank of one topology, named like it."""
    return Bank(topology.name, (topology,))


def published_banks() -> tuple[str, ...]:
    """Names of the published trees that are shipped."""
    return tuple(sorted(path.stem for path in (assets_folder("trees") / _PUBLISHED).glob("*.json")))


def find_bank(name_or_path: str | Path) -> Path:
    """The file of a bank: a path, a published name, or a name below ``trees/`` (suffix optional).

    Example: ``find_bank("mc_sim_7b_63")`` is ``trees/published/mc_sim_7b_63.json``.

    Raises:
      UserError: there is no such file; the message lists the banks that are shipped.
    """
    path = Path(os.path.expanduser(name_or_path))
    trees = assets_folder("trees")
    for folder in (Path(), trees / _PUBLISHED, trees):
        for candidate in (folder / path, folder / f"{path}.json"):
            if os.path.isfile(candidate):  # unlike Path.is_file, no error for a name that is too long
                return candidate
    shipped = sorted(file.relative_to(trees).with_suffix("").as_posix() for file in trees.rglob("*.json"))
    known = ", ".join(name.removeprefix(f"{_PUBLISHED}/") for name in shipped) or f"none in {trees}"
    raise UserError(f"bank {str(name_or_path)!r} is neither a file nor a shipped bank; shipped: {known}")


def save_bank(bank: Bank, path: str | Path) -> None:
    """Writes a bank as JSON; ``load_bank`` reads an equal one back.

    Raises:
      UserError: the folder cannot be written; an existing file is then left as it is.
    """
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "name": bank.name,
        "max_nodes": bank.max_rows - 1,
        "topologies": [dataclasses.asdict(topology) for topology in bank.topologies],
    }
    fits = [dataclasses.asdict(fit) | {"step_ms": dict(fit.step_ms)} for fit in bank.calibrations]
    optional = {
        "calibrations": fits,
        "path_counts": dict(bank.path_counts),
        "expected_accepted": dict(bank.expected_accepted),
        "made_by": dict(bank.made_by),
    }
    write_json(Path(path), data | {name: value for name, value in optional.items() if value})


def load_bank(path: str | Path) -> Bank:
    """Reads a bank file.

    Raises:
      UserError: missing, not JSON, of another schema, or wrong somewhere; the message says file and key.
    """
    path = Path(path)
    data = read_json(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:
        raise UserError(f"{path}: key 'schema' is {schema}; this version reads {SCHEMA}, update entmtp_jax")
    check_object(data, str(path), _BANK_KEYS)
    try:
        topologies = tuple(_topology(item, i) for i, item in enumerate(data["topologies"]))
        calibrations = tuple(_calibration(item, i) for i, item in enumerate(data.get("calibrations", [])))
        accepted = {name: float(drafts) for name, drafts in data.get("expected_accepted", {}).items()}
        records = (data.get("made_by", {}), data.get("path_counts", {}), accepted)
        bank = Bank(data["name"], topologies, calibrations, *records)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if data.get("max_nodes", bank.max_rows - 1) != bank.max_rows - 1:
        nodes = f"{data['max_nodes']}, the widest topology has {bank.max_rows - 1} nodes"
        raise UserError(f"{path}: key 'max_nodes' is {nodes}; correct it or leave it out")
    return bank


def _topology(item: Any, place: int) -> Topology:
    fields = check_object(item, f"topologies[{place}]", _TOPOLOGY_KEYS)
    try:
        return Topology(fields["name"], tuple(fields["parents"]), tuple(fields["ranks"]))
    except UserError as error:
        raise UserError(f"topologies[{place}]: {error}") from None


def _calibration(item: Any, place: int) -> Calibration:
    fields = check_object(item, f"calibrations[{place}]", _CALIBRATION_KEYS)
    return Calibration(
        device=fields["device"],
        dtype=fields["dtype"],
        batch=fields["batch"],
        signal=fields["signal"],
        edges_nats=tuple(map(float, fields["edges_nats"])),
        topology_by_bin=tuple(fields["topology_by_bin"]),
        step_ms=tuple((name, float(cost)) for name, cost in fields["step_ms"].items()),
    )


def _refuse_repeats(values: Iterable[Hashable], where: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise UserError(f"{where} {value!r} is there twice; keep one")
        seen.add(value)


def _refuse_unknown(names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"{where}: no topology {name!r}; known: {', '.join(known)}")
