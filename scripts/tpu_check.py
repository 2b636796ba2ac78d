"""Compiles the decoding loop for a TPU that need not be there, and prints what the compiler makes of it.

    pip install -e ".[tpu]"
    python scripts/tpu_check.py --topology v5e:2x2
    python scripts/tpu_check.py --model llama-3.1-8b --capacity 1024 --json tpu.json

For each model, given by its shapes alone, the table lists every topology of a bank as one step of its own, and
then the whole loop: one ``while_loop`` around the switch over the bank, with four Medusa heads, bfloat16 weights
and scanned layers, for one device. The loop must hold a conditional over the bank, no transfer to the host and
no copy of the cache; the exit code is 1 if it does not.

The compiler counts a scanned layer once; so flops and bytes are those of one unrolled layer times the number of
layers, plus the rest. Bytes accessed include traffic between a TPU's main and on-chip memory.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Constants are made on the CPU; libtpu only compiles, so it need not ask the machine which chips it has.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from entmtp_jax.bank import Bank, find_bank, load_bank
from entmtp_jax.cli import run_main
from entmtp_jax.config import BackboneConfig, RopeScaling
from entmtp_jax.errors import UserError
from entmtp_jax.json_files import write_json
from entmtp_jax.report.ahead_of_time import LoopReport, StepReport, Target, check_loops, check_step, faults
from entmtp_jax.topology import autoregressive, chain, k_ary

# vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim
MODELS = {
    "smollm2-135m": BackboneConfig(
        *(49152, 576, 1536, 30, 9, 3, 64), rope_theta=100000.0, tie_embeddings=True, scan_layers=True
    ),
    "llama-3.1-8b": BackboneConfig(
        *(128256, 4096, 14336, 32, 32, 8, 128),
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor=8.0),
        max_positions=131072,
        scan_layers=True,
    ),
}
NUM_HEADS = 4
STEP_HEADER = (
    f"{'topology':16} {'rows':>4} {'depth':>5} {'arguments MiB':>13} {'temporaries MiB':>15} {'GFLOP':>9} "
    f"{'MB accessed':>11} {'compile s':>9}"
)


def step_line(step: StepReport) -> str:
    """One line of the table of steps."""
    return (
        f"{step.topology:16} {step.rows:4} {step.depth:5} {step.memory.arguments_mib:13.0f} "
        f"{step.memory.temporaries_mib:15.1f} {step.cost.flops / 1e9:9.2f} {step.cost.bytes_accessed / 1e6:11.1f} "
        f"{step.compile_s:9.1f}"
    )


def loop_lines(loops: dict[str, LoopReport], bank: Bank) -> list[str]:
    """The report of the whole loops."""
    lines = []
    for name, loop in loops.items():
        sizes = ", ".join(
            f"{size.removesuffix('_mib').replace('_', ' ')} {mib:.1f}"
            for size, mib in dataclasses.asdict(loop.memory).items()
        )
        lines.append(f"{name:8} compiled in {loop.compile_s:.1f} s; MiB: {sizes}")
        for title, found in (("host transfers", loop.host_transfers), ("cache copies", loop.cache_copies)):
            lines.append(f"         {title}: {len(found) or 'none'}")
    present = "present" if len(bank.topologies) in loops["run"].branches else "none"
    return [*lines, f"conditional over the bank's {len(bank.topologies)} topologies: {present}"]


def find_device(topology: str) -> SingleDeviceSharding:
    """The first device of a described TPU, as a place for arrays."""
    try:
        return SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5e:2x2", help="TPU to compile for; one of its devices is used")
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all", help="shapes to compile (default: all)")
    parser.add_argument("--bank", help="bank file or name (default: six widths up to 64 rows)")
    parser.add_argument("--batch", type=int, default=1, help="rows decoded together (default: 1)")
    parser.add_argument("--capacity", type=int, default=2048, help="cache slots per row (default: 2048)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args(argv)


def check_model(name: str, target: Target, bank: Bank) -> dict:
    """Compiles and prints everything for one model."""
    shape = f"{target.config.num_layers} scanned layers, bfloat16, batch {target.batch}, capacity {target.capacity}"
    print(f"\n{name}: {shape}\n{STEP_HEADER}")
    steps = []
    for topology in bank.topologies:
        steps.append(check_step(target, topology))
        print(step_line(steps[-1]), flush=True)
    loops = check_loops(target, bank)
    print("\n".join(loop_lines(loops, bank)), flush=True)
    return {
        "steps": [dataclasses.asdict(step) for step in steps],
        "loops": {kind: dataclasses.asdict(loop) for kind, loop in loops.items()},
        "faults": faults(loops, bank),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks; 0 if every loop keeps its promises, else 1."""
    args = parse_arguments(argv)
    bank = load_bank(find_bank(args.bank)) if args.bank else default_bank()
    placement = find_device(args.topology)
    used = versions()
    kind = next(iter(placement.device_set)).device_kind
    print(f"{args.topology}: {kind}, " + ", ".join(f"{name} {release}" for name, release in used.items()))
    models = {}
    for name in MODELS if args.model == "all" else [args.model]:
        models[name] = check_model(name, Target(MODELS[name], NUM_HEADS, args.batch, args.capacity, placement), bank)
    if args.json:
        write_json(args.json, {"topology": args.topology, "versions": used, "bank": bank.name, "models": models})
    found = [f"{name}: {fault}" for name, model in models.items() for fault in model["faults"]]
    print("\n" + ("\n".join(f"FAULT {fault[:160]}" for fault in found) or "all checks passed"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
