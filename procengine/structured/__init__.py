"""Structured output: what a client asks for, compiled into a grammar that says which tokens may come next.

`spec` says what may be asked for, `compiler` makes a grammar of it, `grammar` runs it. Owns: nothing. Never does:
import any of them: every message knows `spec`, and needs neither numpy nor llguidance for that.
"""
