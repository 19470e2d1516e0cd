"""The one exception that a user should ever read: what is wrong and what to do about it, in one sentence."""


class InputError(ValueError):
    """Bad input of any kind: configuration, checkpoint, corpus, prompt. The command line prints it and exits with 2."""
