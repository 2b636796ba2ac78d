"""Torch files are read as data: every layout that torch writes, and nothing that would run."""

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_jax.checkpoints.torch_pickle import read_torch_file, read_torch_tensor
from entmtp_jax.errors import UserError


def read_all(path: Path) -> dict[str, np.ndarray]:
    file = read_torch_file(path)
    return {name: read_torch_tensor(file, name) for name in file.tensors}


def check_equal(read: dict[str, np.ndarray], saved: dict[str, torch.Tensor]) -> None:
    assert list(read) == list(saved)
    for name, tensor in saved.items():
        assert read[name].shape == tuple(tensor.shape)
        exact = tensor.detach().double() if tensor.is_floating_point() else tensor
        np.testing.assert_array_equal(read[name].astype(exact.numpy().dtype), exact.numpy())


def test_dtypes_views_and_shared_storage(tmp_path):
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    saved = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "offset": base[1:, ::2, 3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": base.half() / 7,
        "bfloat16": base.bfloat16() / 7,
        "integers": torch.arange(4),
        "parameter": torch.nn.Parameter(base[0]),
    }
    torch.save(saved, tmp_path / "file.bin")
    check_equal(read_all(tmp_path / "file.bin"), saved)


def test_a_state_dict_of_a_module(tmp_path):
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).state_dict()
    torch.save(state, tmp_path / "file.bin")
    check_equal(read_all(tmp_path / "file.bin"), state)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_any_view_is_read_as_torch_sees_it(tmp_path_factory, shape, random):
    path = tmp_path_factory.mktemp("view") / "file.bin"
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    tensor = tensor.permute(random.sample(range(len(shape)), len(shape)))
    for axis, size in enumerate(tensor.shape):
        start = random.randrange(size)
        tensor = tensor.narrow(axis, start, random.randint(1, size - start))
    torch.save({"view": tensor}, path)
    check_equal(read_all(path), {"view": tensor})


class Attack:
    """Pickles to a call of any function with any arguments."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_malicious_pickle_does_not_run(tmp_path):
    trace, path = tmp_path / "trace", tmp_path / "file.bin"
    torch.save({"x": torch.zeros(2), "attack": Attack(os.mkdir, str(trace))}, path)
    with pytest.raises(UserError, match=r"asks for '(posix|nt)\.mkdir' .* not executed"):
        read_torch_file(path)
    assert not trace.exists()


@pytest.mark.parametrize("function", [eval, getattr, torch.load, np.frombuffer, type])
def test_names_that_no_tensor_needs_are_refused(tmp_path, function):
    torch.save({"attack": Attack(function, "1")}, tmp_path / "file.bin")
    with pytest.raises(UserError, match=f"asks for .*{function.__name__}"):
        read_torch_file(tmp_path / "file.bin")


def test_a_dotted_name_does_not_slip_through(tmp_path):
    """With protocol 4 a name may be a path of attributes of an allowed object."""
    stream = b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93."
    write_archive(tmp_path / "file.bin", stream)
    with pytest.raises(UserError, match="asks for 'collections.OrderedDict.fromkeys"):
        read_torch_file(tmp_path / "file.bin")


def test_the_stand_ins_cannot_be_changed(tmp_path):
    """BUILD sets attributes; on the stand-in it must fail and leave nothing behind."""
    stream = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb."
    write_archive(tmp_path / "file.bin", stream)
    with pytest.raises(UserError, match="damaged"):
        read_torch_file(tmp_path / "file.bin")


def write_archive(path: Path, stream: bytes, **files: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream)
        for name, content in files.items():
            archive.writestr(f"archive/{name}", content)


def test_other_contents_are_refused(tmp_path):
    path = tmp_path / "file.bin"
    for content, message in [
        (torch.zeros(2), "does not hold a dict"),
        ({"model": {"x": torch.zeros(2)}}, "entry 'model' is not a tensor"),
        (OrderedDict(step=3), "entry 'step' is not a tensor"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "asks for 'torch.ComplexFloatStorage"),
    ]:
        torch.save(content, path)
        with pytest.raises(UserError, match=message):
            read_torch_file(path)


def test_the_old_format_is_refused_with_advice(tmp_path):
    torch.save({"x": torch.zeros(2)}, tmp_path / "file.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="before torch 1.6; .*save it again as safetensors"):
        read_torch_file(tmp_path / "file.bin")


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_torch_file(tmp_path / "nothing.bin")
    with zipfile.ZipFile(tmp_path / "other.bin", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(UserError, match="not one written by torch.save"):
        read_torch_file(tmp_path / "other.bin")
    write_archive(tmp_path / "order.bin", pickle.dumps({}), byteorder=b"big")
    with pytest.raises(UserError, match="big-endian"):
        read_torch_file(tmp_path / "order.bin")


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_truncated_or_altered_file_never_gives_other_than_a_user_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "file.bin"
    torch.save({"x": torch.arange(6.0).reshape(2, 3), "y": torch.arange(3)}, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read_all(path)
    except UserError as error:
        assert "\n" not in str(error)


def test_a_view_outside_its_storage_is_refused(tmp_path):
    path = tmp_path / "file.bin"
    torch.save({"x": torch.zeros(2, 3)}, path)
    with zipfile.ZipFile(path) as archive:
        stream = archive.read("file/data.pkl")
        storage = archive.read("file/data/0")
    # The strides (3, 1) become (9, 1): torch would read 10 elements out of 6.
    assert stream.count(b"K\x03K\x01") == 1
    write_archive(path, stream.replace(b"K\x03K\x01", b"K\x09K\x01"), **{"data/0": storage})
    with pytest.raises(UserError, match="tensor 'x' reaches outside its storage"):
        read_torch_file(path)


def test_a_storage_shorter_than_the_index_says_is_refused(tmp_path):
    path = tmp_path / "file.bin"
    torch.save({"x": torch.zeros(2, 3)}, path)
    with zipfile.ZipFile(path) as archive:
        stream, storage = archive.read("file/data.pkl"), archive.read("file/data/0")
    write_archive(path, stream, **{"data/0": storage[:-4]})
    with pytest.raises(UserError, match="tensor 'x' is shorter than its shape"):
        read_all(path)
