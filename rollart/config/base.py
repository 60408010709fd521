"""What every section of the run file is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
TorchDevice = Annotated[
    str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N; auto: by the class of its pool")
]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Conflict(ValueError):
    """Values that contradict each other; `path` leads from the section that raises it to the key to change."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


class Section(BaseModel):
    """Strict and immutable: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
