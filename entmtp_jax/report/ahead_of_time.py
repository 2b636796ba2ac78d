"""Compiles decoding from shapes alone, for a device that need not be there, and reads off what it will take."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from entmtp_jax.backbone.precision import linear_bfloat16
from entmtp_jax.backbone.transformer import build_backbone
from entmtp_jax.bank import Bank, bank_of
from entmtp_jax.config import BackboneConfig
from entmtp_jax.decode import DecodeConfig, Decoder, ModelParams, build_decoder
from entmtp_jax.errors import UserError
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa
from entmtp_jax.report.compiled import cache_sized_copies, conditionals, host_transfers
from entmtp_jax.scheduler import fixed
from entmtp_jax.topology import Topology

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory of a program, in MiB; results that overwrite an argument count there only."""

    arguments_mib: float
    temporaries_mib: float
    new_results_mib: float
    code_mib: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes accessed, as the compiler counts them: the body of a loop once."""

    flops: float
    bytes_accessed: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its HLO text, figures, and how long compiling took."""

    text: str
    memory: Memory
    cost: Cost
    compile_s: float


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step with one topology; the cost counts every layer."""

    topology: str
    rows: int
    depth: int
    memory: Memory
    cost: Cost
    compile_s: float


@dataclasses.dataclass(frozen=True)
class LoopReport:
    """A whole loop.

    Attributes:
      memory: of the program.
      compile_s: seconds.
      branches: of each conditional.
      host_transfers: offending instructions.
      cache_copies: offending instructions.
    """

    memory: Memory
    compile_s: float
    branches: list[int]
    host_transfers: list[str]
    cache_copies: list[str]


@dataclasses.dataclass(frozen=True)
class Target:
    """What to compile: bfloat16 decoding of one shape of model with Medusa heads, for one device.

    Attributes:
      config: shape of the backbone.
      num_heads: K.
      batch: B.
      capacity: cache slots per row.
      placement: the device.
    """

    config: BackboneConfig
    num_heads: int
    batch: int
    capacity: int
    placement: SingleDeviceSharding

    def build(self, bank: Bank) -> tuple[Decoder, tuple[Any, ...]]:
        """A decoder, and the shapes of its parameters, state and policy; no weights are made."""
        heads = MedusaConfig(self.config.hidden_size, self.config.vocab_size, num_heads=self.num_heads)
        backbone = build_backbone(self.config, linear=linear_bfloat16)
        head = build_medusa(heads, top_k=max(bank.max_rank + 1, 1), linear=linear_bfloat16)
        options = DecodeConfig(batch=self.batch, capacity=self.capacity, cache_dtype="bfloat16")
        decoder = build_decoder(backbone, head, bank, options)
        params = ModelParams(*(jax.eval_shape(part.init, jax.random.key(0)) for part in (backbone, head)))
        state = jax.eval_shape(lambda: decoder.start([None] * self.batch))
        policy = fixed(0, num_topologies=len(bank.topologies))
        return decoder, jax.tree.map(self.on_device, (_bfloat16(params), state, policy))

    def on_device(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The shape of an array that lies on the target device."""
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.placement)

    def step(self, topology: Topology) -> Program:
        """One step of a bank of one topology."""
        decoder, arguments = self.build(bank_of(topology))
        return compile_program(jax.jit(decoder.step, donate_argnums=1), arguments)


def _bfloat16(params: ModelParams) -> ModelParams:
    """Matrices in bfloat16; norm scales stay float32, as the loaders leave them."""

    def cast(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.float32 if "scale" in jax.tree_util.keystr(path) else jnp.bfloat16
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def compile_program(function: Any, arguments: Sequence[Any]) -> Program:
    """Lowers and compiles a jitted function for the device that its arguments' shapes name.

    Args:
      function: result of ``jax.jit``.
      arguments: arrays or their shapes.

    Raises:
      UserError: the program does not fit the device's memory.
    """
    start = time.perf_counter()
    try:
        compiled = function.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        line = " ".join(str(error).split())[:160]
        raise UserError(f"does not fit the device: {line}; lower --capacity or --batch, or take a larger one") from None
    seconds = time.perf_counter() - start
    sizes, counted = compiled.memory_analysis(), compiled.cost_analysis()
    memory = Memory(
        arguments_mib=sizes.argument_size_in_bytes / MIB,
        temporaries_mib=sizes.temp_size_in_bytes / MIB,
        new_results_mib=(sizes.output_size_in_bytes - sizes.alias_size_in_bytes) / MIB,
        code_mib=sizes.generated_code_size_in_bytes / MIB,
    )
    cost = Cost(flops=counted["flops"], bytes_accessed=counted["bytes accessed"])
    return Program(compiled.as_text(), memory, cost, seconds)


def check_step(target: Target, topology: Topology) -> StepReport:
    """Memory of one step of scanned layers, and its cost with every layer counted.

    The compiler counts a scan's body once, so the cost comes from programs of one and two unrolled layers:
    ``cost(1) + (L - 1) * (cost(2) - cost(1))``. Copies that only the scan makes show as temporaries.
    """
    program = target.step(topology)
    one, two = (
        dataclasses.replace(
            target, config=dataclasses.replace(target.config, num_layers=layers, scan_layers=False)
        ).step(topology)
        for layers in (1, 2)
    )
    more = target.config.num_layers - 1
    cost = Cost(
        flops=one.cost.flops + more * (two.cost.flops - one.cost.flops),
        bytes_accessed=one.cost.bytes_accessed + more * (two.cost.bytes_accessed - one.cost.bytes_accessed),
    )
    return StepReport(topology.name, topology.num_rows, topology.depth, program.memory, cost, program.compile_s)


def check_loops(target: Target, bank: Bank) -> dict[str, LoopReport]:
    """Memory of the ``run`` and the ``prefill`` of a bank, and what these loops hold."""
    decoder, arguments = target.build(bank)
    max_steps = target.on_device(jax.ShapeDtypeStruct((), jnp.int32))
    programs = {
        "run": compile_program(decoder.run, [*arguments, max_steps]),
        "prefill": compile_program(decoder.prefill, arguments),
    }
    return {
        name: LoopReport(
            memory=program.memory,
            compile_s=program.compile_s,
            branches=conditionals(program.text),
            host_transfers=host_transfers(program.text),
            cache_copies=cache_sized_copies(program.text, arguments[1].cache),
        )
        for name, program in programs.items()
    }


def faults(loops: dict[str, LoopReport], bank: Bank) -> list[str]:
    """What the loops of ``check_loops`` do not keep of their promises, one line each; none if they keep all."""
    found = []
    if len(bank.topologies) > 1 and len(bank.topologies) not in loops["run"].branches:
        found.append(f"run has no conditional over the {len(bank.topologies)} topologies")
    for name, loop in loops.items():
        found.extend(f"{name} exchanges data with the host: {line}" for line in loop.host_transfers)
        found.extend(f"{name} copies the cache: {line}" for line in loop.cache_copies)
    return found
