"""Any platform by URL: Cloud Run, Knative, OpenFaaS, Lambda and Function Compute URLs, `rollart reward serve`."""

import asyncio
import os
import time

import aiohttp

from rollart.config import RewardConfig
from rollart.core.errors import ServiceError
from rollart.rewards.transports.base import (
    CallFailed,
    TransportReply,
    decode_response,
    error_text,
    failure_of,
    response_too_long,
    retry_after,
)
from rollart.rewards.wire import IDEMPOTENCY_KEY, RESPONSE_BYTES, sign


class HttpTransport:
    """POSTs to `url`, signed with `secret` or with that in the environment variable `variable`, if one is given."""

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

    async def send(self, body: bytes, key: str, deadline: float) -> TransportReply:
        clock = asyncio.get_running_loop().time
        headers = {"Content-Type": "application/json", IDEMPOTENCY_KEY: key}
        if self._secret:
            headers |= sign(self._secret, body, time.time())
        if self._session is None:  # the number of calls is limited already
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        began = clock()
        try:
            async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
                first_byte_s = clock() - began
                payload = await _read_limited(response)
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        if response.status != 200:
            after = retry_after(response.headers.get("Retry-After"))
            raise failure_of(response.status, f"HTTP {response.status}: {error_text(payload)}", after)
        scored = decode_response(payload)
        return TransportReply(scored, first_byte_s, scored.seconds, scored.cold)


def build(reward: RewardConfig, deadline: float, cluster: str | None) -> HttpTransport:
    return HttpTransport(str(reward.url), reward.secret)


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > RESPONSE_BYTES:
            raise response_too_long()
    return bytes(body)
