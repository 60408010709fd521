"""AWS Lambda through boto3, which finds credentials and region.

boto3 blocks, so each call has a thread. A cancelled call keeps its thread until its read timeout, but no longer counts
against the concurrency limit.
"""

import asyncio
import base64
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

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
from rollart.rewards.wire import RESPONSE_BYTES

REPORT = re.compile(r"Billed Duration: (\d+) ms")


class LambdaTransport:
    """`url` replaces the endpoint of the region."""

    def __init__(self, name: str, region: str | None, url: str | None, *, concurrency: int, deadline: float) -> None:
        self._name = name
        self._options = {"region_name": region, "endpoint_url": url}
        self._threads = ThreadPoolExecutor(2 * concurrency, thread_name_prefix="lambda")
        self._concurrency, self._deadline = concurrency, deadline
        self._client: Any = None

    async def start(self) -> None:
        config = Config(
            retries={"total_max_attempts": 1},  # RemoteCaller retries
            max_pool_connections=2 * self._concurrency,
            read_timeout=self._deadline + 1,
            connect_timeout=10,
        )
        try:
            self._client = await asyncio.to_thread(boto3.client, "lambda", config=config, **self._options)
        except (BotoCoreError, ValueError) as error:
            raise ServiceError(f"the reward on Lambda cannot start: {error}") from error

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()

    async def send(self, body: bytes, key: str, deadline: float) -> TransportReply:
        if self._client is None:
            await self.start()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            result, payload, first_byte_s = await loop.run_in_executor(self._threads, self._invoke, body, loop.time)
        except ClientError as error:
            about = error.response.get("ResponseMetadata", {})
            after = retry_after(about.get("HTTPHeaders", {}).get("retry-after"))
            raise failure_of(int(about.get("HTTPStatusCode", 0)), str(error), after) from error
        except BotoCoreError as error:
            raise CallFailed(f"Lambda cannot be reached: {error}") from error
        if "FunctionError" in result:
            raise CallFailed(f"the function {self._name} failed: {error_text(payload)}")
        response = decode_response(payload)
        log = base64.b64decode(result.get("LogResult", "")).decode("utf-8", "replace")
        billed = REPORT.search(log)
        return TransportReply(
            response,
            first_byte_s - began,
            int(billed[1]) / 1000 if billed else response.seconds,
            "Init Duration" in log or response.cold,
        )

    def _invoke(self, body: bytes, clock: Any) -> tuple[dict[str, Any], bytes, float]:
        result = self._client.invoke(
            FunctionName=self._name, InvocationType="RequestResponse", LogType="Tail", Payload=body
        )
        first_byte = clock()
        payload = result["Payload"].read(RESPONSE_BYTES + 1)
        if len(payload) > RESPONSE_BYTES:
            result["Payload"].close()
            raise response_too_long()
        return result, payload, first_byte


def build(reward: RewardConfig, deadline: float, cluster: str | None) -> LambdaTransport:
    return LambdaTransport(
        str(reward.name), reward.region, reward.url, concurrency=reward.concurrency, deadline=deadline
    )
