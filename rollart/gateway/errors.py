"""Errors that are sent to clients; each API has its own JSON for them."""

from rollart.core.errors import RollartError


class ApiError(RollartError):
    """`param` is the field that is wrong, `code` is for programs, `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def busy(message: str, seconds: int = 1) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after=seconds)
