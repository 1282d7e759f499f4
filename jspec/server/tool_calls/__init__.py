"""Finds tool calls in the text of an answer, and writes the grammars of answers that must call tools."""
