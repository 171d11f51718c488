"""One served model for everybody: endpoint, client, store.

- `find`, `serve`: what `--model` names, as an `Endpoint` to ask (engines run as children)
- `serve_checked`: the same for several, found to answer before anything is asked of them
- `Client`: concurrency, retries, and every answer on disk before it is used
- `BatchClient`: the same by OpenAI's batch protocol, slower and cheaper
- `Store`, `Request`, `Completion`: what is asked and what is kept
- `Broker`, `Worker`: one client for many processes
"""

from selfsynth.serving.batch import BatchClient
from selfsynth.serving.broker import Broker, Done, Worker, listen
from selfsynth.serving.checked import Checked, model_name, serve_checked, usual_concurrency
from selfsynth.serving.client import PROBE, TIMEOUT, Budget, Client, UsedUp, without_system
from selfsynth.serving.endpoint import Endpoint, Model, find, public_name, serve
from selfsynth.serving.store import Completion, Request, Store, key_of

__all__ = [
    "PROBE",
    "TIMEOUT",
    "BatchClient",
    "Broker",
    "Budget",
    "Checked",
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
    "model_name",
    "public_name",
    "serve",
    "serve_checked",
    "usual_concurrency",
    "without_system",
]
