import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from entmtp_jax.cli import run_main
from entmtp_jax.commands import console
from entmtp_jax.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def raising(error):
    def run():
        raise error

    return run


def test_the_exit_code_is_that_of_the_work(capsys):
    assert run_main(lambda: 0) == 0 and run_main(lambda: 7) == 7
    assert capsys.readouterr().err == ""


def test_what_the_user_can_help_is_one_line(capsys):
    assert run_main(raising(UserError("file x: broken; fetch it again"))) == 2
    assert capsys.readouterr().err == "error: file x: broken; fetch it again\n"


def test_a_missing_optional_package_is_one_line_and_another_is_not_hidden(capsys):
    assert run_main(raising(ModuleNotFoundError("No module named 'optax'", name="optax"))) == 2
    error = capsys.readouterr().err
    assert "optax is not installed" in error and "entmtp_jax[train]" in error and error.count("\n") == 1
    with pytest.raises(ModuleNotFoundError):
        run_main(raising(ModuleNotFoundError("No module named 'nonsense'", name="nonsense")))


def test_ctrl_c_ends_with_130(capsys):
    assert run_main(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_errors_of_the_program_itself_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run_main(raising(ZeroDivisionError()))


def test_a_reader_that_leaves_early_causes_no_traceback():
    program = (
        "import sys\nfrom entmtp_jax.cli import run_main\n"
        "sys.exit(run_main(lambda: [print('x' * 1000, flush=True) for _ in range(1000)] and 0))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


# The console command


def python(code):
    """Runs code in a new process; returns exit code, standard output and standard error."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def entmtp(*arguments):
    code = (
        "import sys\nfrom entmtp_jax.commands.console import run\n"
        f"sys.argv = ['entmtp', *{arguments!r}]\n"
        "try:\n    code = run()\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print('loaded', *(name for name in sys.modules if name.startswith('entmtp_jax.commands.') or name == 'jax'))\n"
        "sys.exit(code)"
    )
    return python(code)


def test_help_lists_every_command_and_loads_none():
    code, out, err = entmtp("--help")
    assert code == 0 and not err and out.splitlines()[0] == "usage: entmtp COMMAND ..."
    listed = re.findall(r"^  (\w+)", out, re.MULTILINE)
    files = {file.stem for file in (ROOT / "entmtp_jax" / "commands").glob("*.py")}
    assert listed == list(console.COMMANDS)
    assert {name for name in files if f"{name}_run" in files} <= set(listed) <= files
    assert out.splitlines()[-1] == "loaded entmtp_jax.commands.console"


@pytest.mark.parametrize("name", console.COMMANDS)
def test_help_of_a_command_loads_that_command_alone(name):
    code, out, err = entmtp(name, "--help")
    assert code == 0 and not err and out.startswith(f"usage: entmtp {name} ")
    assert set(out.splitlines()[-1].split()[1:]) == {"entmtp_jax.commands.console", f"entmtp_jax.commands.{name}"}


@pytest.mark.parametrize(("arguments", "problem"), [(["deocde"], "unknown command 'deocde'"), ([], "no command")])
def test_an_unknown_command_is_one_line(monkeypatch, capsys, arguments, problem):
    monkeypatch.setattr(sys, "argv", ["entmtp", *arguments])
    assert console.run() == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: {problem}; give one of {', '.join(console.COMMANDS)}\n"
    assert not captured.out


def test_the_rest_of_the_line_goes_to_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["entmtp", "decode", "--max-new-tokens", "-1", "hello"])
    assert console.run() == 2
    assert capsys.readouterr().err == "error: --max-new-tokens must be 0 or more; got -1\n"


def test_the_project_installs_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"entmtp": f"{console.__name__}:{console.run.__name__}"}


@pytest.mark.parametrize("name", console.COMMANDS)
def test_every_command_is_a_script_too(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {name}.py ")
