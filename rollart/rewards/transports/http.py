"""Any serverless platform by URL: Cloud Run, Knative, OpenFaaS, Lambda and Function Compute URLs, our own `serve`."""

import asyncio
import os
import time
from email.utils import parsedate_to_datetime

import aiohttp

from rollart.core.errors import ServiceError
from rollart.rewards.transports.base import Busy, NoAnswer, Refused, Reply, decoded, shown, too_long
from rollart.rewards.wire import ANSWER_BYTES, KEY, sign

BUSY = (429, 503)
TRY_AGAIN = (408, 425)


class HttpTransport:
    """POSTs to `url`; signs with `secret`, or with the one in the environment variable `variable`, if there is one."""

    def __init__(self, url: str, variable: str | None = None, *, secret: str = "") -> None:
        self._url = url
        self._variable = variable
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        if self._variable is not None:
            self._secret = os.environ.get(self._variable, "")
            if not self._secret:
                raise ServiceError(
                    f"the environment variable {self._variable} is empty; it must hold the secret that signs the calls "
                    f"of the reward at {self._url}"
                )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, body: bytes, key: str, deadline: float) -> Reply:
        clock = asyncio.get_running_loop().time
        headers = {"Content-Type": "application/json", KEY: key}
        if self._secret:
            headers |= sign(self._secret, body, time.time())
        if self._session is None:  # as many connections as there are calls: their number is limited already
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        began = clock()
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                first_byte_s = clock() - began
                answer = await _limited(response)
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        if response.status != 200:
            raise _failure(response, answer)
        told = decoded(answer)
        return Reply(told, first_byte_s, told.seconds, told.cold)


async def _limited(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise too_long()
    return bytes(body)


def _failure(response: aiohttp.ClientResponse, body: bytes) -> NoAnswer:
    reason = f"HTTP {response.status}: {shown(body)}"
    if response.status in BUSY:
        return Busy(reason, retry_after(response.headers.get("Retry-After")))
    return NoAnswer(reason) if response.status >= 500 or response.status in TRY_AGAIN else Refused(reason)


def retry_after(value: str | None) -> float | None:
    """Seconds, however the header says it."""
    if value is None:
        return None
    try:
        return max(0.0, float(value) if value.strip().isdecimal() else _until(value))
    except ValueError:
        return None


def _until(date: str) -> float:
    return parsedate_to_datetime(date).timestamp() - time.time()
