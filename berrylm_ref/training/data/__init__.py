"""The training data: generated, seeded, with nothing downloaded. `conversation` makes a sample, `encode` its ids."""

from .conversations import KINDS, conversation
from .encode import encode
from .exchange import Conversation

__all__ = ["KINDS", "Conversation", "conversation", "encode"]
