"""JSON as it is written: whole, reviewable, and read back unchanged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.json_files import read_json, write_json

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


def test_lists_of_plain_values_stand_on_one_line(tmp_path):
    write_json(tmp_path / "data.json", {"ranks": [0, 1, 2], "none": [], "nested": [[1], {"a": ["x", "y"]}]})
    assert (tmp_path / "data.json").read_text() == (
        "{\n"
        '  "ranks": [0, 1, 2],\n'
        '  "none": [],\n'
        '  "nested": [\n'
        "    [1],\n"
        "    {\n"
        '      "a": ["x", "y"]\n'
        "    }\n"
        "  ]\n"
        "}\n"
    )


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_whatever_is_written_is_read_back(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("json") / "data.json"
    write_json(path, data)
    assert read_json(path) == data


def test_a_value_that_json_lacks_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "data.json", {"cost": float("nan")})
    assert list(tmp_path.iterdir()) == []
