"""The one exception that command lines turn into a sentence and exit code 2."""


class UserError(Exception):
    """Something the user can put right. The message is one sentence that says what is wrong and what to do."""
