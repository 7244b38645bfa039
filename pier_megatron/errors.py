"""What a person is told before anything goes wrong."""


class PierConfigError(ValueError):
    """A setting with which Pier cannot work as the user would expect.

    Its message names the flag, its value, the arithmetic and a remedy, because it is read at 3 a.m. next to a failed job.
    """
