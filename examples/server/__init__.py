"""The server's parts. `python examples/server` starts it, from __main__.py."""
