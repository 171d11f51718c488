"""llama.cpp serving one GGUF over HTTP, as a process of its own.

`selfsynth.serving.engines` starts it, under `selfsynth.guard`; it prints one JSON line, {"url",
"version"}, when it answers.

    python -m selfsynth.serving.llama_engine MODEL.gguf --name NAME --slots 8 --context 4096
"""

import argparse
import json
import os
import threading

import xllamacpp


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("--lora", help="a LoRA adapter in GGUF form")
    parser.add_argument("--name", required=True, help="the model's name in requests")
    parser.add_argument("--slots", type=int, default=8, help="requests answered side by side")
    parser.add_argument("--context", type=int, default=4096, help="tokens a slot")
    parser.add_argument("--own-sampling", action="store_true", help="the GGUF's own settings")
    options = parser.parse_args()

    # llama.cpp prints to the file descriptors themselves: keep stdout for our one line.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    params = xllamacpp.CommonParams()
    params.model.path = options.gguf
    params.model_alias = {options.name}
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context
    params.ui = False
    if not options.own_sampling:
        # Else llama.cpp samples from the 40 best tokens above 5 % of the best one, whatever
        # temperature and top_p a request names.
        params.sampling.top_k, params.sampling.min_p, params.sampling.top_p = 0, 0.0, 1.0
    if options.lora:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = options.lora, 1.0
        params.lora_adapters = [adapter]
    server = xllamacpp.Server(params)
    ready = {"url": server.listening_address + "/v1", "version": xllamacpp.__version__}
    print(json.dumps(ready), file=answer, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
