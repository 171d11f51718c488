"""One served model for everybody: endpoint, client, store.

- `find`, `serve`: what `--model` names, as an `Endpoint` to ask (engines run as children)
- `Client`: concurrency, retries, and every answer on disk before it is used
- `Store`, `Request`, `Completion`: what is asked and what is kept
- `Broker`, `Worker`: one client for many processes
"""

from selfsynth.serving.broker import Broker, Done, Worker, listen
from selfsynth.serving.client import PROBE, TIMEOUT, Budget, Client, UsedUp
from selfsynth.serving.endpoint import Endpoint, Model, find, public_name, serve
from selfsynth.serving.store import Completion, Request, Store, key_of

__all__ = [
    "PROBE",
    "TIMEOUT",
    "Broker",
    "Budget",
    "Client",
    "Completion",
    "Done",
    "Endpoint",
    "Model",
    "Request",
    "Store",
    "UsedUp",
    "Worker",
    "find",
    "key_of",
    "listen",
    "public_name",
    "serve",
]
