"""What all bodies have in common: a body is refused at its first fault.

A few megabytes can hold a million faults; a list of them all, of which the client reads the first, would take the event loop
minutes and the machine gigabytes.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

T = TypeVar("T")


class FirstFault(FailFast):
    """Members of a union must have a hash, which pydantic's own mark lacks."""

    def __hash__(self) -> int:
        return hash(type(self))


Many = Annotated[list[T], FirstFault()]  # a list, read up to its first wrong item


class Body(BaseModel):
    """A body, or an object in it, without fields that are not listed."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def one_unknown(cls, given: Any) -> Any:
        """``given`` with at most one unknown field, the first: it is the one that is named."""
        if not isinstance(given, dict):
            return given
        others = [name for name in given if name not in cls.model_fields][1:]
        return {name: given[name] for name in given.keys() - set(others)} if others else given
