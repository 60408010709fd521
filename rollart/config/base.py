"""What every section of the run file is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
TorchDevice = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N; auto: by its pool's class"),
]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Conflict(ValueError):
    """Values that cannot go together; `path` leads from the section that noticed to the key to change."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
