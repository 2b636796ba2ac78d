"""What a compiled program does, read off its HLO text: transfers to the host, conditionals, copies of the cache.

The text is ``jax.stages.Compiled.as_text()``, of any backend. A program's *instructions* are those outside
of fusions: only their results are buffers in memory.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from entmtp_jax.backbone.cache import KVCache

HOST_OPCODES = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
# How each backend spells a Python callback: xla_ffi_python_cpu_callback, xla_ffi_python_gpu_callback and older ones.
CALLBACK_TARGET = re.compile(r'custom_call_target="[^"]*callback[^"]*"')
HLO_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

HANDS_ON = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "optimization-barrier"),
    *("while", "conditional", "call"),
    *("async-start", "async-update", "async-done", "copy-done"),
}
UPDATES = {"dynamic-update-slice", "scatter"}  # XLA writes these in place; where it cannot, it puts a copy before them
# A result of these holds computed values, such as attention scores, even if it has as many as the cache.
COMPUTES = {"dot", "convolution", "exponential", "reduce", "reduce-window", "rng-bit-generator"}

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|called_computations|to_apply)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class ArrayType(NamedTuple):
    """Type of one array in HLO: ``bf16[2,3]{1,0:T(8,128)S(1)}``.

    Attributes:
      dtype: HLO's name of it.
      size: number of elements.
      on_chip: it lies in a TPU's fast on-chip memory (memory space 1).
    """

    dtype: str
    size: int
    on_chip: bool


class Instruction(NamedTuple):
    """One instruction of a compiled program.

    Attributes:
      name: unique in its computation.
      opcode: HLO's name of the operation.
      results: its arrays, in order; several for a tuple.
      operands: names of other instructions of the computation.
      called: computation of a fusion or call, else empty.
      line: the text.
    """

    name: str
    opcode: str
    results: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    called: str
    line: str


Computations = dict[str, dict[str, Instruction]]  # by computation, then by instruction


def host_transfers(text: str) -> list[str]:
    """Instructions that exchange data with the host while the program runs: callbacks, infeed, outfeed, send, receive.

    Args:
      text: compiled HLO.

    Returns:
      Their lines; none in a program that runs on the device alone.
    """
    return [
        instruction.line
        for instruction in _instructions(_parse(text))
        if instruction.opcode in HOST_OPCODES or CALLBACK_TARGET.search(instruction.line)
    ]


def conditionals(text: str) -> list[int]:
    """How many branches each conditional has; a switch that became a select is none.

    Args:
      text: compiled HLO.
    """
    found = [instruction for instruction in _instructions(_parse(text)) if instruction.opcode == "conditional"]
    branches = [_BRANCHES.search(instruction.line) for instruction in found]
    # A conditional on a boolean names a true and a false computation instead of a list.
    return [match[1].count(",") + 1 if match else 2 for match in branches]


def cache_sized_copies(text: str, cache: KVCache) -> list[str]:
    """Instructions that put a whole cache array, or one layer of a stacked one, into a new buffer.

    In-place updates are none, and neither are prefetches to on-chip memory, which only read the cache, as
    every step must.

    Example: a program that switches between a branch that returns the cache as it is and one that returns it
    updated holds ``%copy.3 = f32[1,2,64,8]{3,2,1,0} copy(%get-tuple-element.1)``.

    Args:
      text: compiled HLO.
      cache: the cache that the program was compiled for; arrays or their shapes.

    Returns:
      Their lines.
    """
    leaf = jax.tree.leaves(cache)[0]
    size = math.prod(leaf.shape)
    sizes = {size, size // leaf.shape[0]} if len(leaf.shape) == 5 else {size}
    dtype = HLO_DTYPES[np.dtype(leaf.dtype).name]
    computations = _parse(text)
    fused = _fusions(computations)
    found = []
    for name, body in computations.items():
        if name in fused:
            continue
        for instruction in body.values():
            read = [array for operand in instruction.operands if operand in body for array in body[operand].results]
            reads_cache = any(array.dtype == dtype and array.size in sizes for array in read)
            writes = any(array.size in sizes and not array.on_chip for array in _new_buffers(instruction))
            opcodes = {instruction.opcode, *_fused_opcodes(computations, instruction.called)}
            if reads_cache and writes and not opcodes & (COMPUTES | UPDATES):
                found.append(instruction.line)
    return found


def _new_buffers(instruction: Instruction) -> tuple[ArrayType, ...]:
    """The results that are not just an operand handed on."""
    if instruction.opcode in HANDS_ON:
        return ()
    if instruction.opcode == "copy-start":  # (destination, source, context)
        return instruction.results[:1]
    if instruction.opcode.endswith("-start"):  # (operands, results, context)
        return instruction.results[len(instruction.operands) :]
    return instruction.results


def _parse(text: str) -> Computations:
    computations: Computations = {}
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            body = computations.setdefault(start[2], {})
        elif found := _INSTRUCTION.match(line):
            _, name, types, opcode, rest = found.groups()
            operands, _, attributes = rest.partition(")")
            called = _CALLED.search(attributes)
            body[name] = Instruction(
                name=name,
                opcode=opcode,
                results=tuple(_array_type(*match) for match in _ARRAY.findall(types)),
                operands=tuple(re.findall(r"%?([A-Za-z_][\w.\-]*)", operands)),
                called=called[1] if called else "",
                line=line.strip(),
            )
    return computations


def _array_type(dtype: str, dimensions: str, layout: str) -> ArrayType:
    size = math.prod(int(extent) for extent in dimensions.split(",") if extent)
    return ArrayType(dtype=dtype, size=size, on_chip="S(1)" in layout)


def _instructions(computations: Computations) -> Iterator[Instruction]:
    for body in computations.values():
        yield from body.values()


def _fusions(computations: Computations) -> set[str]:
    """Computations that are the inside of a fusion or of a reduction, whose results are no buffers."""
    inside = (found for found in _instructions(computations) if found.opcode not in ("call", "async-start"))
    return {found.called for found in inside if found.called}


def _fused_opcodes(computations: Computations, called: str) -> set[str]:
    """Opcodes inside a fusion, those of fusions inside it included."""
    opcodes = set()
    for instruction in computations.get(called, {}).values():
        opcodes |= {instruction.opcode, *_fused_opcodes(computations, instruction.called)}
    return opcodes
