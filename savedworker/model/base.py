"""What all documents share: frozen pydantic models with a format version."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, field_validator

FORMAT = 1
"""Version of every document that this release writes. Version N reads N-1; a newer one is refused by name."""

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""A duration in seconds."""

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A size in bytes."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""How often something happened, or which one it is."""


def _of_this_age(value: datetime) -> datetime:
    if not 1970 <= value.year <= 9000:  # so that a sum with any duration of ours and any time zone is a time
        raise ValueError("the year is none in which a worker can run")
    return value


Instant = Annotated[AwareDatetime, AfterValidator(_of_this_age)]
"""A wall-clock time, for people to read. Lease decisions never compare these."""


class Frozen(BaseModel):
    """An immutable document or part of one; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(Frozen):
    """A document that is stored by itself and so carries its format version."""

    format: int = Field(default=FORMAT, ge=1)

    @field_validator("format")
    @classmethod
    def _not_newer(cls, value: int) -> int:
        if value > FORMAT:
            raise ValueError(
                f"format {value} is of a newer version of Saved Worker; this one reads up to {FORMAT}"
            )
        return value
