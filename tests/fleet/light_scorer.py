"""A teacher's service without a model, for tests."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollart.core.column import Column
from rollart.core.teaching import ScoreRequest, Teaching
from rollart.launch import service
from rollart.launch.rpc import Handler


@contextlib.asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    async def score(request: ScoreRequest) -> Teaching:
        return Teaching(Column.floats([-1.0] * int(request.mask.array.sum())))

    yield {"score": score}


if __name__ == "__main__":
    service.main(build)
