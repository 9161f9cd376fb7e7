"""Structured output: what a client asks for, compiled into a grammar that says which tokens may come next.

Owns: what callers may use. Never does: import torch, or llguidance before the first grammar is wanted.
"""

from __future__ import annotations

from procengine.structured.compiler import GrammarCompiler
from procengine.structured.grammar import Grammar
from procengine.structured.spec import StructuredOutputs

__all__ = ["Grammar", "GrammarCompiler", "StructuredOutputs"]
