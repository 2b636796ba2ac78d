"""Banks: values, files that round-trip, and every way in which a file can be wrong."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax import bank as bank_module
from entmtp_jax.bank import Bank, Calibration, bank_of, find_bank, load_bank, published_banks, save_bank
from entmtp_jax.errors import UserError
from entmtp_jax.topology import Topology, autoregressive, chain, k_ary

CALIBRATION = Calibration(
    device="cpu",
    dtype="float32",
    batch=1,
    signal="entropy_ema",
    edges_nats=(0.5, 1.5),
    topology_by_bin=("chain7", "kary3x2", "ar"),
    step_ms=(("ar", 35.0), ("chain7", 70.5), ("kary3x2", 80.25)),
)
BANK = Bank(
    name="small",
    topologies=(autoregressive(), chain(7), k_ary((3, 2)), Topology("permuted", (-1, 0, 0, 2), (0, 1, 0, 0))),
    calibrations=(CALIBRATION, dataclasses.replace(CALIBRATION, batch=8, edges_nats=(), topology_by_bin=("ar",))),
    made_by={"command": "python scripts/calibrate.py", "seed": 3},
    path_counts={"0": 12, "0.1": 3},
    expected_accepted={"chain7": 1.5},
)


# --- values -------------------------------------------------------------------------------------------


def test_properties_are_those_of_the_largest():
    assert (BANK.depth, BANK.max_rank, BANK.max_rows) == (7, 2, 10)
    lone = bank_of(autoregressive())
    assert (lone.name, lone.depth, lone.max_rank, lone.max_rows) == ("ar", 0, -1, 1)


def test_index_by_name():
    assert [BANK.index(topology.name) for topology in BANK.topologies] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="no topology 'chain8'; known: ar, chain7, kary3x2, permuted"):
        BANK.index("chain8")


def test_calibration_for_needs_the_exact_key():
    assert BANK.calibration_for("cpu", "float32", 1) == CALIBRATION
    assert BANK.calibration_for("cpu", "float32", 8) == BANK.calibrations[1]
    for key in (("gpu", "float32", 1), ("cpu", "bfloat16", 1), ("cpu", "float32", 2)):
        assert BANK.calibration_for(*key) is None


def test_equal_banks_hash_equally_whoever_made_them():
    other = dataclasses.replace(BANK, made_by={}, path_counts={}, expected_accepted={})
    assert other == BANK and hash(other) == hash(BANK)
    assert dataclasses.replace(BANK, calibrations=()) != BANK


def test_restrict_drops_wide_topologies_and_mends_the_tables():
    narrow = BANK.restrict(8)
    assert [topology.name for topology in narrow.topologies] == ["ar", "chain7", "permuted"]
    assert narrow.calibrations[0].topology_by_bin == ("chain7", "chain7", "ar")
    assert narrow.calibrations[0].step_ms == (("ar", 35.0), ("chain7", 70.5))
    assert narrow.calibrations[0].edges_nats == CALIBRATION.edges_nats
    plain = BANK.restrict(1)
    assert plain.calibrations[0].topology_by_bin == ("ar", "ar", "ar")
    assert plain.expected_accepted == {}
    assert BANK.restrict(10) == BANK


def test_selecting_keeps_the_calibrations_that_still_make_sense():
    some = BANK.select([0, 1])
    assert [topology.name for topology in some.topologies] == ["ar", "chain7"]
    assert [fit.batch for fit in some.calibrations] == [8]  # the other one names kary3x2
    assert some.calibrations[0].step_ms == (("ar", 35.0), ("chain7", 70.5))
    assert some.expected_accepted == {"chain7": 1.5}
    assert BANK.select([0, 1, 2, 3]) == BANK


def test_restrict_below_the_narrowest_is_refused():
    with pytest.raises(UserError, match="no topology of at most 7 rows; allow 8 or more"):
        bank_of(chain(7)).restrict(7)


def test_plain_decoding_may_have_a_cost_in_a_bank_without_it():
    fit = dataclasses.replace(CALIBRATION, edges_nats=(), topology_by_bin=("chain7",), step_ms=(("ar", 35.0),))
    assert Bank("deep", (chain(7),), (fit,)).restrict(8).calibrations == (fit,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topologies": ()}, "bank 'small' has no topologies"),
        ({"topologies": (*BANK.topologies, chain(7))}, "topologies: name 'chain7' is there twice"),
        ({"calibrations": (CALIBRATION, CALIBRATION)}, "calibrations: key ('cpu', 'float32', 1) is there twice"),
        ({"topologies": (chain(7), autoregressive())}, "topology_by_bin: no topology 'kary3x2'; known: chain7, ar"),
        ({"expected_accepted": {"chain9": 1.0}}, "expected_accepted: no topology 'chain9'"),
    ],
)
def test_wrong_banks_are_refused(changes, message):
    with pytest.raises(UserError) as refusal:
        dataclasses.replace(BANK, **changes)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"edges_nats": (1.5, 0.5)}, "edges_nats must ascend, got (1.5, 0.5)"),
        ({"edges_nats": (0.5, 0.5)}, "edges_nats must ascend"),
        ({"edges_nats": (0.5,)}, "1 edges_nats make 2 bins, but topology_by_bin has 3 entries"),
        ({"step_ms": (("ar", 0.0),)}, "step_ms must be positive, see ['ar']"),
    ],
)
def test_wrong_calibrations_are_refused(changes, message):
    with pytest.raises(UserError) as refusal:
        dataclasses.replace(CALIBRATION, **changes)
    assert message in str(refusal.value)


# --- files --------------------------------------------------------------------------------------------


def everything(bank):
    """All fields, those that comparisons skip included."""
    return {field.name: getattr(bank, field.name) for field in dataclasses.fields(bank)}


def test_file_round_trips(tmp_path):
    path = tmp_path / "new" / "small.json"
    save_bank(BANK, path)
    assert everything(load_bank(path)) == everything(BANK)
    assert [entry.name for entry in path.parent.iterdir()] == ["small.json"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4, unique_by=tuple))
def test_any_bank_round_trips(tmp_path_factory, layers):
    path = tmp_path_factory.mktemp("banks") / "bank.json"
    bank = Bank("any", tuple(map(k_ary, layers)))
    save_bank(bank, path)
    assert everything(load_bank(str(path))) == everything(bank)


def test_parents_and_ranks_are_all_that_is_stored_of_a_shape(tmp_path):
    save_bank(bank_of(chain(1)), tmp_path / "chain1.json")
    assert json.loads((tmp_path / "chain1.json").read_text()) == {
        "schema": 1,
        "name": "chain1",
        "max_nodes": 1,
        "topologies": [{"name": "chain1", "parents": [-1, 0], "ranks": [0, 0]}],
    }


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "bank.json"
    save_bank(bank_of(chain(1)), path)

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        save_bank(BANK, path)
    assert load_bank(path) == bank_of(chain(1))
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_bank(BANK, tmp_path / "file" / "bank.json")


def edited(**changes):
    """The JSON text of a small valid file with some top-level keys changed; None removes a key."""
    data = {
        "schema": 1,
        "name": "b",
        "topologies": [{"name": "t", "parents": [-1, 0], "ranks": [0, 0]}],
        "calibrations": [calibration()],
    } | changes
    return json.dumps({name: value for name, value in data.items() if value is not None})


def calibration(**changes):
    fields = {"device": "cpu", "dtype": "float32", "batch": 1, "signal": "entropy_ema", "edges_nats": [1.0]}
    fields |= {"topology_by_bin": ["t", "t"], "step_ms": {"t": 50}} | changes
    return {name: value for name, value in fields.items() if value is not None}


def topology(**changes):
    return {"name": "t", "parents": [-1, 0], "ranks": [0, 0]} | changes


def test_the_edited_file_is_valid_before_its_edits(tmp_path):
    (tmp_path / "bank.json").write_text(edited())
    assert load_bank(tmp_path / "bank.json").calibrations[0].step_ms == (("t", 50),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        (edited()[:-20], "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "expected an object, got []"),
        ('{"schema": 1, "schema": 1}', "key 'schema' is repeated"),
        (edited().replace("50", "NaN"), "NaN is not a JSON number"),
        (edited().replace("50", "1e999"), "key 'step_ms' must be an object, each value a finite number"),
        (edited(schema=None), "key 'schema' is missing"),
        (edited(schema=2), "key 'schema' is 2; this version reads 1"),
        (edited(schema=True), "key 'schema' must be an integer, got True"),
        (edited(schema="1"), "key 'schema' must be an integer, got '1'"),
        (edited(extra=1), "unknown key 'extra'; known: schema, name"),
        (edited(name=""), "key 'name' must be a non-empty string"),
        (edited(name=None), "key 'name' is missing; add a non-empty string"),
        (edited(max_nodes=2), "key 'max_nodes' is 2, the widest topology has 1 nodes"),
        (edited(made_by="me"), "key 'made_by' must be an object, got 'me'"),
        (edited(path_counts={"0": -1}), "key 'path_counts' must be an object, each value a non-negative integer"),
        (edited(path_counts={"0": 1.5}), "key 'path_counts' must be an object, each value a non-negative integer"),
        (edited(expected_accepted={"u": 1}), "expected_accepted: no topology 'u'; known: t"),
        (edited(topologies=[]), "bank 'b' has no topologies"),
        (edited(topologies={}), "key 'topologies' must be a list, each item an object, got {}"),
        (edited(topologies=[topology(), topology()]), "topologies: name 't' is there twice"),
        (edited(topologies=[topology(depth=1)]), "topologies[0]: unknown key 'depth'; known: name, parents, ranks"),
        (
            edited(topologies=[topology(ranks=[0, True])]),
            "topologies[0]: key 'ranks' must be a list, each item an integer",
        ),
        (edited(topologies=[topology(ranks=[0])]), "topologies[0]: topology 't': 2 parents and 1 ranks"),
        (edited(topologies=[topology(ranks=[0, 1])]), "topologies[0]: topology 't': path (1,) (row 1) skips a rank"),
        (edited(calibrations=[calibration(batch=None)]), "calibrations[0]: key 'batch' is missing"),
        (edited(calibrations=[calibration(watts=3)]), "calibrations[0]: unknown key 'watts'"),
        (
            edited(calibrations=[calibration(edges_nats=["x"])]),
            "key 'edges_nats' must be a list, each item a finite number",
        ),
        (edited(calibrations=[calibration(edges_nats=[])]), "0 edges_nats make 1 bins"),
        (edited(calibrations=[calibration(topology_by_bin=["t", "u"])]), "topology_by_bin: no topology 'u'; known: t"),
        (edited(calibrations=[calibration(step_ms={"u": 1})]), "step_ms: no topology 'u'; known: t, ar"),
    ],
)
def test_wrong_files_are_refused_with_file_and_key(tmp_path, text, message):
    path = tmp_path / "bank.json"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        load_bank(path)
    assert str(path) in str(refusal.value) and message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    for name, message in (
        ("absent.json", "No such file"),
        (".", "Is a directory"),
        ("latin.json", "is not UTF-8 text"),
    ):
        with pytest.raises(UserError, match=message):
            load_bank(tmp_path / name)


# --- finding ------------------------------------------------------------------------------------------


@pytest.fixture
def trees(tmp_path, monkeypatch):
    folder = tmp_path / "trees"
    for name in ("published/pub", "model/medusa/general"):
        save_bank(bank_of(chain(1)), folder / f"{name}.json")
    monkeypatch.setattr(bank_module, "assets_folder", lambda kind: tmp_path / kind)
    return folder


def test_find_bank_by_path_then_by_name(trees, tmp_path, monkeypatch):
    assert published_banks() == ("pub",)
    assert find_bank("pub") == trees / "published" / "pub.json"
    assert find_bank("model/medusa/general") == find_bank("model/medusa/general.json")
    assert find_bank(trees / "published" / "pub.json") == trees / "published" / "pub.json"
    monkeypatch.chdir(tmp_path)
    Path("pub.json").write_text("{}")
    assert find_bank("pub") == Path("pub.json")


@pytest.mark.parametrize("name", ["absent", "", "model", "a\0b", "x" * 5000, "~nobody/bank"])
def test_find_bank_lists_what_is_shipped(trees, name):
    with pytest.raises(UserError, match=r"neither a file nor a shipped bank; shipped: model/medusa/general, pub$"):
        find_bank(name)
