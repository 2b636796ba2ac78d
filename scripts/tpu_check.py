"""Compiles the decoding loop for a TPU that need not be there, and prints what the compiler makes of it.

    pip install -e ".[tpu]"
    python scripts/tpu_check.py --topology v5e:2x2
    python scripts/tpu_check.py --model llama-3.1-8b --batch 8 --capacity 4096 --json tpu.json

For each model, given by its shapes alone, the table lists every topology of a bank as one step of its own, and
then the whole run: one ``while_loop`` around the switch over the bank, with four Medusa heads, for one device.
The run must hold a conditional over the bank, no transfer to the host and no copy of the cache; the exit code is
1 if it does not.

The compiler counts the body of a scan over the layers once. So the cost of a step is measured on programs of one
and two unrolled layers, and the difference is multiplied by the number of layers. Bytes accessed are the
compiler's count and include traffic between a TPU's main and on-chip memory.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Constants are made on the CPU; libtpu only compiles, so it need not ask the machine which chips it has.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from entmtp_jax.backbone.precision import linear_bfloat16
from entmtp_jax.backbone.transformer import build_backbone
from entmtp_jax.bank import Bank, bank_of, find_bank, load_bank
from entmtp_jax.cli import run_main
from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.decode import DecodeConfig, Decoder, ModelParams, build_decoder
from entmtp_jax.errors import UserError
from entmtp_jax.heads.medusa import MedusaConfig, build_medusa
from entmtp_jax.json_files import write_json
from entmtp_jax.report.compiled import cache_sized_copies, conditionals, host_transfers
from entmtp_jax.scheduler import fixed
from entmtp_jax.topology import Topology, autoregressive, chain, k_ary

MODELS = {
    "smollm2-135m": BackboneConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        tie_embeddings=True,
    ),
    "llama-3.1-8b": BackboneConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor=8.0),
        max_positions=131072,
    ),
}
NUM_HEADS = 4
MIB = 1 << 20


class Program(NamedTuple):
    """A compiled program and how long that took."""

    compiled: jax.stages.Compiled
    seconds: float

    def memory_mib(self) -> dict[str, float]:
        """Bytes that the program needs on the device, in MiB; the state's part of the output is its own input."""
        stats = self.compiled.memory_analysis()
        return {
            "arguments": stats.argument_size_in_bytes / MIB,
            "temporaries": stats.temp_size_in_bytes / MIB,
            "new_output": (stats.output_size_in_bytes - stats.alias_size_in_bytes) / MIB,
            "code": stats.generated_code_size_in_bytes / MIB,
        }

    def cost(self) -> dict[str, float]:
        """Floating-point operations and bytes accessed, as the compiler counts them."""
        counted = self.compiled.cost_analysis()
        return {"flops": counted["flops"], "bytes_accessed": counted["bytes accessed"]}


@dataclasses.dataclass(frozen=True)
class Target:
    """What everything is compiled for."""

    config: BackboneConfig
    batch: int
    capacity: int
    device: jax.Device

    def build(self, bank: Bank) -> tuple[Decoder, tuple[Any, ...]]:
        """A decoder in bfloat16 with Medusa heads, and the shapes of its parameters, state and policy."""
        heads = MedusaConfig(self.config.hidden_size, self.config.vocab_size, num_heads=NUM_HEADS)
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
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(self.device))

    def step(self, topology: Topology) -> Program:
        """One step of a bank of one."""
        decoder, arguments = self.build(bank_of(topology))
        return compile_program(jax.jit(decoder.step, donate_argnums=1), arguments)


def _bfloat16(params: ModelParams) -> ModelParams:
    """Matrices in bfloat16; norm scales stay float32, as the loaders leave them."""

    def cast(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.float32 if "scale" in jax.tree_util.keystr(path) else jnp.bfloat16
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def compile_program(function: Any, arguments: Sequence[Any]) -> Program:
    """Lowers and compiles a jitted function for the device that its arguments' shapes name."""
    start = time.perf_counter()
    try:
        compiled = function.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        line = " ".join(str(error).split())[:160]
        raise UserError(f"does not fit the device: {line}; lower --capacity or --batch, or take a larger TPU") from None
    return Program(compiled, time.perf_counter() - start)


def check_step(target: Target, topology: Topology) -> dict[str, Any]:
    """Memory and cost of one step with one topology, the layers counted as often as they run."""
    scanned = target.step(topology)
    one, two = (
        dataclasses.replace(
            target, config=dataclasses.replace(target.config, num_layers=layers, scan_layers=False)
        ).step(topology)
        for layers in (1, 2)
    )
    layers = target.config.num_layers
    cost = {name: first + (layers - 1) * (two.cost()[name] - first) for name, first in one.cost().items()}
    return {
        "topology": topology.name,
        "rows": topology.num_rows,
        "depth": topology.depth,
        "memory_mib": scanned.memory_mib(),
        "cost": cost,
        "compile_s": scanned.seconds,
    }


def check_run(target: Target, bank: Bank) -> dict[str, Any]:
    """Memory of the whole run and of the prefill, and what the loop must and must not hold."""
    decoder, arguments = target.build(bank)
    cache = arguments[1].cache
    max_steps = target.on_device(jax.ShapeDtypeStruct((), jnp.int32))
    run = compile_program(decoder.run, [*arguments, max_steps])
    prefill = compile_program(decoder.prefill, arguments)
    programs = {"run": run, "prefill": prefill}
    texts = {name: program.compiled.as_text() for name, program in programs.items()}
    branches = conditionals(texts["run"])
    return {
        "bank": bank.name,
        "topologies": len(bank.topologies),
        "cache_mib": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) / MIB,
        "compile_s": {name: program.seconds for name, program in programs.items()},
        "memory_mib": {name: program.memory_mib() for name, program in programs.items()},
        "conditional_branches": branches,
        "conditional_over_the_bank": len(bank.topologies) == 1 or len(bank.topologies) in branches,
        "host_transfers": {name: host_transfers(text) for name, text in texts.items()},
        "cache_copies": {name: cache_sized_copies(text, cache) for name, text in texts.items()},
    }


