"""How commands speak and end: notes apart from results, one line instead of a traceback where the user can help it."""

import os
import sys
from collections.abc import Callable

from entmtp_jax.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
EXTRAS = {
    **dict.fromkeys(("tqdm", "optax", "orbax"), "train"),
    **dict.fromkeys(("torch", "transformers"), "test"),
    "matplotlib": "plots",
}


def notify(line: str) -> None:
    """Tells the user something beside the results: a line on standard error."""
    print(line, file=sys.stderr, flush=True)


def run_main(run: Callable[[], int]) -> int:
    """Runs a command's work and turns what the user can help into an exit code and one line on stderr.

    Args:
      run: parses nothing and prints its results; returns the exit code.

    Returns:
      What ``run`` returned; 2 after a ``UserError`` or where an optional package is missing, 130 after Ctrl-C,
      141 when the reader of the output left.
    """
    try:
        return run()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        advice = f"pip install 'entmtp_jax[{EXTRAS[error.name]}]'"
        sys.stderr.write(f"error: {error.name} is not installed, which this command needs: {advice}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit; there is nobody to read it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
