"""The HTTP front door: OpenAI's API, and Anthropic's, over a group that it talks to as any client does.

Owns: HTTP, the shapes of requests and answers, and server-sent events. Never does: schedule, tokenize what is generated
from, or touch another process's state: everything goes through the two client sockets (docs/PROTOCOL.md).
"""