def is_sound(run: dict[str, Any]) -> bool:
    """Whether a run keeps to what the loop promises."""
    faults = [*run["host_transfers"].values(), *run["cache_copies"].values()]
    return run["conditional_over_the_bank"] and not any(faults)


def step_line(step: dict[str, Any]) -> str:
    """One line of the table of steps."""
    memory, cost = step["memory_mib"], step["cost"]
    return (
        f"{step['topology']:16} {step['rows']:4} {step['depth']:5} {memory['arguments']:10.0f} "
        f"{memory['temporaries']:9.1f} {cost['flops'] / 1e9:9.2f} {cost['bytes_accessed'] / 1e6:11.1f} "
        f"{step['compile_s']:9.1f}"
    )


STEP_HEADER = (
    f"{'topology':16} {'rows':>4} {'depth':>5} {'args MiB':>10} {'temps MiB':>9} {'GFLOP':>9} {'MB accessed':>11} "
    f"{'compile s':>9}"
)


def run_lines(run: dict[str, Any]) -> list[str]:
    """The report of a whole run."""
    lines = [f"whole run of bank {run['bank']!r}: {run['topologies']} topologies, cache {run['cache_mib']:.1f} MiB"]
    for name, memory in run["memory_mib"].items():
        sizes = ", ".join(f"{kind.replace('_', ' ')} {size:.1f}" for kind, size in memory.items())
        lines.append(f"  {name:8} compiled in {run['compile_s'][name]:.1f} s; MiB: {sizes}")
    found = "present" if run["conditional_over_the_bank"] else "MISSING"
    lines.append(f"  conditional over the bank: {found} (branches: {run['conditional_branches']})")
    for title, key in (("host transfers", "host_transfers"), ("cache copies", "cache_copies")):
        for name, faults in run[key].items():
            lines.append(f"  {title} in {name}: {len(faults) or 'none'}")
            lines.extend(f"    {line[:140]}" for line in faults)
    return lines


def find_device(topology: str) -> jax.Device:
    """The first device of a described TPU."""
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        line = " ".join(str(error).split())[:160]
        advice = "install the extra 'tpu' and give a topology such as v5e:2x2 or v4:2x2x1"
        raise UserError(f"cannot compile for TPU topology {topology!r}: {line}; {advice}") from None


def default_bank() -> Bank:
    """Six widths from plain decoding to the published 63-node tree."""
    full = (k_ary((1, 2, 2)), k_ary((1, 2, 2, 2)), k_ary((1, 5, 5)))  # 8, 16 and 32 rows
    published = load_bank(find_bank("mc_sim_7b_63")).topologies
    return Bank("widths", (autoregressive(), chain(3), *full, *published))


def versions() -> dict[str, str]:
    """Releases that the figures depend on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "flax")}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--topology", default="v5e:2x2", help="TPU to compile for; one of its devices is used")
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all", help="shapes to compile (default: all)")
    parser.add_argument("--bank", help="bank file or name (default: six widths up to 64 rows)")
    parser.add_argument("--batch", type=int, default=1, help="rows decoded together (default: 1)")
    parser.add_argument("--capacity", type=int, default=2048, help="cache slots per row (default: 2048)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args(argv)


def check_model(name: str, bank: Bank, args: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """Compiles and prints everything for one model."""
    config = dataclasses.replace(MODELS[name], scan_layers=True)
    target = Target(config, args.batch, args.capacity, device)
    print(f"\n{name}: {config.num_layers} scanned layers, bfloat16, batch {args.batch}, capacity {args.capacity}")
    print("one step per topology; flops and bytes: one layer's times the number of layers, plus the rest")
    print(STEP_HEADER)
    steps = []
    for topology in bank.topologies:
        steps.append(check_step(target, topology))
        print(step_line(steps[-1]), flush=True)
    run = check_run(target, bank)
    print("\n".join(run_lines(run)), flush=True)
    return {"steps": steps, "run": run}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks; 0 if every run is sound, 1 if one is not."""
    args = parse_arguments(argv)
    bank = load_bank(find_bank(args.bank)) if args.bank else default_bank()
    device = find_device(args.topology)
    used = versions()
    print(f"{args.topology}: {device.device_kind}, " + ", ".join(f"{name} {release}" for name, release in used.items()))
    names = list(MODELS) if args.model == "all" else [args.model]
    models = {name: check_model(name, bank, args, device) for name in names}
    sound = all(is_sound(model["run"]) for model in models.values())
    if args.json:
        write_json(args.json, {"topology": args.topology, "versions": used, "models": models, "sound": sound})
    print("\nall checks passed" if sound else "\na check FAILED, see above")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
