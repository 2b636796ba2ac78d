"""What the README prints really runs: its Python block on the default model, its commands as far as their flags."""

import re
import shlex
from pathlib import Path

import pytest

from entmtp_jax.commands import bench, calibrate, compare, decode, distill, head_card, trace, train

README = Path(__file__).parent.parent / "README.md"
PARSERS = {
    f"{command.__name__.rpartition('.')[2]}.py": command.build_parser
    for command in (bench, calibrate, compare, decode, distill, head_card, trace, train)
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def script_calls():
    """(script, arguments) of every call of a script in the bash blocks."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(part) for line in lines for part in line.split("&&")]
    for words in commands:
        places = [i for i, word in enumerate(words) if word.startswith("scripts/")]
        if places:
            yield Path(words[places[0]]).name, words[places[0] + 1 :]


def test_every_printed_command_has_flags_that_exist():
    calls = list(script_calls())
    assert "decode.py" in {script for script, _ in calls}
    for script, arguments in calls:
        assert (README.parent / "scripts" / script).is_file()
        PARSERS[script]().parse_args(arguments)  # exits where a flag is unknown


@pytest.mark.model
def test_the_python_block_runs(capsys):
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    out = capsys.readouterr().out
    counts = re.search(r"(\d+) tokens in (\d+) steps", out)
    assert counts is not None
    tokens, steps = map(int, counts.groups())
    assert 0 < steps < tokens
