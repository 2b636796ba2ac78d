"""The one exception that scripts turn into a single line and exit code 2."""


class UserError(ValueError):
    """Something the user gave is wrong; the message says what, where and what to do, in one line."""
