"""Chat: from generated text to reasoning, content and tool calls (MODEL.md section 8)."""

from berrylm_ref.chat.reasoning import ReasoningParser
from berrylm_ref.chat.tools import ToolCallParser

__all__ = ["ReasoningParser", "ToolCallParser"]
