"""An OpenAI-compatible HTTP server over the engine: `python -m kvstored_client.engine serve`.

Read protocol.py (what a request says), runner.py (the engine's thread), service.py (a request's
life), text.py (tokens to text, stop strings), app.py (the routes), serving.py (start and stop).
"""
