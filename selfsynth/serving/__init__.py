"""One served model for everybody: endpoint, client, store.

- `find`, `serve`: what `--model` names, as an `Endpoint` to ask (engines run as children)
- `Client`: concurrency, retries, and every answer on disk before it is used
- `Store`, `Request`, `Completion`: what is asked and what is kept
- `Broker`, `Worker`: one client for many processes
"""

from selfsynth.serving.broker import Broker, Worker, listen
from selfsynth.serving.client import Client, Usage
from selfsynth.serving.endpoint import Endpoint, Model, find, serve
from selfsynth.serving.store import Completion, Request, Store

__all__ = [
    "Broker",
    "Client",
    "Completion",
    "Endpoint",
    "Model",
    "Request",
    "Store",
    "Usage",
    "Worker",
    "find",
    "listen",
    "serve",
]
