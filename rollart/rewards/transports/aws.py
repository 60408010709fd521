"""AWS Lambda by its own client. Credentials and region are found as boto3 finds them.

boto3 blocks, so each call has a thread; one that nobody waits for any more ends at its read timeout, and until then it
keeps its thread but not its place.
"""

import asyncio
import base64
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from rollart.core.errors import ServiceError
from rollart.rewards.transports.base import Busy, NoAnswer, Refused, Reply, decoded, shown, too_long
from rollart.rewards.transports.http import TRY_AGAIN, retry_after
from rollart.rewards.wire import ANSWER_BYTES

REPORT = re.compile(r"Billed Duration: (\d+) ms")


class LambdaTransport:
    """`url` is another endpoint than that of the region."""

    def __init__(self, name: str, region: str | None, url: str | None, *, concurrency: int, deadline: float) -> None:
        self._name = name
        self._options = {"region_name": region, "endpoint_url": url}
        self._threads = ThreadPoolExecutor(2 * concurrency, thread_name_prefix="lambda")
        self._concurrency, self._deadline = concurrency, deadline
        self._client: Any = None

    async def start(self) -> None:
        config = Config(
            retries={"total_max_attempts": 1},  # we retry, with all that we know
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

    async def send(self, body: bytes, key: str, deadline: float) -> Reply:
        if self._client is None:
            await self.start()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            told, payload, first_byte_s = await loop.run_in_executor(self._threads, self._invoke, body, loop.time)
        except ClientError as error:
            raise _failure(error) from error
        except BotoCoreError as error:
            raise NoAnswer(f"Lambda cannot be reached: {error}") from error
        if "FunctionError" in told:
            raise NoAnswer(f"the function {self._name} failed: {shown(payload)}")
        answer = decoded(payload)
        log = base64.b64decode(told.get("LogResult", "")).decode("utf-8", "replace")
        billed = REPORT.search(log)
        return Reply(
            answer,
            first_byte_s - began,
            int(billed[1]) / 1000 if billed else answer.seconds,
            "Init Duration" in log or answer.cold,
        )

    def _invoke(self, body: bytes, clock: Any) -> tuple[dict[str, Any], bytes, float]:
        told = self._client.invoke(
            FunctionName=self._name, InvocationType="RequestResponse", LogType="Tail", Payload=body
        )
        first_byte = clock()
        payload = told["Payload"].read(ANSWER_BYTES + 1)
        if len(payload) > ANSWER_BYTES:
            told["Payload"].close()
            raise too_long()
        return told, payload, first_byte


def _failure(error: ClientError) -> NoAnswer:
    told = error.response.get("ResponseMetadata", {})
    status = int(told.get("HTTPStatusCode", 0))
    if status in (429, 503):
        return Busy(str(error), retry_after(told.get("HTTPHeaders", {}).get("retry-after")))
    return Refused(str(error)) if 400 <= status < 500 and status not in TRY_AGAIN else NoAnswer(str(error))
