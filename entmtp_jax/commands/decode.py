"""Writes text with a language model, several tokens per step, the draft tree chosen by entropy.

python scripts/decode.py "Why is the sky blue?"
python scripts/decode.py --heads lookup --policy fixed:chain7 --stats "Repeat after me: one two three"
python scripts/decode.py --prompts prompts.jsonl --batch-size 4 --json out.json --check-parity
echo "Tell me a story." | python scripts/decode.py - --max-new-tokens 256
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from entmtp_jax.assets import DEFAULT_MODEL
from entmtp_jax.errors import UserError
from entmtp_jax.prompts import Prompt, read_prompts

CAPACITY_STEP = 512  # capacities are multiples, so that most calls find their program in the cache


def build_parser(prog: str = "decode.py") -> argparse.ArgumentParser:
    """All flags; later commands share their names."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what to write")
    what.add_argument("prompt", nargs="*", metavar="PROMPT", help="prompt text; '-' reads standard input")
    what.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="prompts, one object with id and prompt a line"
    )
    what.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="at most so many tokens (default 128)"
    )
    what.add_argument("--no-chat", action="store_true", help="give the prompt as it is, without the chat template")
    what.add_argument("--system", metavar="TEXT", help="system message (default: the template's own)")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default=DEFAULT_MODEL, help="known name, Hugging Face folder, .gguf file or hub id")
    model.add_argument(
        "--heads",
        help="medusa, hydra, mtp, lookup, hybrid (lookup and the best trained heads) or a head folder "
        "(default: hybrid where heads are shipped for the model, else lookup)",
    )
    model.add_argument("--bank", metavar="FILE", help="bank of topologies: a file or a name below trees/")
    model.add_argument(
        "--policy", default="entropy", help="entropy (default), fixed:<topology> or ar; none changes the text"
    )
    model.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights; sums are float32"
    )
    run = parser.add_argument_group("how to run")
    run.add_argument("--batch-size", type=int, default=1, metavar="B", help="prompts decoded together (default 1)")
    run.add_argument("--capacity", type=int, metavar="N", help="cache slots per row (default: what the prompts need)")
    run.add_argument("--cache-dir", metavar="D", help="folder of the fetched model and the compiled programs")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="print text as it is accepted"
    )
    output.add_argument("--color", action="store_true", help="colour the text by the step that wrote it")
    output.add_argument(
        "--stats", action="store_true", help="print figures of the run after the text, on standard error"
    )
    output.add_argument("--check-parity", action="store_true", help="decode plainly too and compare")
    output.add_argument("--json", type=Path, metavar="OUT", help="write results and figures to a file")
    return parser


def collect_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts of the command line, of standard input and of the file, in this order."""
    prompts = []
    for index, text in enumerate(arguments.prompt):
        prompts.append(Prompt(id=f"prompt-{index}", prompt=_standard_input() if text == "-" else text))
    if arguments.prompts is not None:
        prompts += read_prompts(arguments.prompts)
    if not prompts:
        raise UserError("no prompt; give one as an argument, '-' for standard input, or --prompts FILE.jsonl")
    return prompts


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 (byte {error.start}); convert it first") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "decode.py") -> int:
    """Parses, decodes, prints."""
    arguments = build_parser(prog).parse_args(argv)
    _check(arguments)
    prompts = collect_prompts(arguments)
    # Everything that needs JAX is imported after the cheap checks, so that a wrong flag answers at once.
    from entmtp_jax.commands.decode_run import run

    return run(arguments, prompts)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 0:
        raise UserError(f"--max-new-tokens must be 0 or more; got {arguments.max_new_tokens}")
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1; got {arguments.batch_size}")
    if arguments.capacity is not None and arguments.capacity < 1:
        raise UserError(f"--capacity must be at least 1; got {arguments.capacity}")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json}: the folder does not exist; create it first")
