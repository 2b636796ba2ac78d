import subprocess
import sys

import pytest

from entmtp_jax.cli import run_main
from entmtp_jax.errors import UserError


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
