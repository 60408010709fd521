"""Every failure belongs to exactly one boundary. The message is a sentence that a user can act on."""


class RollartError(Exception):
    """Something the user should read; the command line prints it without a traceback."""


class ConfigError(RollartError):
    """The run file cannot be used."""


class DiskFull(RollartError):
    """Nothing was written, and what was to be is kept: there may be room later."""


class ServiceError(RollartError):
    """A service could not be started or reached, or answered with an error."""


class ServiceSilent(ServiceError):
    """A service did not answer a call within its deadline."""


class EngineFailed(RollartError):
    """Generation failed; the request may be tried on another engine."""


class EngineLost(EngineFailed):
    """The engine itself is gone, with all its requests."""


class EnvironmentFailed(RollartError):
    """An environment hung, crashed or broke its protocol. Never a reward of 0."""


class RewardFailed(RollartError):
    """A reward could not be computed. Never a reward of 0."""
