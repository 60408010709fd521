"""Alibaba Function Compute through its SDK, which finds the credentials."""

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

from alibabacloud_credentials.client import Client as Credentials
from alibabacloud_credentials.exceptions import CredentialException
from alibabacloud_fc20230330 import models
from alibabacloud_fc20230330.client import Client
from alibabacloud_tea_openapi.models import Config
from darabonba.exceptions import DaraException
from darabonba.runtime import RuntimeOptions

from rollart.config import RewardConfig
from rollart.core.errors import ServiceError
from rollart.rewards.transports.base import CallFailed, TransportReply, decode_response, error_text, failure_of

ACCOUNT = "ALIBABA_CLOUD_ACCOUNT_ID"
CONNECT_MS = 10_000


class FunctionComputeTransport:
    """`url` replaces the endpoint of the account in the region."""

    def __init__(self, name: str, region: str | None, url: str | None) -> None:
        self._name = name
        self._region = region or os.environ.get("ALIBABA_CLOUD_REGION_ID", "")
        self._url = url
        self._client: Any = None

    async def start(self) -> None:
        endpoint = urlsplit(self._url or f"https://{self._endpoint()}")
        try:
            self._client = await asyncio.to_thread(self._connect, endpoint.netloc, endpoint.scheme)
        except (CredentialException, DaraException, ValueError) as error:
            raise ServiceError(f"the reward on Function Compute cannot start: {error}") from error

    def _connect(self, endpoint: str, protocol: str) -> Any:
        region = self._region or None
        return Client(Config(credential=Credentials(), region_id=region, endpoint=endpoint, protocol=protocol))

    def _endpoint(self) -> str:
        account = os.environ.get(ACCOUNT, "")
        if not account or not self._region:
            raise ServiceError(
                f"the reward {self._name!r} on Function Compute needs the number of your account in the environment "
                f"variable {ACCOUNT} and a `region`; or give its endpoint as `url`"
            )
        return f"{account}.{self._region}.fc.aliyuncs.com"

    async def close(self) -> None:
        pass  # the SDK opens a session for each call, and closes it

    async def send(self, body: bytes, key: str, deadline: float) -> TransportReply:
        if self._client is None:
            await self.start()
        clock = asyncio.get_running_loop().time
        began = clock()
        options = RuntimeOptions(
            autoretry=False, read_timeout=int(deadline * 1000) + 1, connect_timeout=CONNECT_MS, max_attempts=1
        )
        request = models.InvokeFunctionRequest(body=body)
        headers = models.InvokeFunctionHeaders(common_headers={"Content-Type": "application/json"})
        try:
            result = await self._client.invoke_function_with_options_async(self._name, request, headers, options)
        except Exception as error:  # the SDK's errors have no common base class
            status, after_ms = getattr(error, "status_code", None) or 0, getattr(error, "retry_after", None)
            raise failure_of(
                int(status), f"Function Compute: {error}", after_ms / 1000 if after_ms else None
            ) from error
        payload = result.body.read()
        lower = {name.lower(): value for name, value in (result.headers or {}).items()}
        if "x-fc-error-type" in lower:
            raise CallFailed(f"the function {self._name} failed ({lower['x-fc-error-type']}): {error_text(payload)}")
        response = decode_response(payload)
        return TransportReply(response, clock() - began, response.seconds, response.cold)


def build(reward: RewardConfig, deadline: float, cluster: str | None) -> FunctionComputeTransport:
    return FunctionComputeTransport(str(reward.name), reward.region, reward.url)
